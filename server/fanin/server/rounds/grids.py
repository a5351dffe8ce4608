"""The grid that a Round starts on: a function of its base Version, so a restart and ``fanin verify`` compute the same.

- A Version that a Round published: the grid that this Round ended in.
- A Version that a rollback published: the grid of the Version whose parameters it restores.
- Any other Version (the first one, one from outside, one of another Run): the first grid of its parameters.
"""

from fanin.edge.tensors import TensorTable
from fanin.protos.messages import CodecSpec, Version
from fanin.server.aggregation.folding import first_grid_of
from fanin.server.rounds.effects import parameter_pieces
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.sqlite.rounds import RoundStore
from fanin.server.storage.sqlite.runs import RunStore


def recorded_grid(base: Version, runs: RunStore, rounds: RoundStore) -> tuple[int, ...] | None:
    """The grid that the record holds for a Version; None if its first Round starts on a first grid."""
    run_id, number = base.run_id, base.number
    while (adopted := runs.adopted(run_id, number)) is not None:
        from_run, number = adopted
        if from_run != run_id:
            return None
    return rounds.grid_after(run_id, number)


def first_grid_from(base: Version, table: TensorTable, codec: CodecSpec, blobs: Blobs) -> tuple[int, ...]:
    """The first grid of a Version's parameters. Raises NotFound, Corrupted."""
    return first_grid_of(table, parameter_pieces(blobs, base, table), codec)

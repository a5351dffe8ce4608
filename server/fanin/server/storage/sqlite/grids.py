"""The grid that a Round starts on, as far as the record holds it.

The grid is a function of the Round's base Version, so a restart and ``fanin verify`` compute the same one:

- A Version that a Round published: the grid in which that Round ended.
- A Version that a rollback published: the grid of the Version whose parameters it restores.
- Any other Version (number 0, one from outside, one of another Run): no recorded grid. The Round starts on the first
  grid of the parameters (``aggregation.parameters.first_grid_from``).
"""

from fanin.protos.messages import Version
from fanin.server.storage.sqlite.rounds import RoundStore
from fanin.server.storage.sqlite.runs import RunStore


def recorded_grid(base: Version, runs: RunStore, rounds: RoundStore) -> tuple[int, ...] | None:
    """Return the recorded grid of a Version: an exponent for each block, or None without a record."""
    run_id, number = base.run_id, base.number
    while (source := runs.adopted(run_id, number)) is not None:
        source_run, number = source
        if source_run != run_id:
            return None
    return rounds.grid_after(run_id, number)

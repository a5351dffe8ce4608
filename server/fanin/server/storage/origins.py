"""The grid and the outer state that a Round starts on, as far as the record holds them.

Both are functions of the Round's base Version, so a restart and ``fanin verify`` compute the same ones:

- A Version that a Round published: the grid and the state in which that Round ended.
- A Version that a rollback published: those of the Version whose parameters it restores.
- Any other Version (number 0, one from outside, one of another Run): none are recorded. The Round starts on the first
  grid of the parameters (``aggregation.parameters.first_grid_from``), and the optimizer starts from its initial state.

The steps of the outer optimizer are counted along the same chain of Versions.
"""

from fanin.protos.messages import Version
from fanin.server.storage.protocols.archive import RoundArchive, RunArchive
from fanin.server.storage.records import OuterState


def recorded_grid(base: Version, runs: RunArchive, rounds: RoundArchive) -> tuple[int, ...] | None:
    """Return the recorded grid of a Version: an exponent for each block, or None without a record."""
    number = _origin(base, runs)
    return None if number is None else rounds.grid_after(base.run_id, number)


def recorded_state(base: Version, runs: RunArchive, rounds: RoundArchive) -> OuterState:
    """Return the recorded outer state of a Version, empty without a record."""
    number = _origin(base, runs)
    return {} if number is None else rounds.outer_state_after(base.run_id, number)


def recorded_steps(base: Version, runs: RunArchive) -> int:
    """Return the number of outer steps since the optimizer's initial state, of which this Version has the last one."""
    run_id, number, num_steps = base.run_id, base.number, 0
    while True:
        # The base of a Round is the Version before the one that it publishes.
        start = runs.lineage_start(run_id, number)
        num_steps += number - start
        source = runs.adopted(run_id, start)
        if source is None or source[0] != run_id:
            return num_steps
        number = source[1]


def _origin(base: Version, runs: RunArchive) -> int | None:
    """Return the Version of the same Run that has these parameters first, or None if they are another Run's."""
    run_id, number = base.run_id, base.number
    while (source := runs.adopted(run_id, number)) is not None:
        source_run, number = source
        if source_run != run_id:
            return None
    return number

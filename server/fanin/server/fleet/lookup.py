"""The Run of an Assignment or a Publication, and its driver."""

from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, NotFound, Unavailable
from fanin.protos.names import check_name
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driving.driver import RunDriver


def run_of(assignment_id: str) -> str:
    """Return the Run of an Assignment's or a Publication's id, ``run.round.tag``. Raises NotFound for another form."""
    check_name("assignment", assignment_id)
    run_id, *tail = assignment_id.rsplit(".", 2)
    if len(tail) != 2:
        raise NotFound(f"assignment {assignment_id}: got no run and round in it; check in again")
    return run_id


def driver_of(runs: Runs, assignment_id: str) -> RunDriver:
    """Return the driver of the Run of an Assignment's id.

    The tag is not checked here: the Run's ``intake`` does that.

    Raises:
        NotFound: The id has another form, or there is no such Run.
        Unavailable: The Run is broken and waits for its operator. Its devices keep their Updates.
    """
    run_id = run_of(assignment_id)
    tag = short(assignment_id.rsplit(".", 1)[1])
    try:
        return runs.driver(run_id)
    except NotFound as exc:
        raise NotFound(f"assignment {tag} of run {run_id}: {exc}; check in again") from exc
    except Conflict as exc:
        raise Unavailable(f"assignment {tag} of run {run_id}: {exc}") from exc

"""The driver of the Run that an Assignment belongs to."""

from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, NotFound, Unavailable
from fanin.protos.names import check_name
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driver import RunDriver


def driver_of(runs: Runs, assignment_id: str) -> RunDriver:
    """Return the driver of the Run of an Assignment's or a Publication's id, ``run.round.tag``.

    The tag is not checked here: the Run's ``intake`` does that.

    Raises:
        NotFound: The id has another form, or there is no such Run.
        Unavailable: The Run is broken and waits for its operator. Its devices keep their Updates.
    """
    check_name("assignment", assignment_id)
    run_id, *tail = assignment_id.rsplit(".", 2)
    if len(tail) != 2:
        raise NotFound(f"assignment {assignment_id}: got no run and round in it; check in again")
    try:
        return runs.driver(run_id)
    except NotFound as exc:
        raise NotFound(f"assignment {short(tail[1])} of run {run_id}: {exc}; check in again") from exc
    except Conflict as exc:
        raise Unavailable(f"assignment {short(tail[1])} of run {run_id}: {exc}") from exc

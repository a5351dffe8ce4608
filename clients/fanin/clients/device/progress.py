"""What a device reports to the person who started it: one line for each step of a Round.

The lines are logged at INFO by the client. ``fanin join`` shows them on standard error; an app does not see them unless
it configures the logger ``fanin.clients``.
"""

from fanin.clients.device import session as s
from fanin.protos.messages import Assigned, UpdateState, UploadReply


def progress(session: s.Session, event: s.Event) -> str | None:
    """Return the line for an event that this session is about to process; None if it needs none."""
    match event:
        case s.Enrolled():
            return "enrolled; waiting for work"
        case s.Answered(answer=Assigned(assignment=work)):
            return f"round {work.round} of run {work.run_id}: fetching version {work.version.number}"
        case s.Fetched():
            return f"{_round(session)}: training"
        case s.Trained():
            return f"{_round(session)}: uploading"
        case s.Replied(reply=UploadReply(update_state=UpdateState.ACCEPTED)):
            return f"{_round(session)}: update accepted ({session.num_accepted + 1} so far); waiting for work"
        case s.Replied(reply=UploadReply(update_state=UpdateState.DISCARDED)) if session.phase is s.Phase.SENDING:
            return f"{_round(session)}: update discarded, the round has closed; waiting for work"
        case s.Replied() if session.phase is s.Phase.REPORTING:
            return f"{_round(session)}: given up; waiting for work"
        case _:
            return None


def _round(session: s.Session) -> str:
    assert session.assignment is not None, f"{session.phase} without an assignment"
    return f"round {session.assignment.round} of run {session.assignment.run_id}"

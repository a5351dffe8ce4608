"""The progress lines of a device: one line for each step of a Round.

The client logs the lines at INFO. ``fanin join`` shows them on standard error; an app does not show them unless it
configures the logger ``fanin.clients``.
"""

from fanin.clients.device.session import events as e
from fanin.clients.device.session import machine as s
from fanin.edge.floors.floor import POLICY_CODES
from fanin.protos.messages import Assigned, ExchangeAnswer, ExchangeEnd, UpdateState, UploadReply
from fanin.protos.texts import counted


def progress(session: s.Session, event: e.SessionEvent) -> str | None:
    """Return the line for an event that this session is about to process; None if it needs none."""
    match event:
        case e.Enrolled():
            return "enrolled; waiting for work"
        case e.Answered(answer=Assigned(assignment=work)):
            return f"round {work.round} of run {work.run_id}: fetching version {work.version.number}"
        case e.Fetched(before=(first, *_)):
            return f"{_round(session)}: exchanging messages of the phase {first}"
        case e.Exchanged(outcome=ExchangeAnswer()) if not session.is_accepted and len(session.exchanges) == 1:
            return f"{_round(session)}: training"
        case e.Exchanged(outcome=ExchangeEnd(reason=reason)):
            return f"{_round(session)}: over ({reason}); waiting for work"
        case e.Tuned():
            return f"run {event.run_id}: {tuned_text(event)}"
        case e.Fetched():
            return f"{_round(session)}: training"
        case e.UpdateStored():
            return f"{_round(session)}: uploading"
        case e.Replied(reply=UploadReply(update_state=UpdateState.ACCEPTED)):
            return f"{_round(session)}: update accepted ({session.num_accepted + 1} so far); waiting for work"
        case e.Replied(reply=UploadReply(update_state=UpdateState.DISCARDED)) if (
            session.phase is e.SessionPhase.SENDING
        ):
            return f"{_round(session)}: update discarded, the round has closed; waiting for work"
        case e.WorkPaused(reason=reason) if session.assignment is not None:
            return f"{_round(session)}: paused ({reason})"
        case e.Unable(is_lasting=True, code=code) if code in POLICY_CODES:
            return f"{_round(session)}: refused by the privacy floor of this device, which fanin policy show prints"
        case e.Unable(is_lasting=True):
            return (
                f"{_round(session)}: the data do not fit; this device trains again once its data or the Bundle changes"
            )
        case e.Replied() if session.phase is e.SessionPhase.REPORTING:
            return f"{_round(session)}: given up; waiting for work"
        case _:
            return None


def tuned_text(event: e.Tuned) -> str:
    """Return the result of a fine-tuning, with the quality of both models on the validation part."""
    before, after, epochs = event.before, event.after, counted(event.epochs, "epoch")
    text = f"version {event.version} fine-tuned for {epochs}"
    if not after.num_examples:
        return f"{text}; this device has no validation part"
    pair = (before.loss_sum / before.num_examples, after.loss_sum / after.num_examples)
    name, (first, second) = "loss", pair
    if after.num_predictions:
        name, first, second = "accuracy", before.accuracy_float, after.accuracy_float
    return f"{text}; {name} {first:.4f} before and {second:.4f} after, on {counted(after.num_examples, 'example')}"


def _round(session: s.Session) -> str:
    assert session.assignment is not None, f"{session.phase} without an assignment"
    return f"round {session.assignment.round} of run {session.assignment.run_id}"

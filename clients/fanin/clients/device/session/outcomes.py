"""The translation of errors to session events: one event for each pair of action and error.

Every event returned here has a row in ``machine.TRANSITIONS``, so no error of a coordinator or an app stops a session
unexpectedly.
"""

from fanin.clients.device.session import events as e
from fanin.protos.errors import (
    Conflict,
    Corrupted,
    FaninError,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unauthenticated,
    Unavailable,
    Untrusted,
)


def event_of(action: e.SessionAction, error: FaninError | OSError) -> e.SessionEvent:
    """Return the event for an action that raised this error."""
    reason = str(error)
    if isinstance(action, e.Enroll) and isinstance(error, Untrusted):
        # The first call of this process: its address, its authority or its clock is wrong. A device that has enrolled
        # tries again, because a hotel's network or the coordinator's certificate may be the cause, and both pass.
        return e.Denied(reason=reason)
    if isinstance(error, Unavailable | StorageFull | OSError):
        return e.Lost(reason=reason)
    if isinstance(action, e.Train):
        # Training calls no coordinator, so an error of any class is this device's own.
        return e.Unable(reason=reason)
    if isinstance(error, Unauthenticated | PermissionDenied):
        return e.Denied(reason=reason)
    match action:
        case e.Enroll() | e.Poll() | e.Fetch() if isinstance(error, Corrupted):
            # The coordinator's own state is damaged, and its operator can repair it. Until then all other devices would
            # fail, too, so this one keeps its Assignment.
            return e.Lost(reason=reason)
        case e.Refresh() | e.Fetch() | e.Send():
            is_moot = isinstance(error, NotFound | Conflict)
            return e.Moot(reason=reason) if is_moot else e.Unable(reason=reason)
        case e.Abandon():
            return e.Moot(reason=reason)
        case _:
            # An enrollment or a check-in whose request or reply is invalid: this device cannot repair it.
            return e.Denied(reason=reason)

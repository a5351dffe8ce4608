"""What an error means to a device's session: one event for each pair of action and error.

Every event returned here has a row in ``session.TRANSITIONS``, so no error of a coordinator or of an app can stop a
session by surprise. The client and the virtual device share this function.
"""

from fanin.clients.device import session as s
from fanin.protos.errors import (
    Conflict,
    Corrupted,
    FaninError,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unauthenticated,
    Unavailable,
)


def event_of(action: s.Action, error: FaninError | OSError) -> s.Event:
    """Return the event for an action that raised this error."""
    reason = str(error)
    if isinstance(error, Unavailable | StorageFull | OSError):
        return s.Lost(reason=reason)
    if isinstance(action, s.Train):
        # Training calls no coordinator: whatever the class says, the error is this device's own.
        return s.Unable(reason=reason)
    if isinstance(error, Unauthenticated | PermissionDenied):
        return s.Denied(reason=reason)
    match action:
        case s.Enroll() | s.CheckIn() | s.Fetch() if isinstance(error, Corrupted):
            # The coordinator's own state is damaged, and its operator can repair it. Until then all other devices would
            # fail as well, so this one keeps its Assignment.
            return s.Lost(reason=reason)
        case s.Refresh() | s.Fetch() | s.Send():
            is_moot = isinstance(error, NotFound | Conflict)
            return s.Moot(reason=reason) if is_moot else s.Unable(reason=reason)
        case s.GiveUp():
            return s.Moot(reason=reason)
        case _:
            # An enrollment or a check-in whose request or reply is invalid: this device cannot repair it.
            return s.Denied(reason=reason)

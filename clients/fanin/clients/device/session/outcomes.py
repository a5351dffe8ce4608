"""The outcomes of a session's actions: the event of each pair of action and error, and a Bundle that does not fit.

Every event returned here has a row in ``machine.TRANSITIONS``, so no error of a coordinator or an app stops a session
unexpectedly.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fanin.clients.device.session import events as e
from fanin.protos.errors import (
    Conflict,
    Corrupted,
    FaninError,
    NotFound,
    PermissionDenied,
    StorageFull,
    StorageUnavailable,
    Unauthenticated,
    Unavailable,
    Untrusted,
    coded,
)
from fanin.protos.messages import Assigned, Assignment


def event_of(action: e.SessionAction, error: FaninError | OSError) -> e.SessionEvent:
    """Return the event for an action that raised this error."""
    # A device reports the reason to the coordinator, or logs it. The error that ends a session has its code itself.
    reason = coded(error) if isinstance(error, FaninError) else str(error)
    code = error.code if isinstance(error, FaninError) else ""
    if isinstance(action, e.Enroll) and isinstance(error, Untrusted):
        # The first call of this process: its address, its authority or its clock is wrong. A device that has enrolled
        # tries again, because a hotel's network or the coordinator's certificate may be the cause, and both pass.
        return _denied(error)
    if isinstance(error, Unavailable | StorageFull | OSError):
        is_local = isinstance(error, StorageFull | StorageUnavailable | OSError) or isinstance(action, e.Train)
        return e.Lost(reason=reason, code=code, is_local=is_local)
    if isinstance(action, e.Train):
        # Training calls no coordinator, so an error of any class is this device's own.
        return e.Unable(reason=reason, code=code)
    if isinstance(error, Unauthenticated | PermissionDenied):
        return _denied(error)
    match action:
        case e.Enroll() | e.Poll() | e.Fetch() if isinstance(error, Corrupted):
            # The coordinator's own state is damaged, and its operator can repair it. Until then all other devices would
            # fail, too, so this one keeps its Assignment.
            return e.Lost(reason=reason, code=code)
        case e.Refresh() | e.Tune() | e.Fetch() | e.SendMessage() | e.Send():
            is_moot = isinstance(error, NotFound | Conflict)
            return e.Moot(reason=reason, code=code) if is_moot else e.Unable(reason=reason, code=code)
        case e.Abandon():
            return e.Moot(reason=reason, code=code)
        case _:
            # An enrollment or a check-in whose request or reply is invalid: this device cannot repair it.
            return _denied(error)


def _denied(error: FaninError) -> e.Denied:
    return e.Denied(reason=str(error), code=error.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitBundle:
    """A Bundle, the reason why the examples do not fit, and whether the device has other examples now.

    The device reports this once. Until it has other examples, it gives up the Assignments of this Bundle without a
    download.
    """

    bundle_sha256: str
    reason: str
    has_changed: Callable[[], bool]

    def is_of(self, assignment: Assignment) -> bool:
        """Return whether an Assignment is of this Bundle."""
        return assignment.bundle.manifest.sha256 == self.bundle_sha256

    def is_repeated_by(self, action: e.SessionAction, event: e.SessionEvent) -> bool:
        """Return whether the outcome of an action repeats the observations of the failed training."""
        match event:
            case e.Answered(answer=Assigned(assignment=work)):
                return self.is_of(work)
            case e.Unable():
                return isinstance(action, e.Fetch)
            case e.Replied():
                return isinstance(action, e.Abandon)
            case _:
                return False

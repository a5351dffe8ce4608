"""The Bundle that the examples of a device do not fit.

The device reports this once. Until it has other examples, it gives up the Assignments of this Bundle without a
download.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fanin.clients.device.session import events as e
from fanin.protos.messages import Assigned, Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitBundle:
    """A Bundle, the reason why the examples do not fit, and whether the device has other examples now."""

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

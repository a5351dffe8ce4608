"""Every error that fanin raises on purpose, and what a peer is told of each.

    FaninError
    +-- InvalidInput            the caller's own bytes or values are wrong; sending them again will not help
    |   +-- InvalidBundle       manifest, signature or artifact does not verify
    |   +-- InvalidVersion      a Version does not verify, or is older than one already seen
    |   +-- InvalidUpdate       an Update has another shape, Version, Run, digest or format than its Assignment
    |   +-- InvalidPlan         a Plan that cannot be carried out as written
    |   +-- UnsupportedModel    a model that cannot become a Bundle
    |   +-- Diverged            a training whose loss, gradients or parameters are not finite; a restart repeats it
    +-- Unauthenticated         nobody we know: unknown device, bad signature, wrong token
    +-- PermissionDenied        somebody we know, who may not do this
    +-- NotFound                no such Run, Version, Round, Assignment or Chunk
    +-- Conflict                right in itself, but the state has moved on: look again, then decide
    +-- StorageFull             no space left for spool, blobs or database; nothing was half-written
    +-- Unavailable             the peer cannot be reached, or said to come back; retry with back-off
    |   +-- Untrusted           the peer was reached, but its certificate is not one we trust
    |   +-- Untimely            a signed call that came before, or whose time is far from ours; sign it anew
    +-- RuntimeMissing          a graph needs a runtime library that is not installed here
    +-- Corrupted               our own durable state does not verify

``STATUS`` maps each class to a gRPC status name and to the text that a peer may see: errors about the
peer's own input are told in full, errors about our inside only by a fixed sentence (the log has the rest).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class FaninError(Exception):
    """Base of all; carries one sentence: what, got, expected, what to do."""


class InvalidInput(FaninError):
    """The caller's own bytes or values are wrong."""


class InvalidBundle(InvalidInput):
    """A manifest, its signature or one of its artifacts does not verify."""


class InvalidVersion(InvalidInput):
    """A Version does not verify, or is older than one already seen."""


class InvalidUpdate(InvalidInput):
    """An Update does not fit its Assignment."""


class InvalidPlan(InvalidInput):
    """A Plan cannot be carried out as written."""


class UnsupportedModel(InvalidInput):
    """A model cannot become a Bundle."""


class Diverged(InvalidInput):
    """The loss, the gradients or the parameters of a training are not finite."""


class Unauthenticated(FaninError):
    """Nobody we know."""


class PermissionDenied(FaninError):
    """Somebody we know, who may not do this."""


class NotFound(FaninError):
    """The thing asked for does not exist."""


class Conflict(FaninError):
    """The request is right in itself, but the state has moved on."""


class StorageFull(FaninError):
    """No space left; nothing was half-written."""


class Unavailable(FaninError):
    """The peer cannot be reached now."""


class Untrusted(Unavailable):
    """The peer's certificate is not one we trust."""


class Untimely(Unavailable):
    """A signed call whose time is not one that is served now."""


class RuntimeMissing(FaninError):
    """A runtime library is not installed here."""


class Corrupted(FaninError):
    """Our own durable state does not verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a peer is told of an error class.

    ``code`` is the name of a gRPC status; ``public_text`` replaces the message, or is None where the
    message speaks of nothing but the peer's own input and is told in full.
    """

    code: str
    public_text: str | None = None


STATUS: Mapping[type[FaninError], Status] = MappingProxyType(
    {
        InvalidInput: Status(code="INVALID_ARGUMENT"),
        InvalidBundle: Status(code="INVALID_ARGUMENT"),
        InvalidVersion: Status(code="INVALID_ARGUMENT"),
        InvalidUpdate: Status(code="INVALID_ARGUMENT"),
        InvalidPlan: Status(code="INVALID_ARGUMENT"),
        UnsupportedModel: Status(code="INVALID_ARGUMENT"),
        Diverged: Status(code="INVALID_ARGUMENT"),
        # The caller is not told which check failed: that would help to guess the next one.
        Unauthenticated: Status(code="UNAUTHENTICATED", public_text="not authenticated"),
        PermissionDenied: Status(code="PERMISSION_DENIED", public_text="not allowed"),
        NotFound: Status(code="NOT_FOUND"),
        Conflict: Status(code="FAILED_PRECONDITION"),
        StorageFull: Status(
            code="RESOURCE_EXHAUSTED", public_text="the coordinator has no space left; try again later"
        ),
        Unavailable: Status(code="UNAVAILABLE", public_text="try again later"),
        Untrusted: Status(code="UNAVAILABLE", public_text="try again later"),
        Untimely: Status(
            code="UNAVAILABLE",
            public_text="the time of this signed call was used before, or is far from the coordinator's clock; "
            "set the clock by fanin-server-time and sign the call anew",
        ),
        RuntimeMissing: Status(code="FAILED_PRECONDITION"),
        Corrupted: Status(code="DATA_LOSS", public_text="the coordinator's own state does not verify"),
    }
)

_BY_NAME: Mapping[str, type[FaninError]] = MappingProxyType({error.__name__: error for error in STATUS})


def status_of(error: FaninError) -> Status:
    """The row of ``STATUS`` for an error (each concrete class has its own)."""
    return STATUS[type(error)]


def public_text(error: FaninError) -> str:
    """The sentence that a peer may see."""
    text = status_of(error).public_text
    return str(error) if text is None else text


def error_named(name: str, message: str) -> FaninError | None:
    """The error that a peer named in its reply, rebuilt; None for a name that we do not know."""
    kind = _BY_NAME.get(name)
    return None if kind is None else kind(message)

"""The error classes of fanin, and the text of each error for peers.

    FaninError
    +-- InvalidInput            the caller's bytes or values are wrong; a retry does not help
    |   +-- InvalidBundle       a manifest, signature or artifact does not verify
    |   +-- InvalidVersion      a Version does not verify, or is older than one that was verified
    |   +-- InvalidUpdate       an Update has another shape, Version, Run, digest or format than its Assignment
    |   +-- InvalidPlan         a Plan is not valid
    |   +-- UnsupportedModel    a model cannot be exported to a Bundle
    |   +-- Diverged            loss, gradients or parameters are not finite; a restart repeats the divergence
    +-- Unauthenticated         unknown device, wrong signature or wrong token
    +-- PermissionDenied        the caller is known but may not do this
    +-- NotFound                no such Run, Version, Round, Assignment or Chunk
    +-- Conflict                the request is valid, but the state has changed; read the state, then decide
    |   +-- Superseded          another coordinator drives the Run now; a retry here does not help
    +-- StorageFull             no space, quota or file size left to write; no partial data was written
    +-- Unavailable             the peer cannot be reached or asks to wait; retry with back-off
    |   +-- Throttled           the caller calls too often; its other calls wait
    |   +-- Untrusted           the peer was reached, but cannot be trusted: certificate, TLS or protocol
    |   +-- StorageUnavailable  a disk or database cannot be written now, for another reason than its size
    |   +-- Untimely            a signed call was repeated, or its time is far from the coordinator's; sign it again
    +-- RuntimeMissing          a graph needs a runtime library that is not installed
    +-- Corrupted               our own durable state does not verify

Each error has a code beside its text, such as FN-0201. The code is stable from release to release; the text is not.
``fanin.protos.codes`` has the meaning of each code (``fanin explain CODE``). An error of another package that names no
code has that of its class.

``STATUS`` maps each class to a gRPC status name and to the text for peers. A peer receives the full message of an error
about its own input or its own call. For an error inside the coordinator it receives a fixed sentence, and the log has
the message. For an exception of another package it receives ``foreign_text``, which names no file of this machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

MAX_FOREIGN_CHARS: Final = 200
"""Longest text of an exception of another package. A device sends it to the coordinator in a report."""
CODE: Final = re.compile(r"FN-[0-9]{4}")
"""The form of a code."""
_PATH: Final = re.compile(r"""(?<=['"])/[^'"]*|(?<![\w.])/[\w.~-][^\s'")\],;:]*""")


class FaninError(Exception):
    """Base class. The message names the failure, the received and the expected value, and the next step.

    Args:
        message: One line.
        code: The code of the mistake, ``FN-`` and four digits; default: the code of the class.
    """

    class_code: ClassVar[str] = "FN-0001"

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code or self.class_code
        self.add_note(f"{self.code}: `fanin explain {self.code}` says more")


class InvalidInput(FaninError):
    """The caller's bytes or values are wrong."""

    class_code: ClassVar[str] = "FN-0002"


class InvalidBundle(InvalidInput):
    """A manifest, its signature or one of its artifacts does not verify."""

    class_code: ClassVar[str] = "FN-0003"


class InvalidVersion(InvalidInput):
    """A Version does not verify, or is older than one that was verified."""

    class_code: ClassVar[str] = "FN-0004"


class InvalidUpdate(InvalidInput):
    """An Update does not fit its Assignment."""

    class_code: ClassVar[str] = "FN-0005"


class InvalidPlan(InvalidInput):
    """A Plan is not valid."""

    class_code: ClassVar[str] = "FN-0006"


class UnsupportedModel(InvalidInput):
    """A model cannot be exported to a Bundle."""

    class_code: ClassVar[str] = "FN-0007"


class Diverged(InvalidInput):
    """The loss, the gradients or the parameters of a training are not finite."""

    class_code: ClassVar[str] = "FN-0008"


class SubjectError(ValueError):
    """A caller's mistake in a value that has other names elsewhere, such as that of a key in a file.

    Args:
        subject: The value, as the caller of the constructor knows it.
        fault: The received and the expected value, without the subject.
    """

    def __init__(self, subject: str, fault: str) -> None:
        super().__init__(f"{subject}: {fault}")
        self.fault = fault


class Unauthenticated(FaninError):
    """The caller is unknown, or its signature or token is wrong."""

    class_code: ClassVar[str] = "FN-0009"


class PermissionDenied(FaninError):
    """The caller is known but may not do this."""

    class_code: ClassVar[str] = "FN-0010"


class NotFound(FaninError):
    """The requested object does not exist."""

    class_code: ClassVar[str] = "FN-0011"


class Conflict(FaninError):
    """The request is valid, but the state has changed."""

    class_code: ClassVar[str] = "FN-0012"


class Superseded(Conflict):
    """A driver wrote to a Run that another driver has taken. Nothing was written."""

    class_code: ClassVar[str] = "FN-0013"


class StorageFull(FaninError):
    """No space is left; no partial data was written. ``problem`` is cause and remedy without a path, for operators."""

    class_code: ClassVar[str] = "FN-0014"

    def __init__(
        self, message: str, problem: str = "no space is left on the disk; free some", *, code: str = ""
    ) -> None:
        super().__init__(message, code=code)
        self.problem = problem


class Unavailable(FaninError):
    """The peer cannot be reached now."""

    class_code: ClassVar[str] = "FN-0015"


class Throttled(Unavailable):
    """The caller calls too often."""

    class_code: ClassVar[str] = "FN-0016"


class Untrusted(Unavailable):
    """The peer was reached, but this client cannot trust it. A retry does not help."""

    class_code: ClassVar[str] = "FN-0017"


class StorageUnavailable(Unavailable):
    """A disk or a database cannot be written now; nothing was written. ``problem`` is as in ``StorageFull``."""

    class_code: ClassVar[str] = "FN-0018"

    def __init__(
        self, message: str, problem: str = "the disk or the database cannot be used now; see the log", *, code: str = ""
    ) -> None:
        super().__init__(message, code=code)
        self.problem = problem


class Untimely(Unavailable):
    """A signed call was repeated, or its time is far from the coordinator's clock."""

    class_code: ClassVar[str] = "FN-0019"


class RuntimeMissing(FaninError):
    """A runtime library is not installed."""

    class_code: ClassVar[str] = "FN-0020"


class Corrupted(FaninError):
    """Our own durable state does not verify."""

    class_code: ClassVar[str] = "FN-0021"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The reply to a peer for an error class.

    Attributes:
        grpc: Name of the gRPC status.
        public_text: Text that replaces the message. None if the message is only about the peer's own input. The peer
            then receives the full message.
    """

    grpc: str
    public_text: str | None = None


STATUS: Mapping[type[FaninError], Status] = MappingProxyType(
    {
        FaninError: Status(grpc="INTERNAL", public_text="internal error; the coordinator's log has the details"),
        InvalidInput: Status(grpc="INVALID_ARGUMENT"),
        InvalidBundle: Status(grpc="INVALID_ARGUMENT"),
        InvalidVersion: Status(grpc="INVALID_ARGUMENT"),
        InvalidUpdate: Status(grpc="INVALID_ARGUMENT"),
        InvalidPlan: Status(grpc="INVALID_ARGUMENT"),
        UnsupportedModel: Status(grpc="INVALID_ARGUMENT"),
        Diverged: Status(grpc="INVALID_ARGUMENT"),
        # The reply does not name the check that failed, because that would help an attacker. See OF_THE_CALL.
        Unauthenticated: Status(grpc="UNAUTHENTICATED", public_text="not authenticated"),
        PermissionDenied: Status(grpc="PERMISSION_DENIED"),
        NotFound: Status(grpc="NOT_FOUND"),
        Conflict: Status(grpc="FAILED_PRECONDITION"),
        Superseded: Status(grpc="FAILED_PRECONDITION", public_text="another coordinator drives this run now"),
        StorageFull: Status(
            grpc="RESOURCE_EXHAUSTED", public_text="the coordinator has no space left; try again later"
        ),
        Unavailable: Status(grpc="UNAVAILABLE", public_text="try again later"),
        Throttled: Status(grpc="RESOURCE_EXHAUSTED"),
        Untrusted: Status(grpc="UNAVAILABLE", public_text="try again later"),
        StorageUnavailable: Status(
            grpc="UNAVAILABLE", public_text="the coordinator cannot write its state now; try again later"
        ),
        Untimely: Status(
            grpc="UNAVAILABLE",
            public_text="the time of this signed call was used before, or is far from the coordinator's clock; "
            "set the clock by fanin-server-time and sign the call again",
        ),
        RuntimeMissing: Status(grpc="FAILED_PRECONDITION"),
        Corrupted: Status(grpc="DATA_LOSS", public_text="the coordinator's own state does not verify"),
    }
)

OF_THE_CALL: Final = frozenset({"FN-0013", "FN-0677", "FN-0678", "FN-0696"}) | {
    *("FN-0670", "FN-1412", "FN-1415", "FN-1492", "FN-1493", "FN-1494", "FN-1495")
}
"""Codes whose text is about the peer's own call, so the peer receives the full message. Of ``Unavailable``: the Run is
driven elsewhere, too many calls are open, the peer is slow, or the Run is paused. Of ``Unauthenticated``: what is wrong
with a token, for a peer that presents its secret, and that the device was removed, for a peer that knows its id."""

_BY_NAME: Mapping[str, type[FaninError]] = MappingProxyType(
    {error.__name__: error for error in STATUS if error is not FaninError}
)
INTERNAL: Final = "Internal"
"""The name, for peers, of an error that has no class of ours, or none but the base."""


def kind_name(error: FaninError) -> str:
    """Return the class name of an error for peers: of a class of another module, that of the nearest above in ours."""
    kind = _kind_of(error)
    return INTERNAL if kind is FaninError else kind.__name__


def status_of(error: FaninError) -> Status:
    """Return the entry of ``STATUS`` for an error."""
    return STATUS[_kind_of(error)]


def _kind_of(error: FaninError) -> type[FaninError]:
    return next(kind for kind in type(error).__mro__ if kind in STATUS)


def public(error: FaninError) -> tuple[str, str]:
    """Return (message, code) of an error for a peer."""
    text = status_of(error).public_text
    if text is None or (type(error) in (Unavailable, Unauthenticated) and error.code in OF_THE_CALL):
        return str(error), error.code
    return text, error.class_code


def coded(error: FaninError) -> str:
    """Return the message of an error and its code in one line."""
    return f"{error} [{error.code}]"


def foreign_text(error: Exception) -> str:
    """Return kind and text of an exception of another package as one short line, without the paths of this machine."""
    # The text of an OSError names a file, also one without a slash.
    text = error.strerror or "" if isinstance(error, OSError) else _PATH.sub("...", str(error))
    line = "".join(char if char.isprintable() else " " for char in f"{type(error).__name__}: {text}")
    return " ".join(line.split()).removesuffix(":")[:MAX_FOREIGN_CHARS]


def error_named(name: str, message: str, code: str) -> FaninError | None:
    """Return an error by the class name and the code in a peer's reply; None for an unknown name."""
    kind = _BY_NAME.get(name)
    return None if kind is None else kind(message, code=code if CODE.fullmatch(code) else "")

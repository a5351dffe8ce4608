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
    |   +-- Untrusted           the peer was reached, but is no coordinator to trust: certificate, TLS or protocol
    |   +-- StorageUnavailable  a disk or database cannot be written now, for another reason than its size
    |   +-- Untimely            a signed call was repeated, or its time is far from the coordinator's; sign it again
    +-- RuntimeMissing          a graph needs a runtime library that is not installed
    +-- Corrupted               our own durable state does not verify

``STATUS`` maps each class to a gRPC status name and to the text for peers. A peer receives the full message of an error
about its own input. For an error inside the coordinator it receives a fixed sentence, and the log has the message. For
an exception of another package it receives ``foreign_text``, which names no file of this machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MAX_FOREIGN_CHARS: Final = 200
"""Longest text of an exception of another package. A device sends it to the coordinator in a report."""
_PATH: Final = re.compile(r"""(?<=['"])/[^'"]*|(?<![\w.])/[\w.~-][^\s'")\],;:]*""")


class FaninError(Exception):
    """Base class. The message names the failure, the received and the expected value, and the next step."""


class InvalidInput(FaninError):
    """The caller's bytes or values are wrong."""


class InvalidBundle(InvalidInput):
    """A manifest, its signature or one of its artifacts does not verify."""


class InvalidVersion(InvalidInput):
    """A Version does not verify, or is older than one that was verified."""


class InvalidUpdate(InvalidInput):
    """An Update does not fit its Assignment."""


class InvalidPlan(InvalidInput):
    """A Plan is not valid."""


class UnsupportedModel(InvalidInput):
    """A model cannot be exported to a Bundle."""


class Diverged(InvalidInput):
    """The loss, the gradients or the parameters of a training are not finite."""


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


class PermissionDenied(FaninError):
    """The caller is known but may not do this."""


class NotFound(FaninError):
    """The requested object does not exist."""


class Conflict(FaninError):
    """The request is valid, but the state has changed."""


class Superseded(Conflict):
    """A driver wrote to a Run that another driver has taken. Nothing was written."""


class StorageFull(FaninError):
    """No space is left; no partial data was written. ``problem`` is cause and remedy without a path, for operators."""

    def __init__(self, message: str, problem: str = "no space is left on the disk; free some") -> None:
        super().__init__(message)
        self.problem = problem


class Unavailable(FaninError):
    """The peer cannot be reached now."""


class Throttled(Unavailable):
    """The caller calls too often."""


class Untrusted(Unavailable):
    """The peer was reached, but it is not a coordinator that this client can trust. A retry does not help."""


class StorageUnavailable(Unavailable):
    """A disk or a database cannot be written now; nothing was written. ``problem`` is as in ``StorageFull``."""

    def __init__(self, message: str, problem: str = "the disk or the database cannot be used now; see the log") -> None:
        super().__init__(message)
        self.problem = problem


class Untimely(Unavailable):
    """A signed call was repeated, or its time is far from the coordinator's clock."""


class RuntimeMissing(FaninError):
    """A runtime library is not installed."""


class Corrupted(FaninError):
    """Our own durable state does not verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The reply to a peer for an error class.

    Attributes:
        code: Name of the gRPC status.
        public_text: Text that replaces the message. None if the message is only about the peer's own input. The peer
            then receives the full message.
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
        # The reply does not name the check that failed, because that would help an attacker.
        Unauthenticated: Status(code="UNAUTHENTICATED", public_text="not authenticated"),
        PermissionDenied: Status(code="PERMISSION_DENIED", public_text="not allowed"),
        NotFound: Status(code="NOT_FOUND"),
        Conflict: Status(code="FAILED_PRECONDITION"),
        Superseded: Status(code="FAILED_PRECONDITION", public_text="another coordinator drives this run now"),
        StorageFull: Status(
            code="RESOURCE_EXHAUSTED", public_text="the coordinator has no space left; try again later"
        ),
        Unavailable: Status(code="UNAVAILABLE", public_text="try again later"),
        Throttled: Status(code="RESOURCE_EXHAUSTED"),
        Untrusted: Status(code="UNAVAILABLE", public_text="try again later"),
        StorageUnavailable: Status(
            code="UNAVAILABLE", public_text="the coordinator cannot write its state now; try again later"
        ),
        Untimely: Status(
            code="UNAVAILABLE",
            public_text="the time of this signed call was used before, or is far from the coordinator's clock; "
            "set the clock by fanin-server-time and sign the call again",
        ),
        RuntimeMissing: Status(code="FAILED_PRECONDITION"),
        Corrupted: Status(code="DATA_LOSS", public_text="the coordinator's own state does not verify"),
    }
)

_BY_NAME: Mapping[str, type[FaninError]] = MappingProxyType({error.__name__: error for error in STATUS})


def status_of(error: FaninError) -> Status:
    """Return the entry of ``STATUS`` for an error. Every class has an entry."""
    return STATUS[type(error)]


def public_text(error: FaninError) -> str:
    """Return the message of an error for a peer."""
    text = status_of(error).public_text
    return str(error) if text is None else text


def foreign_text(error: Exception) -> str:
    """Return kind and text of an exception of another package as one short line, without the paths of this machine."""
    # The text of an OSError names a file, also one without a slash.
    text = error.strerror or "" if isinstance(error, OSError) else _PATH.sub("...", str(error))
    line = "".join(char if char.isprintable() else " " for char in f"{type(error).__name__}: {text}")
    return " ".join(line.split()).removesuffix(":")[:MAX_FOREIGN_CHARS]


def error_named(name: str, message: str) -> FaninError | None:
    """Return an error by the class name in a peer's reply; None for an unknown name."""
    kind = _BY_NAME.get(name)
    return None if kind is None else kind(message)

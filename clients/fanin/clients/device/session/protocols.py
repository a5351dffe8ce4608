"""The device's side of a round protocol: which messages it sends, in which order, before the training and after it.

A protocol is a record of functions. The session asks it for its steps, and knows nothing of their content. ``known``
has the protocols by name.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from fanin.edge.basis import RoundBasis
from fanin.edge.bundles.keys import MESSAGE_CONTEXT, SigningKey
from fanin.edge.masking.agreement import Sign
from fanin.edge.masking.terms import MaskFloor
from fanin.edge.tensors import Int64s
from fanin.protos.calls import device_id_of
from fanin.protos.messages import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A device's message of a phase, and what the device keeps of it for itself.

    Both are durable before the first byte is sent. After that, the message is never made again.
    """

    payload: bytes = b""
    secret: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptExchange:
    """An exchange of an Assignment, as the device's folder has it.

    Attributes:
        message: The device's message.
        answer: The coordinator's message; None before it was received.
    """

    message: Message
    answer: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """The device, as its messages name it.

    Attributes:
        device_id: The device's id: the begin of the digest of its public key.
        public_key: Its public key (hex).
        sign: Signs bytes by the device's key, with the context line of messages (``MESSAGE_CONTEXT``).
        entropy: Returns this number of unpredictable bytes. Only a simulation may seed them.
        sign_in: Signs bytes by the device's key, with another context line: for the protocols of fanin.
        certificate: By an authority, over the public key (``masking.roster.certificate_of``); empty without one.
    """

    device_id: str
    public_key: str
    sign: Callable[[bytes], bytes]
    entropy: Callable[[int], bytes]
    sign_in: Sign
    certificate: bytes = b""


def identity_of(
    key: SigningKey, entropy: Callable[[int], bytes] = os.urandom, certificate: bytes = b""
) -> DeviceIdentity:
    """Return the identity of the device with a key."""
    sign = partial(key.sign, MESSAGE_CONTEXT)
    return DeviceIdentity(
        device_id=device_id_of(key.public),
        public_key=key.public,
        sign=sign,
        entropy=entropy,
        sign_in=key.sign,
        certificate=certificate,
    )


class ProtocolJournal(Protocol):
    """Bytes of a protocol in the device's folder, one value for each Run. They outlive the Assignment."""

    def read(self) -> bytes:
        """Return the bytes; empty at first."""
        ...

    def write(self, data: bytes) -> None:
        """Replace the bytes. They are durable before this returns. Raises StorageFull."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What a step may read.

    Attributes:
        device: The device.
        assignment: The Assignment.
        kept: The exchanges of this Assignment by phase.
        basis: The facts of the Round on which the coordinator agrees.
        journal: The protocol's own bytes of this Run.
        floor: The least that the device accepts of secure aggregation.
    """

    device: DeviceIdentity
    assignment: Assignment
    kept: Mapping[str, KeptExchange]
    basis: RoundBasis
    journal: ProtocolJournal
    floor: MaskFloor


def accept_any(_context: ExchangeContext, _answer: bytes) -> None:
    """Accept every answer."""


def no_message(_context: ExchangeContext) -> Message:
    """Return no bytes: the device only waits for the coordinator's message."""
    return Message()


def keep_journal(_journal: ProtocolJournal) -> None:
    """Leave a journal as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """What a device does in one phase.

    Attributes:
        phase: The name of the phase.
        message: Returns the message. It is called once for each Assignment.
        accept: Raises ValueError for an answer with which the device does not continue. It then gives up.
    """

    phase: str
    message: Callable[[ExchangeContext], Message] = no_message
    accept: Callable[[ExchangeContext, bytes], None] = accept_any


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUpdate:
    """An Update after the codec, before it is masked.

    Attributes:
        values: The encoded values on the Round's grid, without the weight (num_values,).
        counts: The statistics. ``examples`` is the weight.
    """

    values: Int64s
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProtocol:
    """The device's side of a protocol.

    Attributes:
        name: The name of the protocol.
        before: The steps before the training.
        after: The steps after the Update was accepted.
        mask: Returns the payload of an Update (``edge.rings.RingVector``); None: Updates are sent as they are. It is
            called once for each Assignment, and the payload is durable before it is sent.
        end: Called with the journal once an Assignment is over.
        adds_noise: Whether ``mask`` adds the device's share of the noise, if the mechanism of privacy has one.
    """

    name: str
    before: tuple[DeviceStep, ...] = ()
    after: tuple[DeviceStep, ...] = ()
    mask: Callable[[ExchangeContext, EncodedUpdate], bytes] | None = None
    end: Callable[[ProtocolJournal], None] = keep_journal
    adds_noise: bool = False
    steps: Mapping[str, DeviceStep] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = {step.phase: step for step in (*self.before, *self.after)}
        if len(steps) < len(self.before) + len(self.after):
            raise ValueError(f"device protocol {self.name}: got two steps for one phase, expected one")
        object.__setattr__(self, "steps", MappingProxyType(steps))

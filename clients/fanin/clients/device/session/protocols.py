"""The device's side of a round protocol: which messages it sends, in which order, before the training and after it.

A protocol is a record of functions. The session asks it for its steps, and knows nothing of their content. An entry
point of another distribution adds one (``fanin.device_protocols``), under the name of the coordinator's protocol.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Final

from fanin.edge.bundles.keys import MESSAGE_CONTEXT, SigningKey
from fanin.edge.codecs.known import announced, installed_names
from fanin.edge.tensors import Int64s
from fanin.protos.calls import device_id_of
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import MAX_CAPABILITIES, Assignment
from fanin.protos.plans import PLAIN_PROTOCOL, RoundPlan
from fanin.protos.plans.named import Choice, created, wrong_object

GROUP: Final = "fanin.device_protocols"
"""The entry point group of protocols in other distributions. An entry is a factory of a ``DeviceProtocol``, whose
parameters are the options of the Plan."""


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
    """

    device_id: str
    public_key: str
    sign: Callable[[bytes], bytes]
    entropy: Callable[[int], bytes]


def identity_of(key: SigningKey, entropy: Callable[[int], bytes] = os.urandom) -> DeviceIdentity:
    """Return the identity of the device with a key."""
    sign = partial(key.sign, MESSAGE_CONTEXT)
    return DeviceIdentity(device_id=device_id_of(key.public), public_key=key.public, sign=sign, entropy=entropy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What a step may read.

    Attributes:
        device: The device.
        assignment: The Assignment.
        kept: The exchanges of this Assignment by phase.
    """

    device: DeviceIdentity
    assignment: Assignment
    kept: Mapping[str, KeptExchange]


def accept_any(_context: ExchangeContext, _answer: bytes) -> None:
    """Accept every answer."""


def no_message(_context: ExchangeContext) -> Message:
    """Return no bytes: the device only waits for the coordinator's message."""
    return Message()


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
    """

    name: str
    before: tuple[DeviceStep, ...] = ()
    after: tuple[DeviceStep, ...] = ()
    mask: Callable[[ExchangeContext, EncodedUpdate], bytes] | None = None
    steps: Mapping[str, DeviceStep] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = {step.phase: step for step in (*self.before, *self.after)}
        if len(steps) < len(self.before) + len(self.after):
            raise ValueError(f"device protocol {self.name}: got two steps for one phase, expected one")
        object.__setattr__(self, "steps", MappingProxyType(steps))


PLAIN: Final = DeviceProtocol(name=PLAIN_PROTOCOL)
PROTOCOLS: Final[Mapping[str, Callable[..., DeviceProtocol]]] = MappingProxyType({PLAIN_PROTOCOL: lambda: PLAIN})
"""The factories of fanin, by name."""


def protocol_of(spec: RoundPlan) -> DeviceProtocol:
    """Return the protocol that an Assignment names.

    Raises:
        InvalidPlan: Nothing has this name here, or an option is wrong.
    """
    choice = Choice(key="round.protocol", name=spec.protocol, options_key="round.options", options=spec.options)

    def checked(protocol: DeviceProtocol, where: str) -> DeviceProtocol:
        if not isinstance(protocol, DeviceProtocol):
            raise wrong_object(where, protocol, "a DeviceProtocol")
        return protocol

    return created(choice, PROTOCOLS, GROUP, checked=checked)


@cache
def known_protocols() -> tuple[str, ...]:
    """Return the names of the protocols that were installed when this process first called, without ``plain``."""
    return announced("round protocols", (), installed_names(GROUP), MAX_CAPABILITIES)


def step_of(assignment: Assignment, phase: str) -> DeviceStep:
    """Return the step of an Assignment's protocol in a phase."""
    step = protocol_of(assignment.round_protocol).steps.get(phase)
    if step is None:
        raise InvalidInput(f"exchange: got the phase {phase!r}, which the protocol does not have", code="FN-1602")
    return step

"""An attempt of secure aggregation in one process: devices, their journals and the coordinator, with the processor time
of each.

The devices are the production state machines. Each effect is carried out as a shell would: a fact is appended to the
journal as bytes, and only then is a response passed on. Tests take an attempt apart between its phases.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.masking import coordinator, device
from fanin.edge.masking.coordinator import (
    Advertising,
    Attempt,
    Confirming,
    Correction,
    Masking,
    Sharing,
    Unmasking,
    check_advertisement,
    correction_of,
    freeze_confirmations,
    freeze_roster,
    freeze_sharers,
    freeze_survivors,
)
from fanin.edge.masking.journal import AttemptEnded, Forget, Remember, Respond, record_of
from fanin.edge.masking.keystream import MaskStream, TailWords, masked_payload
from fanin.edge.masking.roster import certificate_of
from fanin.edge.masking.sharing import Entropy
from fanin.edge.masking.terms import MaskFloor, MaskIdentity, MaskTerms
from fanin.edge.rings import TAIL_BYTES, RingVector, SignedWords, Words

NOBODY: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainUpdate:
    """What a device contributes: encoded integers in pieces, a weight, and the tail."""

    pieces: Sequence[SignedWords]
    weight: int
    tail: Sequence[int]


@dataclass(slots=True)
class MaskedDevice:
    """A device with its journal. ``seconds`` has the time of each phase, ``ended`` has its earlier attempts."""

    identity: MaskIdentity
    entropy: Entropy
    journal: list[bytes] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    ended: list[AttemptEnded] = field(default_factory=list)
    _state: device.MaskState | None = None

    @property
    def state(self) -> device.MaskState:
        """The state of the device, after it began."""
        assert self._state is not None, "the device began"
        return self._state

    def begin(self, terms: MaskTerms) -> bytes:
        """Begin an attempt, and return the advertisement."""
        with timed(self.seconds, "advertise"):
            (message,) = self.carry_out(device.begin(self.identity, terms, self.ended, self.entropy))
        return message

    def receive(self, message: bytes) -> tuple[bytes, ...]:
        """Return the responses to a message of the coordinator."""
        return self.carry_out(device.receive(self.state, message, self.entropy))

    def masked(self, update: PlainUpdate) -> bytes:
        """Return the masked payload, whose digest is in the journal."""
        layout = self.state.terms.layout
        with timed(self.seconds, "mask"):
            keys = device.mask_keys(self.state)
        with timed(self.seconds, "mask"):
            pieces = list(masked_payload(layout, keys, update.pieces, update.weight, update.tail))
        # Without masks a payload is hashed, too.
        with timed(self.seconds, "hash"):
            hashed = hashlib.sha256()
            for piece in pieces:
                hashed.update(piece)
        self.carry_out(device.masked(self.state, hashed.digest()))
        return b"".join(pieces)

    def finish(self) -> None:
        """End the attempt."""
        self.carry_out((self.state, device.finish(self.state)))

    def carry_out(self, step: device.Step) -> tuple[bytes, ...]:
        """Carry out the effects of a step in their order, and return the responses."""
        self._state, responses = step[0], []
        for effect in step[1]:
            match effect:
                case Remember(fact):
                    self.journal.append(record_of(fact))
                case Respond(message):
                    responses.append(message)
                case Forget(ended):
                    self.journal = []
                    self.ended.append(ended)
        return tuple(responses)


@dataclass(slots=True)
class MaskedAttempt:
    """An attempt, phase by phase. ``absent`` are the indexes of devices that drop out in a phase.

    Attributes:
        terms: The terms.
        devices: The devices; by index in the roster after ``advertise``.
        authority: Public key of the authority.
        seconds: Seconds of the coordinator in each phase.
        phase: The phase of the coordinator.
    """

    terms: MaskTerms
    devices: list[MaskedDevice]
    authority: str
    seconds: dict[str, float] = field(default_factory=dict)
    phase: Attempt = field(init=False)
    total: Words = field(init=False)
    tail: TailWords = field(init=False)

    def __post_init__(self) -> None:
        self.phase = Advertising(terms=self.terms, authority=self.authority)
        self.total = np.zeros(self.terms.layout.num_values, self.terms.layout.ring.dtype)
        self.tail = np.zeros(self.terms.layout.num_tail, np.uint64)

    def advertise(self, absent: Collection[int] = NOBODY) -> Sharing:
        """Run the first phase. Absent devices never come back: they have no index."""
        present = [each for number, each in enumerate(self.devices) if number not in absent]
        messages = [each.begin(self.terms) for each in present]
        assert isinstance(self.phase, Advertising), "the first phase"
        with timed(self.seconds, "advertise"):
            for each, message in zip(present, messages, strict=True):
                check_advertisement(self.phase, each.identity.public, message)
            self.phase = freeze_roster(self.phase, messages)
        self.devices = sorted(present, key=lambda each: each.identity.public)
        return self.phase

    def share(self, absent: Collection[int] = NOBODY) -> Masking:
        """Run the phase of the sealed shares."""
        messages = self._ask("share", range(len(self.devices)), absent)
        assert isinstance(self.phase, Sharing), "the second phase"
        with timed(self.seconds, "share"):
            self._check(messages)
            self.phase = freeze_sharers(self.phase, messages)
        return self.phase

    def mask(self, update_of: Callable[[int], PlainUpdate], absent: Collection[int] = NOBODY) -> Confirming | Unmasking:
        """Run the uploads of the masked Updates. Absent devices mask, and do not upload."""
        assert isinstance(self.phase, Masking), "the third phase"
        members = self.phase.sharers.members
        for index in members:
            with timed(self.seconds, "mask"):
                (delivery,) = coordinator.respond(self.phase, index)
            each, update = self.devices[index], update_of(index)
            with timed(each.seconds, "mask"):
                each.receive(delivery)
            payload = each.masked(update)
            if index not in absent:
                with timed(self.seconds, "mask"):
                    self.add(payload)
        with timed(self.seconds, "mask"):
            self.phase = freeze_survivors(self.phase, [index for index in members if index not in absent])
        return self.phase

    def confirm(self, absent: Collection[int] = NOBODY) -> Unmasking:
        """Run the confirmation of the survivors, which only the threat ``active`` has."""
        assert isinstance(self.phase, Confirming), "the threat is active"
        messages = self._ask("confirm", self.phase.survivors.members, absent)
        with timed(self.seconds, "confirm"):
            self._check(messages)
            self.phase = freeze_confirmations(self.phase, messages)
        return self.phase

    def unmask(self, absent: Collection[int] = NOBODY) -> Correction:
        """Run the last phase, and unmask ``total`` and ``tail``."""
        assert isinstance(self.phase, Unmasking), "the last phase"
        messages = self._ask("unmask", self.phase.survivors.members, absent)
        with timed(self.seconds, "unmask"):
            self._check(messages)
            correction = correction_of(self.phase, messages)
            stream = MaskStream(self.terms.layout, correction.keys)
            stream.add(self.total, 0)
            stream.add_tail(self.tail)
        return correction

    def add(self, payload: bytes) -> None:
        """Add a masked payload to the sum."""
        split = len(payload) - self.terms.layout.num_tail * TAIL_BYTES
        self.total += self.terms.layout.ring.unpacked(memoryview(payload)[:split])
        self.tail += np.frombuffer(payload, "<u8", offset=split)

    def _ask(self, phase: str, indexes: Iterable[int], absent: Collection[int]) -> dict[int, bytes]:
        """Return the last response of each device that is not absent."""
        messages = {}
        for index in indexes:
            with timed(self.seconds, phase):
                received = coordinator.respond(self.phase, index)
            if index not in absent:
                with timed(self.devices[index].seconds, phase):
                    for message in received:
                        messages[index] = self.devices[index].receive(message)[-1]
        return messages

    def _check(self, messages: Mapping[int, bytes]) -> None:
        for index, message in messages.items():
            coordinator.check(self.phase, index, message)


def masked_attempt(terms: MaskTerms, num_devices: int, entropy: Entropy) -> MaskedAttempt:
    """Return an attempt of new devices, certified by a new authority."""
    authority = SigningKey(entropy(32))
    floor = MaskFloor(authority=authority.public)
    devices = []
    for _ in range(num_devices):
        key = SigningKey(entropy(32))
        public = bytes.fromhex(key.public)
        certificate = certificate_of(authority.sign, public)
        identity = MaskIdentity(public=public, sign=key.sign, floor=floor, certificate=certificate)
        devices.append(MaskedDevice(identity, entropy))
    return MaskedAttempt(terms=terms, devices=devices, authority=authority.public)


def pieces_of(values: SignedWords, layout: RingVector, size: int) -> tuple[SignedWords, ...]:
    """Return values in pieces of a size."""
    assert values.size == layout.num_values, "one value for each of the layout"
    return tuple(values[start : start + size] for start in range(0, values.size, size))


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the processor time of a block to a phase. Other programs on the machine do not count."""
    started_s = time.process_time()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - started_s

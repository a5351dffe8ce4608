"""Secure aggregation against a coordinator that lies, phase by phase: certificates, confirmations and journals."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.masked import FixedEntropy
from support.secagg import plan_of
from support.values import assignment

from fanin.clients.device.session.known import protocol_of as device_protocol_of
from fanin.clients.device.session.protocols import (
    DeviceProtocol,
    EncodedUpdate,
    ExchangeContext,
    KeptExchange,
    identity_of,
)
from fanin.edge.basis import RoundBasis
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.masking import messages
from fanin.edge.masking.journal import AttemptEnded, read_journal
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.roster import certificate_of
from fanin.edge.masking.terms import MaskFloor
from fanin.protos.errors import FaninError
from fanin.protos.messages import Statistic
from fanin.server.protocols.facts import adjustment_of
from fanin.server.protocols.known import protocol_of
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.phases import RoundFacts

NUM_DEVICES = 4
NUM_VALUES = 10
AUTHORITY = SigningKey(b"a" * 32)
FLOOR = MaskFloor(threat=Threat.ACTIVE, authority=AUTHORITY.public)
PLAN = plan_of("secagg", NUM_DEVICES, 3, threat="active", authority=AUTHORITY.public, dropout_fraction=0.25)
NAMES = ("examples", "train_loss_q16")


@dataclass
class Journal:
    """A ``ProtocolJournal`` that counts its writes."""

    data: bytes = b""
    num_writes: int = 0

    def read(self) -> bytes:
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data
        self.num_writes += 1


@dataclass
class Device:
    """A device with its protocol, as the session drives it."""

    index: int
    context: ExchangeContext
    protocol: DeviceProtocol = field(default_factory=lambda: device_protocol_of(PLAN.round))

    @property
    def name(self) -> str:
        return self.context.device.device_id

    def message(self, phase: str) -> bytes:
        kept = KeptExchange(message=self.protocol.steps[phase].message(self.context))
        self.context = replace(self.context, kept={**self.context.kept, phase: kept})
        return kept.message.payload

    def accept(self, phase: str, answer: bytes) -> None:
        self.protocol.steps[phase].accept(self.context, answer)

    def masked(self) -> bytes:
        assert self.protocol.mask is not None
        values = np.arange(NUM_VALUES, dtype=np.int64) - self.index
        return self.protocol.mask(self.context, EncodedUpdate(values=values, counts={NAMES[0]: 2 + self.index}))

    def restart(self) -> None:
        """Forget everything but the journal."""
        self.protocol = device_protocol_of(PLAN.round)


@dataclass
class Attempt:
    """The coordinator's side, with the facts that its record would have."""

    protocol: RoundProtocol
    facts: RoundFacts
    devices: list[Device]

    def run(self, phase: str, names: Collection[str], change: Callable[[bytes], bytes] = bytes) -> None:
        """Run a phase with messages, and answer."""
        exchange = self.protocol.phases[phase].exchange
        assert exchange is not None
        present = [device for device in self.devices if device.name in names]
        payloads = {device.name: device.message(phase) for device in present}
        for name, payload in payloads.items():
            exchange.check(self.facts, name, payload)
        self.freeze(phase, payloads)
        for device in present:
            answer = exchange.respond(self.facts, device.name)
            assert answer is not None
            device.accept(phase, change(answer))

    def freeze(self, phase: str, payloads: dict[str, bytes]) -> None:
        rosters = {**self.facts.rosters, phase: tuple(payloads)}
        self.facts = replace(self.facts, rosters=rosters, messages={**self.facts.messages, phase: payloads})

    def close(self, names: Collection[str]) -> None:
        """Close the set of Updates, and tell its devices."""
        self.facts = replace(self.facts, rosters={**self.facts.rosters, "training": tuple(names)})
        exchange = self.protocol.phases["training"].exchange
        assert exchange is not None
        for device in self.devices:
            if device.name in names:
                answer = exchange.respond(self.facts, device.name)
                assert answer is not None
                device.accept("training", answer)


def attempt(certifies: Callable[[int], bool] = lambda index: True) -> Attempt:
    basis = RoundBasis(
        run_id="run",
        lineage=0,
        round=1,
        version_sha256="ab" * 32,
        max_devices=NUM_DEVICES,
        grid=(-8,),
        codec=PLAN.codec,
        statistics=tuple(Statistic(name=name, bound=4096) for name in NAMES),
        num_values=NUM_VALUES,
        work_sha256="cd" * 32,
    )
    devices = []
    for index in range(NUM_DEVICES):
        key = SigningKey(bytes((index + 1,)) * 32)
        certificate = certificate_of(AUTHORITY.sign, bytes.fromhex(key.public)) if certifies(index) else bytes(64)
        identity = identity_of(key, FixedEntropy(index), certificate)
        context = ExchangeContext(
            device=identity, assignment=assignment(), kept={}, basis=basis, journal=Journal(), floor=FLOOR
        )
        devices.append(Device(index, context))
    return Attempt(protocol=protocol_of(PLAN), facts=RoundFacts(basis=basis), devices=devices)


def masked_sum(now: Attempt, payloads: Collection[bytes]) -> tuple[list[int], dict[str, int]]:
    """Return the corrected sum of payloads, and the tail by name."""
    adjustment = adjustment_of(now.protocol, now.facts)
    vector = now.protocol.vector(NUM_VALUES, len(NAMES))
    assert adjustment is not None and adjustment.correction is not None and vector is not None
    total, tail = np.zeros(NUM_VALUES, np.int64), np.zeros(len(NAMES), np.int64)
    for payload in payloads:
        one = np.zeros(len(NAMES), np.int64)
        total += np.concatenate(list(vector.decode([payload], one)))
        tail += one
    total = vector.ring.reduce(total + adjustment.correction(0, NUM_VALUES))
    tail += adjustment.correction(NUM_VALUES, NUM_VALUES + len(NAMES))
    return total.tolist(), dict(zip(adjustment.tail, tail.tolist(), strict=True))


@pytest.mark.parametrize("restarts", [False, True])
def test_an_active_round_unmasks_the_sum_of_the_survivors(restarts: bool) -> None:
    now = attempt()
    names = [device.name for device in now.devices]

    def pause() -> None:
        for device in now.devices if restarts else ():
            device.restart()

    for phase in ("advertising", "sharing"):
        now.run(phase, names)
        pause()
    payloads = {device.name: device.masked() for device in now.devices}
    pause()
    # The last one masks, and drops out before its upload.
    closed = names[:-1]
    now.close(closed)
    pause()
    for phase in ("confirming", "unmasking"):
        now.run(phase, closed)
        pause()
    weights = [2 + index for index in range(NUM_DEVICES - 1)]
    expected = [sum(w * (value - index) for index, w in enumerate(weights)) for value in range(NUM_VALUES)]
    total, tail = masked_sum(now, [payloads[name] for name in closed])
    assert (total, tail) == (expected, {NAMES[0]: sum(weights), NAMES[1]: 0})
    # At the end, a journal has no secret.
    for device in now.devices:
        device.protocol.end(device.context.journal)
        (fact,) = read_journal(device.context.journal.read())
        assert isinstance(fact, AttemptEnded)
        assert fact.gave_shares == (b"\1" if device.name in closed else b"\0")


def refused(code: str, work: Callable[[], object]) -> None:
    with pytest.raises(FaninError) as excinfo:
        work()
    assert excinfo.value.code == code, excinfo.value


def test_a_device_without_a_certificate_takes_no_part() -> None:
    now = attempt(certifies=lambda index: index != 2)
    refused("FN-1632", lambda: now.devices[2].message("advertising"))


def test_a_device_without_an_authority_refuses_the_threat() -> None:
    now = attempt()
    device = now.devices[0]
    device.context = replace(device.context, floor=MaskFloor())
    refused("FN-1628", lambda: device.message("advertising"))


def test_shares_need_the_proof_of_the_survivors() -> None:
    now = attempt()
    names = [device.name for device in now.devices]
    for phase in ("advertising", "sharing"):
        now.run(phase, names)
    for device in now.devices:
        device.masked()
    now.close(names)

    def cut(proof: bytes) -> bytes:
        """Return a proof with two signatures, of which three are needed."""
        row = messages.read_proof(proof[1:33], proof)
        return messages.proof_bytes(proof[1:33], replace(row, signatures=dict(list(row.signatures.items())[:2])))

    refused("FN-1640", lambda: now.run("confirming", names, cut))


def test_a_damaged_journal_ends_the_round_of_the_device_alone() -> None:
    now = attempt()
    device = now.devices[0]
    device.message("advertising")
    journal = device.context.journal
    data = bytearray(journal.read())
    data[40] ^= 1
    journal.write(bytes(data))
    device.restart()
    refused("FN-1634", lambda: device.message("advertising"))
    # It never draws keys again for this Round, and takes part in the next one.
    refused("FN-1641", lambda: device.message("advertising"))
    device.context = replace(device.context, basis=replace(device.context.basis, round=2))
    assert device.message("advertising")


def test_a_lost_journal_means_giving_up() -> None:
    now = attempt()
    names = [device.name for device in now.devices]
    now.run("advertising", names)
    device = now.devices[0]
    device.context = replace(device.context, journal=Journal())
    device.restart()
    refused("FN-1634", lambda: device.message("sharing"))
    refused("FN-1634", device.masked)


def test_a_second_payload_is_refused() -> None:
    now = attempt()
    names = [device.name for device in now.devices]
    for phase in ("advertising", "sharing"):
        now.run(phase, names)
    device = now.devices[0]
    payload = device.masked()
    assert device.masked() == payload
    device.restart()
    device.index = 9
    refused("FN-1636", device.masked)


def test_a_repeated_message_writes_nothing_and_has_the_same_bytes() -> None:
    now = attempt()
    device = now.devices[0]
    journal = device.context.journal
    assert isinstance(journal, Journal)
    first = device.message("advertising")
    device.restart()
    assert device.message("advertising") == first
    assert journal.num_writes == 1

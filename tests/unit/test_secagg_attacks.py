"""Devices that lie to the coordinator, and a coordinator that lies to devices, by the messages of a Round."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.nightly import in_ci
from support.secagg import UPLOAD, device_of, outcome, plan_of
from support.virtual import bundle_in, open_place, start

from fanin.edge.basis import RoundBasis
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.masking import messages
from fanin.edge.masking.agreement import KEYS_CONTEXT, public_of
from fanin.edge.masking.journal import SharesGiven, SurvivorsNamed, read_journal
from fanin.edge.masking.messages import Kind
from fanin.edge.masking.settings import MaskSettings
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, Unavailable
from fanin.server.protocols.known import protocol_of
from fanin.server.protocols.phases import RoundFacts
from fanin.simulation import run_virtual
from fanin.simulation.federation.loopback import Fleet

NUM_DEVICES = 6
LIAR = 2
LOW_ORDER = bytes(32)
Change = Callable[[m.ExchangeRequest], m.ExchangeRequest]


def liars_key() -> SigningKey:
    """Return the key of the device that lies, as the simulation derives it from its name."""
    return SigningKey(hashlib.sha256(f"fanin simulation device-{LIAR}".encode()).digest())


def advertisement(key: SigningKey, digest: bytes, sealing: bytes, masking: bytes) -> bytes:
    """Return message 1 with keys that a device chose, signed by it."""
    commitment = hashlib.sha256(key.private_bytes()).digest()
    signature = key.sign(KEYS_CONTEXT, digest + sealing + masking + commitment)
    entry = b"".join((bytes.fromhex(key.public), sealing, masking, commitment, signature))
    return messages.framed(Kind.ADVERTISEMENT, digest, entry)


def in_phase(phase: str, payload: Callable[[bytes], bytes]) -> Change:
    """Return a change of the message of one phase."""
    return lambda request: replace(request, payload=payload(request.payload)) if request.phase == phase else request


def other_kind(payload: bytes) -> bytes:
    """Return message 8 with a share of the other secret of its first owner."""
    start = 1 + 32 + 32 + 4 + 4
    return payload[:start] + bytes((3 - payload[start],)) + payload[start + 1 :]


LIES = {
    "garbage instead of keys": ("advertising", lambda data: b"x" * len(data), "FN-1625"),
    "a sealing key of low order": (
        "advertising",
        lambda data: advertisement(liars_key(), data[1:33], LOW_ORDER, public_of(bytes(range(32)))),
        "FN-1622",
    ),
    "a masking key of low order": (
        "advertising",
        lambda data: advertisement(liars_key(), data[1:33], public_of(bytes(range(32))), LOW_ORDER),
        "FN-1622",
    ),
    "one key for both purposes": (
        "advertising",
        lambda data: advertisement(liars_key(), data[1:33], *2 * (public_of(bytes(range(32))),)),
        "FN-1631",
    ),
    "keys that it did not sign": ("advertising", lambda data: data[:-1] + bytes((data[-1] ^ 1,)), "FN-1632"),
    "garbage instead of sealed shares": ("sharing", lambda data: b"x" * len(data), "FN-1625"),
    "sealed shares of another attempt": ("sharing", lambda data: data[:1] + bytes(32) + data[33:], "FN-1629"),
    "sealed shares for nobody": (
        "sharing",
        lambda data: messages.sealed_bytes(data[1:33], data[33:65], {}),
        "FN-1633",
    ),
    "garbage instead of shares": ("unmasking", lambda data: b"x" * len(data), "FN-1625"),
    "shares that are cut": ("unmasking", lambda data: data[:-1], "FN-1625"),
    "shares of the other secret": ("unmasking", other_kind, "FN-1633"),
}


@pytest.mark.parametrize("lie", in_ci(LIES, {"a masking key of low order", "shares of the other secret"}))
def test_a_device_that_lies_harms_no_other(tmp_path: Path, lie: str) -> None:
    phase, payload, code = LIES[lie]
    errors: list[str] = []
    line = {LIAR: {"change": in_phase(phase, payload), "errors": errors}}
    masked = outcome(plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, dropout_fraction=0.2), tmp_path / "masked", line)
    assert errors[0] == code
    # Its Update counts if it was committed before the lie.
    absent = {} if phase == "unmasking" else {LIAR: {"gone_at": UPLOAD}}
    plain = outcome(plan_of("plain", NUM_DEVICES, NUM_DEVICES - 1), tmp_path / "plain", absent)
    assert masked == plain


@pytest.mark.nightly
def test_shares_of_an_earlier_round_are_refused(tmp_path: Path) -> None:
    recorded: list[bytes] = []
    errors: list[str] = []

    def replay(payload: bytes) -> bytes:
        recorded.append(payload)
        return recorded[0]

    line = {LIAR: {"change": in_phase("sharing", replay), "errors": errors}}
    whole = plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, max_rounds=2, dropout_fraction=0.2)
    masked = outcome(whole, tmp_path, line)
    assert errors[0] == "FN-1629"
    assert [len(closed) for closed in masked.closed] == [NUM_DEVICES, NUM_DEVICES - 1]


def test_a_device_that_copies_the_keys_of_another_is_left_out_alone(tmp_path: Path) -> None:
    copied: list[bytes] = []

    def note(payload: bytes) -> bytes:
        copied.append(payload)
        return payload

    lines = {
        0: {"change": in_phase("advertising", note)},
        LIAR: {"change": in_phase("advertising", lambda _: copied[0])},
    }
    masked = outcome(plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, dropout_fraction=0.2), tmp_path, lines)
    assert masked.failures == ()
    assert [f"device-{LIAR}" in closed for closed in masked.closed] == [False]
    assert len(masked.closed[0]) == NUM_DEVICES - 1


def test_an_enrolled_device_advertises_its_own_keys_alone() -> None:
    protocol = protocol_of(plan_of("secagg", NUM_DEVICES, NUM_DEVICES))
    basis = RoundBasis(
        run_id="run",
        lineage=0,
        round=1,
        version_sha256="00" * 32,
        max_devices=NUM_DEVICES,
        grid=(-10,),
        codec=plan_of("secagg", NUM_DEVICES, NUM_DEVICES).codec,
        statistics=(m.Statistic(name="examples", bound=4096),),
        num_values=10,
        work_sha256="cd" * 32,
    )
    exchange = protocol.phases["advertising"].exchange
    assert exchange is not None
    key = liars_key()
    digest = MaskSettings().terms(basis).digest
    payload = advertisement(key, digest, public_of(bytes(32)), public_of(bytes(range(32))))
    own = hashlib.sha256(bytes.fromhex(key.public)).hexdigest()[:32]
    exchange.check(RoundFacts(basis=basis), own, payload)
    with pytest.raises(InvalidInput) as excinfo:
        exchange.check(RoundFacts(basis=basis), "f" * 32, payload)
    assert excinfo.value.code == "FN-1632"


@dataclass
class LyingFleet:
    """A coordinator that changes its answers to one device, and the device's reports.

    ``lie`` returns the answer of a phase, or None for the true one. With ``loses`` a phase is never answered.
    """

    fleet: Fleet
    lie: Callable[[str, bytes], bytes | None]
    victim: str = "device-0"
    loses: str = ""
    failures: list[str] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    has_failed: asyncio.Event = field(default_factory=asyncio.Event)
    has_lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        return await self.fleet.check_in(device, check_in)

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        return self.fleet.download(device, download)

    def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        return self.fleet.upload(device, header, pieces)

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        if device == self.victim and request.phase == self.loses:
            self.sent.append(request.payload)
            self.has_lost.set()
            raise Unavailable("the line broke")
        answer = await self.fleet.exchange(device, request)
        if device == self.victim and isinstance(answer, m.ExchangeAnswer):
            false = self.lie(request.phase, answer.message)
            return answer if false is None else m.ExchangeAnswer(message=false)
        return answer

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        if report.failure:
            self.failures.append(report.failure)
            self.has_failed.set()
        return await self.fleet.report(device, report)


def invented(roster: bytes) -> bytes:
    """Return message 2 with a device that the coordinator invented, instead of a real one."""
    row = messages.read_roster(roster[1:33], roster, is_active=False)
    peer = max(row.peers)
    key = SigningKey(b"i" * 32)
    forged = advertisement(key, roster[1:33], public_of(bytes(range(32))), public_of(bytes(range(1, 33))))
    entry = messages.read_advertisement(roster[1:33], forged, is_active=False)
    return messages.roster_bytes(roster[1:33], replace(row, peers={**row.peers, peer: entry}))


def survivors(message: bytes, members: int) -> bytes:
    """Return message 5 with another bitmap."""
    return message[:-1] + bytes((members,))


FALSE_ANSWERS = {
    "a roster with an invented device": ("advertising", invented, "FN-1633"),
    "a roster of another attempt": ("advertising", lambda data: data[:1] + bytes(32) + data[33:], "FN-1629"),
    "a delivery of another roster": ("sharing", lambda data: data[:33] + bytes(32) + data[65:], "FN-1633"),
    "garbage": ("sharing", lambda data: b"\4" + b"x" * 9, "FN-1625"),
    "survivors of other sharers": ("training", lambda data: data[:33] + bytes(32) + data[65:], "FN-1633"),
    "two survivors": ("training", lambda data: survivors(data, 0b011), "FN-1638"),
    "a bit of no device": ("training", lambda data: survivors(data, 0b1111), "FN-1625"),
}


def lied_to(folder: Path, lie: Callable[[str, bytes], bytes | None]) -> LyingFleet:
    """Run three devices in a complete graph until the coordinator's lie was reported."""

    async def main() -> LyingFleet:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan_of("secagg", 3, 3))
        fleet = LyingFleet(fleet=place.coordinator, lie=lie)
        tasks = [asyncio.create_task(device_of(fleet, index).run()) for index in range(3)]
        async with asyncio.timeout(10_000.0):
            await fleet.has_failed.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await place.coordinator.stop()
        await place.runs.stop()
        return fleet

    return run_virtual(main())


@pytest.mark.parametrize("lie", in_ci(FALSE_ANSWERS, {"a roster with an invented device"}))
def test_a_device_gives_up_if_the_coordinator_lies(tmp_path: Path, lie: str) -> None:
    phase, false, code = FALSE_ANSWERS[lie]
    fleet = lied_to(tmp_path, lambda now, answer: false(answer) if now == phase else None)
    assert code in fleet.failures[0], fleet.failures[0]


def test_a_second_survivor_set_gets_no_share_even_if_the_device_lost_its_answers(tmp_path: Path) -> None:
    """The journal decides. A device that restarts without its kept answers asks again, and hears of another set."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan_of("secagg", 4, 4))
        second = False

        def lie(phase: str, answer: bytes) -> bytes | None:
            return survivors(answer, answer[-1] & (answer[-1] - 1)) if second and phase == "training" else None

        fleet = LyingFleet(fleet=place.coordinator, lie=lie, loses="unmasking")
        devices = [device_of(fleet, index) for index in range(4)]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        async with asyncio.timeout(10_000.0):
            await fleet.has_lost.wait()
            tasks[0].cancel()
            with suppress(asyncio.CancelledError):
                await tasks[0]
            second = True
            before = devices[0].folder.journals.get("run")
            devices[0].folder.exchanges.keep("")
            devices[0].restart()
            tasks[0] = asyncio.create_task(devices[0].run())
            await fleet.has_failed.wait()
        assert "FN-1630" in fleet.failures[0] or "FN-1639" in fleet.failures[0], fleet.failures
        given = [fact for fact in read_journal(before) if isinstance(fact, SharesGiven | SurvivorsNamed)]
        assert len(given) == 2
        # Only the message for the first set was ever sent.
        assert set(fleet.sent) == {given[1].answer}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await place.coordinator.stop()
        await place.runs.stop()

    run_virtual(main())

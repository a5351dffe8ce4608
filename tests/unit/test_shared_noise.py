"""Runs with noise on devices under masks: what a device adds, what the ledger records, and what is refused."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secagg import UPLOAD, Line, await_rest, device_of, outcome, plan_of
from support.staleness import hang_up
from support.virtual import PUBLISHER, Place, bundle_in, open_place, start

from fanin.clients.device.exchanges import check_noise
from fanin.clients.device.session.known import PLAIN
from fanin.edge.noise.clipping import ClipGrid
from fanin.edge.noise.distributions import reach
from fanin.edge.noise.loss import loss_of_gaussian_shares, loss_of_skellam
from fanin.edge.noise.shares import MECHANISMS, NoiseShare
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.protos.plans import Plan, PrivacyPlan, RoundPlan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.backup import back_up
from fanin.server.care.places import place_of
from fanin.server.care.restore import restore
from fanin.server.privacy.ledger import to_text
from fanin.server.privacy.releases import PlainRelease
from fanin.server.protocols.known import protocol_of
from fanin.simulation import SyntheticTrainer, VirtualDevice, run_virtual, synthetic_bundle

NUM_DEVICES: Final = 5
SHAPES: Final = {"a": (60, 50), "b": (7,)}
TABLE: Final = TensorTable.of(SHAPES)
PRIVACY: Final = PrivacyPlan(
    mechanism="skellam",
    clip_norm=0.5,
    noise_multiplier=2.0,
    epsilon=50.0,
    delta=1e-6,
    population="phones",
    population_size=1000,
)


def private(mechanism: str = "skellam", codec: str = "int8", max_rounds: int = 2, **options: object) -> Plan:
    """Return a Plan of five devices, of which four must survive."""
    options = {"min_survivors": 4, "dropout_fraction": 0.2} | options
    whole = plan_of("secagg", NUM_DEVICES, 4, max_rounds, **options)
    return replace(
        whole,
        codec=CodecSpec(name=codec, max_shift=0),
        aggregation=replace(whole.aggregation, max_examples=1),
        privacy=replace(PRIVACY, mechanism=mechanism),
    )


def parameters(place: Place, number: int) -> np.ndarray:
    """Return the parameters of a Version."""
    version = place.state.runs.version("run", number)
    assert version is not None
    return load_parameters(place.state.files.blobs, version, TABLE).astype(np.float64)


def story(folder: Path, whole: Plan, tell: Callable[[Place], Awaitable[None]], absent: int = NUM_DEVICES) -> None:
    """Run a Plan with its devices until it rests, then tell a story. One device may vanish after it advertised keys."""

    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES), whole)
        lines = [
            device_of(place.coordinator, index, gone_at="sharing" if index == absent else "")
            for index in range(NUM_DEVICES)
        ]
        tasks = [asyncio.create_task(line.run()) for line in lines]
        await await_rest(place)
        await tell(place)
        await hang_up(place, tasks)

    run_virtual(main())


@pytest.mark.parametrize(("mechanism", "codec"), [("skellam", "int8"), ("gaussian-shares", "fixed32")])
def test_a_run_ends_without_a_device_and_verifies(tmp_path: Path, mechanism: str, codec: str) -> None:
    end = outcome(private(mechanism, codec), tmp_path, {2: {"gone_at": "sharing"}})
    assert len(end.versions) == 2, end.failures
    assert all(len(accepted) == 4 for accepted in end.closed)


@pytest.mark.parametrize(("mechanism", "codec"), [("skellam", "int8"), ("gaussian-shares", "fixed32")])
def test_a_version_has_the_noise_of_its_survivors_over_a_fixed_denominator(
    tmp_path: Path, mechanism: str, codec: str
) -> None:
    """Four of five survive, three of them honest. With a noise multiplier of 50 their changes are small beside it."""
    whole = private(mechanism, codec, 1, adversarial_fraction=0.2)
    whole = replace(whole, privacy=replace(whole.privacy, noise_multiplier=50.0))

    async def tell(place: Place) -> None:
        before, after = (parameters(place, number) for number in (0, 1))
        grid = ClipGrid.of(PRIVACY.clip_norm, whole.codec.bits, TABLE.num_values)
        total = (after - before) * NUM_DEVICES / 2.0**grid.exponent
        expected = 50.0 * math.sqrt(grid.squared_sensitivity * 4 / 3)
        measured = math.sqrt(float(np.mean(total**2)))
        # Four standard deviations of a standard deviation.
        assert abs(measured / expected - 1) < 4 / math.sqrt(2 * TABLE.num_values)

    story(tmp_path, whole, tell, absent=2)


@pytest.mark.parametrize("mechanism", ["skellam", "gaussian-shares"])
def test_the_ledger_has_the_loss_for_the_least_honest_survivors(tmp_path: Path, mechanism: str) -> None:
    """Of 5 devices with an adversarial fraction of 0.2, one helps the coordinator: 3 of 4 survivors are honest."""
    whole = private(mechanism, "int8", 2, adversarial_fraction=0.2)
    grid = ClipGrid.of(PRIVACY.clip_norm, 8, TABLE.num_values)
    squared, num_values = grid.squared_sensitivity, TABLE.num_values
    share = Fraction(math.ceil(Fraction(4 * squared, 3) * 2**32), 2**32)
    if mechanism == "skellam":
        loss = loss_of_skellam(squared, min(squared, math.isqrt(num_values * squared) + 1), 3 * share)
    else:
        loss = loss_of_gaussian_shares(squared, share, 3, num_values)

    async def tell(place: Place) -> None:
        rows = await place.state.stores.ledger.ledger_page("phones", 1)
        assert [(row.round, row.release) for row in rows] == [(n, to_text(PlainRelease(loss=loss))) for n in (1, 2)]
        assert rows[-1].epsilon == pytest.approx((loss * 2).epsilon(1e-6), rel=1e-3)
        charged = await place.state.stores.ledger.charged("run", 1)
        assert charged is not None and charged.seed is None

    story(tmp_path, whole, tell)


def test_a_round_with_too_few_survivors_fails_before_it_is_unmasked(tmp_path: Path) -> None:
    """Two of five devices vanish before their upload, and four must survive: nothing is released or charged."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), private(max_rounds=1))
        lines = [device_of(place.coordinator, index, gone_at=UPLOAD * (index < 2)) for index in range(NUM_DEVICES)]
        tasks = [asyncio.create_task(line.run()) for line in lines]
        events: list[m.Event] = []
        async with aclosing(place.runs.watch("run", 0)) as watched:
            async for entry in watched:
                events.append(entry.event)
                if isinstance(entry.event, m.RoundFailed):
                    break
        assert not any(isinstance(event, m.VersionPublished) and event.round for event in events)
        assert (await place.state.stores.ledger.counts("phones")).newest == 0
        messages = await place.state.stores.messages.messages("run", 1)
        assert "unmasking" not in {message.phase for message in messages}
        await hang_up(place, tasks)

    run_virtual(main())


@given(
    mechanism=st.sampled_from(sorted(MECHANISMS)),
    multiplier=st.floats(0.1, 20.0),
    squared=st.integers(1, 1 << 22),
    num_values=st.integers(1, 1 << 24),
    num_honest=st.integers(2, 1000),
    more=st.integers(0, 1000),
    bits=st.sampled_from([8, 20]),
)
def test_the_ring_holds_the_sum_and_the_tails_of_its_noise(
    mechanism: str, multiplier: float, squared: int, num_values: int, num_honest: int, more: int, bits: int
) -> None:
    share = NoiseShare(
        mechanism=mechanism,
        noise_multiplier=multiplier,
        squared_sensitivity=squared,
        num_values=num_values,
        num_honest=num_honest,
    )
    num_devices, largest = num_honest + more, (1 << (bits - 1)) - 1
    assert share.variance * num_honest >= Fraction(multiplier) ** 2 * squared
    tail = reach(share.distribution, 128 + num_values.bit_length(), num_devices)
    # The tail is that of the sum, not of one device: beyond 13 of its standard deviations.
    assert tail >= 13 * math.sqrt(num_devices * share.variance)
    ring = share.ring(num_devices, largest)
    edges = np.array([-num_devices * largest - tail, num_devices * largest + tail])
    assert (ring.reduce(edges) == edges).all()
    assert ring.bits == 8 or 2 * int(edges[1]) >= 1 << (ring.bits - 8)


@pytest.mark.parametrize("mechanism", sorted(MECHANISMS))
def test_a_masked_sum_with_noise_is_exact_at_the_edge(mechanism: str) -> None:
    share = NoiseShare(
        mechanism=mechanism, noise_multiplier=3.0, squared_sensitivity=5000, num_values=100_000, num_honest=4
    )
    values = np.full(100_000, -127, np.int64)
    ring, total, words = share.ring(6, 127), np.zeros(100_000, np.int64), np.zeros(100_000, np.uint64)
    for device in range(6):
        pieces = list(share.noised(values, bytes([device]) * 32))
        total += np.concatenate(pieces)
        words += np.concatenate([ring.words_of(piece) for piece in pieces])
    assert (ring.signed(words) == total).all()
    assert float(np.var(total)) == pytest.approx(6 * float(share.variance), rel=0.02)
    again = np.concatenate(list(share.noised(values, bytes([0]) * 32)))
    assert (again == np.concatenate(list(share.noised(values, bytes(32))))).all()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"round": RoundPlan()}, "FN-1682"),
        ({"privacy": replace(PRIVACY, mechanism="central")}, "FN-1682"),
        ({"privacy": {"sampling": "coins", "sampling_rate": 0.1}}, "FN-1682"),
        ({"privacy": {"keep_seed_rounds": 2}}, "FN-1682"),
        ({"privacy": {"delta": 1e-2}}, "FN-1650"),
    ],
)
def test_a_plan_that_breaks_the_claim_is_refused(change: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        if isinstance(fields := change.get("privacy"), dict):
            change = {"privacy": replace(PRIVACY, **fields)}
        replace(private(), **change)
    assert excinfo.value.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [({"min_survivors": 3, "adversarial_fraction": 0.4}, "FN-1686"), ({"min_survivors": 4}, "")],
)
def test_the_noise_needs_two_honest_survivors(options: dict[str, object], code: str) -> None:
    whole = private(**options)
    if not code:
        assert protocol_of(whole).num_honest == 4
        return
    with pytest.raises(InvalidPlan) as excinfo:
        protocol_of(whole)
    assert excinfo.value.code == code


def test_noise_that_a_device_cannot_draw_is_refused_when_the_run_starts(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        with pytest.raises(InvalidPlan) as excinfo:
            await start(place.runs, bundle_in(tmp_path), private("skellam", "fixed32"))
        assert excinfo.value.code == "FN-1687"
        assert "gaussian-shares" in str(excinfo.value)
        await place.coordinator.stop()
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize(("mechanism", "is_refused"), [("central", False), ("skellam", True), ("later", True)])
def test_a_device_sends_no_change_whose_noise_it_would_not_add(mechanism: str, is_refused: bool) -> None:
    terms = m.PrivacyTerms(
        mechanism=mechanism,
        clip_norm=1.0,
        noise_multiplier=1.0,
        squared_sensitivity=4096,
        epsilon=1.0,
        delta=1e-6,
        population="phones",
        population_size=100,
    )
    if not is_refused:
        check_noise(terms, PLAIN)
        return
    with pytest.raises(InvalidInput) as excinfo:
        check_noise(terms, PLAIN)
    assert excinfo.value.code == "FN-1688"


def test_a_backup_has_the_masked_updates_and_verifies(tmp_path: Path) -> None:
    """They have the noise of their devices, so nothing can be subtracted."""

    async def write(_place: Place) -> None:
        back_up(tmp_path / "state", place_of(str(tmp_path / "backup")), lambda _: None)

    story(tmp_path, private(), write)
    (tmp_path / "state").rename(tmp_path / "lost")
    restore(place_of(str(tmp_path / "backup")), tmp_path / "state", lambda _: None)

    async def verify() -> None:
        place = open_place(tmp_path)
        verdicts = list(verify_run(place.state, "run"))
        assert [(verdict.problem, verdict.from_sum) for verdict in verdicts] == [("", "")] * 3
        await place.runs.stop()

    run_virtual(verify())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Line):
    """The calls of a device whose uploads are recorded and never end."""

    payloads: list[bytes] = field(default_factory=list)
    has_sent: asyncio.Event = field(default_factory=asyncio.Event)

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        """See Transport."""
        self.payloads.append(read(0, header.payload.size_bytes))
        self.has_sent.set()
        await asyncio.Event().wait()
        raise AssertionError("it never ends")


@pytest.mark.parametrize("keeps_seed", [True, False])
def test_a_seed_serves_one_payload(tmp_path: Path, keeps_seed: bool) -> None:
    """A device that was killed after it masked repeats a lost Update. Without the seed it gives up."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), private(max_rounds=1))
        others = [device_of(place.coordinator, index) for index in range(1, NUM_DEVICES)]
        tasks = [asyncio.create_task(other.run()) for other in others]
        line = Recording(fleet=place.coordinator, device="device-0", latency_s=0.01)
        trainer = SyntheticTrainer(partition=0, num_examples=10)
        device = VirtualDevice(line, trainer, (PUBLISHER.public,), random.Random(7), lambda _rng, _work: 0.5)
        life = asyncio.create_task(device.run())
        await line.has_sent.wait()
        life.cancel()
        line.has_sent.clear()
        device.folder.updates.clear()
        if not keeps_seed:
            device.folder.exchanges.keep("")
        device.restart()
        tasks.append(asyncio.create_task(device.run()))
        with suppress(TimeoutError):
            await asyncio.wait_for(line.has_sent.wait(), 30.0)
        assert line.payloads == line.payloads[:1] * (2 if keeps_seed else 1)
        await hang_up(place, tasks)

    run_virtual(main())

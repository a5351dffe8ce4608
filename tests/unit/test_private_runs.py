"""A Run with central differential privacy: what devices send, what the coordinator accepts, and what it publishes."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support.commands import fanin_in_process
from support.staleness import TABLE, assignment, federate, settle
from support.virtual import PUBLISHER, SHAPES, Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.edge.noise.clipping import ClipGrid, squared_norm
from fanin.edge.noise.distributions import DiscreteGaussian, draw, reach
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput, InvalidPlan, InvalidUpdate
from fanin.protos.messages import VersionPublished
from fanin.protos.plans import Plan, PrivacyPlan, RetentionPlan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.server.privacy.noising import NOISED_SUM, CentralNoise, noise_of
from fanin.simulation import LoopbackTransport, run_virtual, synthetic_bundle

CLIP_NORM: Final = 0.5
PRIVACY: Final = PrivacyPlan(
    mechanism="central",
    clip_norm=CLIP_NORM,
    noise_multiplier=1.25,
    epsilon=50.0,
    delta=1e-6,
    population="phones",
    population_size=1000,
)
NUM_VALUES: Final = TABLE.num_values
GRID: Final = ClipGrid.of(CLIP_NORM, 32, NUM_VALUES)


def private(**changes: object) -> Plan:
    base = plan(max_rounds=1, **changes)
    return replace(base, aggregation=replace(base.aggregation, max_examples=1), privacy=PRIVACY)


def run(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        await settle()
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


def made(work: m.Assignment, change: np.ndarray, telemetry: m.Telemetry | None = None) -> tuple[m.UpdateHeader, bytes]:
    counts = {m.EXAMPLES: 37, m.TRAIN_LOSS: 5, m.EVAL_EXAMPLES: 4}
    telemetry = telemetry or m.Telemetry(runtime="synthetic 1", train_s=3.5)
    return make_update(work, TABLE, Change(values=change, counts=counts, num_steps=9), telemetry)


async def send(place: Place, device: str, update: tuple[m.UpdateHeader, bytes]) -> m.UploadReply:
    header, payload = update
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    return await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])


def with_values(update: tuple[m.UpdateHeader, bytes], values: np.ndarray) -> tuple[m.UpdateHeader, bytes]:
    payload = values.astype("<i4").tobytes()
    return replace(update[0], payload=artifact_of(payload)), payload


def parameters(place: Place, number: int) -> np.ndarray:
    version = place.state.runs.version("run", number)
    assert version is not None
    return load_parameters(place.state.files.blobs, version, TABLE).astype(np.float64)


def published(place: Place) -> list[VersionPublished]:
    events = (entry.event for entry in place.state.runs.events("run"))
    return [event for event in events if isinstance(event, VersionPublished) and event.round]


def test_a_device_clips_and_sends_nothing_but_its_change(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        assert work.privacy is not None
        assert work.privacy.squared_sensitivity == GRID.squared_sensitivity
        assert (set(work.grid), work.codec.max_shift) == ({GRID.exponent}, 0)
        assert [each.name for each in work.statistics] == [m.EXAMPLES]
        header, payload = made(work, np.full(NUM_VALUES, 1e6, np.float32))
        assert header.statistics.counts == {m.EXAMPLES: 1}
        assert (header.telemetry.train_s, header.telemetry.num_steps, set(header.shifts)) == (0.0, 0, {0})
        norm = squared_norm((np.frombuffer(payload, "<i4"),)) ** 0.5 * 2.0**GRID.exponent
        assert CLIP_NORM * 0.999 < norm <= CLIP_NORM * GRID.slack

    run(tmp_path, private(), story)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_change_that_is_not_finite_is_sent_as_zero(tmp_path: Path, value: float) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        _, payload = made(work, np.full(NUM_VALUES, value, np.float32))
        assert not np.frombuffer(payload, "<i4").any()

    run(tmp_path, private(), story)


def test_a_version_has_the_noise_of_the_recorded_seed_and_the_fixed_denominator(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        for device in ("device-0", "device-1"):
            work = await assignment(place, device)
            update = made(work, np.zeros(NUM_VALUES, np.float32))
            assert (await send(place, device, update)).update_state is m.UpdateState.ACCEPTED
        await settle()
        seed = place.state.rounds.noise_seed("run", 1)
        assert seed is not None
        # Two zero Updates of a buffer of four: the noise alone, in the units of the fixed denominator.
        key = HKDF(SHA256(), 32, salt=None, info=b"fanin round noise v1 parameters").derive(seed)
        noise = draw(key, DiscreteGaussian(Fraction(5, 4) ** 2 * GRID.squared_sensitivity), 0, NUM_VALUES)
        expected = (np.ldexp(noise.astype(np.float64), GRID.exponent) / 4).astype(np.float32)
        assert np.array_equal(parameters(place, 1), parameters(place, 0) + expected)
        (event,) = published(place)
        assert (event.train_loss_examples, event.evaluation, event.statistics, event.num_rounded) == (0, None, {}, 0)

    base = private(quorum=2, min_report_s=0.1, report_factor=1.0)
    run(tmp_path, replace(base, privacy=replace(PRIVACY, keep_seed_rounds=1)), story)


def test_the_rounds_of_whole_devices_are_recomputed_by_verify(tmp_path: Path) -> None:
    base = private()
    privacy = replace(PRIVACY, keep_seed_rounds=3)
    versions = federate(tmp_path, replace(base, privacy=privacy, stop=replace(base.stop, max_rounds=3)))
    assert [version.number for version in versions if version.round] == [1, 2, 3]


def test_a_version_is_verified_from_the_noised_sum_after_its_updates_were_erased(tmp_path: Path) -> None:
    base = private(outer_optimizer="nesterov")
    federate(tmp_path, replace(base, stop=replace(base.stop, max_rounds=2)))

    async def erased() -> None:
        place = open_place(tmp_path)
        await place.state.stores.retention.remove("run", RetentionPlan(keep_updates=0), 1e9)
        _, first, second = verify_run(place.state, "run")
        for verdict in (first, second):
            assert (verdict.problem, verdict.digest_only) == ("", "")
            assert verdict.from_sum.startswith("privacy erased the updates of its round")
        sums = place.state.rounds.outer_state("run", 2)[NOISED_SUM]
        (path,) = (tmp_path / "state" / "blobs").rglob(f"*{sums.chunks[0].sha256}*")
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[::-1])
        assert [bool(verdict.problem) for verdict in verify_run(place.state, "run")] == [False, False, True]

    run_virtual(erased())


@pytest.mark.parametrize("largest", [GRID.squared_sensitivity + 1, 2**60])
def test_an_update_above_the_bound_is_refused_and_harms_no_other(tmp_path: Path, largest: int) -> None:
    values = np.zeros(NUM_VALUES, np.int64)
    values[0] = int(largest**0.5) + 1

    async def story(place: Place) -> None:
        work = await assignment(place, "device-9")
        update = with_values(made(work, np.zeros(NUM_VALUES, np.float32)), values)
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(place, "device-9", update)
        assert excinfo.value.code == "FN-1683"
        for index in range(4):
            work = await assignment(place, f"device-{index}")
            update = made(work, np.full(NUM_VALUES, 0.01, np.float32))
            assert (await send(place, f"device-{index}", update)).update_state is m.UpdateState.ACCEPTED
        await settle()
        assert [event.number for event in published(place)] == [1]

    run(tmp_path, private(), story)


def test_an_update_at_the_bound_is_accepted(tmp_path: Path) -> None:
    """A sum of squares of exactly the sensitivity: four squares add up to each number (Lagrange)."""
    rest, values = GRID.squared_sensitivity, np.zeros(NUM_VALUES, np.int64)
    for index in range(NUM_VALUES):
        values[index] = int(rest**0.5)
        rest -= int(values[index]) ** 2
    assert rest == 0

    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        update = with_values(made(work, np.zeros(NUM_VALUES, np.float32)), values)
        assert (await send(place, "device-0", update)).update_state is m.UpdateState.ACCEPTED

    run(tmp_path, private(), story)


@pytest.mark.parametrize("telemetry", [{"train_s": 1.0}, {"num_steps": 3}])
def test_telemetry_that_depends_on_data_is_refused(tmp_path: Path, telemetry: dict[str, int]) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        header, payload = made(work, np.zeros(NUM_VALUES, np.float32))
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(place, "device-0", (replace(header, telemetry=replace(header.telemetry, **telemetry)), payload))
        assert excinfo.value.code == "FN-1683"

    run(tmp_path, private(), story)


def test_an_undeclared_count_is_refused(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        header, payload = made(work, np.zeros(NUM_VALUES, np.float32))
        counts = {m.EXAMPLES: 1, m.SATURATED: 0}
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(place, "device-0", (replace(header, statistics=m.Statistics(counts=counts)), payload))
        assert excinfo.value.code == "FN-0634"

    run(tmp_path, private(), story)


@pytest.mark.parametrize("change", [{"squared_sensitivity": 5}, {"clip_norm": 0.75}])
def test_a_device_refuses_terms_that_do_not_follow_from_the_clip_norm(tmp_path: Path, change: dict[str, float]) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, "device-0")
        assert work.privacy is not None
        with pytest.raises(InvalidInput) as excinfo:
            made(replace(work, privacy=replace(work.privacy, **change)), np.zeros(NUM_VALUES, np.float32))
        assert excinfo.value.code == "FN-1685"

    run(tmp_path, private(), story)


def test_a_model_with_running_statistics_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, {**SHAPES, "norm.running_mean": (7,)})
        with pytest.raises(InvalidPlan) as excinfo:
            await start(place.runs, bundle, private())
        assert excinfo.value.code == "FN-1684"
        await place.runs.stop()

    run_virtual(main())


def test_runs_draw_their_seeds_from_the_operating_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same Plan, devices and changes have other noise in each Run, and no option of a command sets a seed."""

    async def main() -> None:
        place = open_place(tmp_path)
        for run_id in ("run", "other"):
            await start(place.runs, bundle_in(tmp_path / run_id), private(), run_id)
        setups = [place.runs.drivers.driver(run_id).setup for run_id in ("run", "other")]
        seeds = {setup.draw_seed(number) for setup in setups for number in (1, 1, 2)}
        assert (len(seeds), {len(seed) for seed in seeds}) == (6, {32})
        await place.runs.stop()

    run_virtual(main())
    fanin = fanin_in_process(capsys, monkeypatch)
    for command in ("serve", "join"):
        # The only option with a seed delays uploads.
        options = re.findall(r"--[a-z-]*seed[a-z-]*", fanin(command, "--help").out)
        assert set(options) <= {"--delay-seed"}


@pytest.mark.parametrize("num_values", [1, 10**6, 10**9])
@pytest.mark.parametrize("noise_multiplier", [0.1, 1000.0])
def test_the_ring_of_the_sum_holds_the_largest_cohort_and_the_tail_of_the_noise(
    num_values: int, noise_multiplier: float
) -> None:
    devices = 10**6
    privacy = replace(PRIVACY, noise_multiplier=noise_multiplier, population_size=devices, delta=1e-7)
    cohort = replace(private().cohort, concurrency=devices, buffer=devices)
    largest = replace(private(), cohort=cohort, privacy=privacy)
    noise = noise_of(largest, num_values)
    assert isinstance(noise, CentralNoise)
    tail = reach(DiscreteGaussian(noise.noised_sum.parameter), 128 + num_values.bit_length())
    assert devices * noise.grid.largest + tail < 1 << (noise.vector.ring.bits - 1)
    assert noise.vector.ring.bits <= 48


def test_the_noise_of_a_sum_is_the_same_in_any_slices() -> None:
    noise = noise_of(private(), 200_000)
    assert isinstance(noise, CentralNoise)
    correction = noise.adjustment(bytes(range(32))).correction
    assert correction is not None
    whole, cuts = correction(0, 200_000), (0, 1, 65_536, 65_537, 199_999, 200_000)
    assert np.array_equal(np.concatenate([correction(*pair) for pair in pairwise(cuts)]), whole)
    other = noise.adjustment(bytes(32)).correction
    assert other is not None
    assert not np.array_equal(other(0, 100), whole[:100])

"""A private Run whose devices are drawn by coins: nothing else decides which Updates count."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from scipy import stats
from support.private import private
from support.staleness import TABLE, check_in, settle
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, InvalidPlan
from fanin.protos.messages import VersionPublished
from fanin.protos.plans import Plan, PrivacyPlan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.noising import CentralNoise, noise_of
from fanin.server.privacy.releases import SampledRelease
from fanin.server.selection.coins import Coins
from fanin.server.storage.records import EnrolledDevice
from fanin.simulation import LoopbackTransport, Member, Scenario, SyntheticTrainer, play, run_virtual

ENROLLED: Final = [EnrolledDevice(public_key=SigningKey(bytes([number]) * 32).public) for number in range(8)]
ROSTER: Final = tuple(device.device_id for device in ENROLLED)
LATE: Final = EnrolledDevice(public_key=SigningKey(bytes([99]) * 32).public)
DEADLINE_S: Final = 30.0


def sampled(rate: float, *, rounds: int = 1) -> Plan:
    base = plan(concurrency=8, buffer=8, deadline_s=DEADLINE_S, min_report_s=np.inf, max_rounds=rounds)
    privacy = PrivacyPlan(
        mechanism="central",
        clip_norm=0.5,
        noise_multiplier=4.0,
        epsilon=50.0,
        delta=1e-2,
        population="phones",
        population_size=8,
        sampling="coins",
        sampling_rate=rate,
    )
    aggregation = replace(base.aggregation, max_examples=1)
    return replace(base, cohort=replace(base.cohort, quorum=0), aggregation=aggregation, privacy=privacy)


def run(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = open_place(folder)
        await place.state.stores.devices.enroll(ENROLLED, 0.0)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


async def answers(place: Place, devices: tuple[str, ...] = ROSTER) -> dict[str, m.Assignment]:
    """Return the Assignments of these devices, which all check in."""
    replies = {device: await check_in(place, device) for device in devices}
    return {device: reply.assignment for device, reply in replies.items() if isinstance(reply, m.Assigned)}


async def send(place: Place, device: str, work: m.Assignment) -> None:
    change = Change(values=np.full(TABLE.num_values, 0.02, np.float32), counts={m.EXAMPLES: 3})
    header, payload = make_update(work, TABLE, change, m.Telemetry(runtime="synthetic 1"))
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    reply = await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])
    assert reply.update_state is m.UpdateState.ACCEPTED


def coins_of(place: Place) -> Coins:
    coins = place.runs.drivers.driver("run").setup.coins
    assert coins is not None
    return coins


def published(place: Place) -> list[VersionPublished]:
    events = (entry.event for entry in place.state.runs.events("run"))
    return [event for event in events if isinstance(event, VersionPublished) and event.round]


def test_exactly_the_drawn_devices_get_an_assignment(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        drawn = {device for device in ROSTER if coins_of(place).draws(1, device)}
        assert 0 < len(drawn) < len(ROSTER)
        works = await answers(place)
        assert works.keys() == drawn
        assert all(work.privacy is not None and work.privacy.sampling_rate == 0.5 for work in works.values())
        # A drawn device that stays away is not replaced, and the Round does not wait longer or end earlier for it.
        for device in sorted(drawn)[1:]:
            await send(place, device, works[device])
        assert (await answers(place, tuple(set(ROSTER) - drawn))) == {}
        await asyncio.sleep(DEADLINE_S / 2)
        assert published(place) == []
        await asyncio.sleep(DEADLINE_S / 2 + 5)
        assert [event.number for event in published(place)] == [1]

    run(tmp_path, sampled(0.5), story)


def test_an_empty_draw_is_a_round_of_noise_alone(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await asyncio.sleep(2 * DEADLINE_S + 20)
        assert [(event.number, event.total_examples) for event in published(place)] == [(1, 0), (2, 0)]
        versions = [place.state.runs.version("run", number) for number in (0, 1, 2)]
        first, second, third = (load_parameters(place.state.files.blobs, each, TABLE) for each in versions)
        assert (first != second).all()
        assert (second != third).all()
        population = await place.state.stores.ledger.population("phones")
        assert population is not None
        assert population.newest is not None
        assert population.newest.number == 2

    run(tmp_path, sampled(0.01, rounds=2), story)


def test_a_device_that_enrolls_later_is_not_in_the_roster(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await place.state.stores.devices.enroll([LATE], place.state.stores.wall() + 1)
        assert coins_of(place).roster == set(ROSTER)
        assert (await answers(place, (LATE.device_id,))) == {}
        await asyncio.sleep(DEADLINE_S + 10)

    run(tmp_path, sampled(0.99), story)


def test_no_round_opens_for_more_devices_than_the_ledger_covers(tmp_path: Path) -> None:
    """They enrolled after the start. Delta is for the devices of the Plan, and each of them may take part."""

    async def main() -> None:
        place = open_place(tmp_path)
        devices = place.state.stores.devices
        await devices.enroll(ENROLLED, 0.0)
        base = private(max_rounds=3, population_size=8)
        cohort = replace(base.cohort, concurrency=2, buffer=2, quorum=2)
        await start(place.runs, bundle_in(tmp_path), replace(base, cohort=cohort))
        await settle()
        work = await answers(place, ROSTER[:2])
        # The Round that is open is closed: the devices of the population have worked for it.
        await devices.enroll([LATE], 1.0)
        for device, assignment in work.items():
            await send(place, device, assignment)
        await settle()
        info = await place.runs.info("run")
        assert (info.state, info.version) == (m.RunState.PAUSED, 1)
        assert "9 devices are enrolled by now, expected at most 8" in info.reason
        assert "FN-1722" in info.reason
        with pytest.raises(Conflict) as excinfo:
            await place.runs.command(m.Command(command_id="early", run_id="run", what=m.Resume()))
        assert excinfo.value.code == "FN-1722"
        await devices.change(m.DeviceChange(device_id=LATE.device_id, what=m.RemoveDevice()), None, 2.0)
        info = await place.runs.command(m.Command(command_id="later", run_id="run", what=m.Resume()))
        await settle()
        assert info.state is m.RunState.RUNNING
        assert await place.state.stores.rounds.unfinished("run") is not None
        await place.runs.stop()

    run_virtual(main())


def test_a_population_has_one_claim(tmp_path: Path) -> None:
    """Coins claim a device more or less, other Runs a device whose Updates are zero: one epsilon is of one of both."""

    async def tell(place: Place) -> None:
        with pytest.raises(Conflict) as excinfo:
            await start(place.runs, bundle_in(tmp_path), private(population_size=8), "second")
        assert excinfo.value.code == "FN-1720"
        assert "expected a claim of add-or-remove, as of its first run run" in str(excinfo.value)
        assert await place.runs.run_ids() == ("run",)
        (population,) = await place.state.stores.ledger.populations()
        assert population.relation == "add-or-remove"

    run(tmp_path, sampled(0.5), tell)


def test_a_successor_throws_the_same_coins(tmp_path: Path) -> None:
    draws: list[set[str]] = []

    async def life(*, is_first: bool) -> None:
        place = open_place(tmp_path)
        if is_first:
            await place.state.stores.devices.enroll(ENROLLED, 0.0)
            await start(place.runs, bundle_in(tmp_path), sampled(0.5))
        else:
            # One that enrolled while the coordinator was away is not in the roster either.
            await place.state.stores.devices.enroll([LATE], place.state.stores.wall() + 1)
            await place.runs.start()
        await settle()
        draws.append(set(await answers(place, (*ROSTER, LATE.device_id))))
        await place.runs.stop()

    run_virtual(life(is_first=True))
    run_virtual(life(is_first=False))
    assert draws[0] == draws[1] != set()


@pytest.mark.parametrize("small", [sampled(0.5), private(population_size=8, delta=0.125)], ids=["coins", "none"])
def test_a_population_smaller_than_the_enrolled_devices_is_refused(tmp_path: Path, small: Plan) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll([*ENROLLED, LATE], 0.0)
        with pytest.raises(InvalidPlan) as excinfo:
            await start(place.runs, bundle_in(tmp_path), small)
        assert excinfo.value.code == "FN-1722"
        await place.runs.stop()

    run_virtual(main())


def test_coins_have_the_rate_and_are_independent_over_rounds_and_devices() -> None:
    devices = [f"device-{index}" for index in range(400)]
    coins = Coins(key=bytes(32), rate=0.3, roster=frozenset(devices))
    drawn = np.array([[coins.draws(number, device) for device in devices] for number in range(1, 101)])
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.3).pvalue > 1e-3
    # Pairs of consecutive Rounds, and of neighbors: a table of four equals the product of its margins.
    for first, second in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        table = np.histogram2d(first.ravel(), second.ravel(), bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3
    other = Coins(key=bytes(31) + b"1", rate=0.3, roster=frozenset(devices))
    assert [other.draws(1, device) for device in devices] != drawn[0].tolist()
    assert not coins.draws(1, "stranger")


def test_the_ledger_claims_the_amplification_of_the_rate() -> None:
    noise = noise_of(sampled(0.5), TABLE.num_values)
    assert isinstance(noise, CentralNoise)
    assert isinstance(noise.release, SampledRelease)
    assert (noise.denominator, noise.release.sampling_rate) == (4, 0.5)
    without = replace(sampled(0.5).privacy, sampling="none", sampling_rate=0.0)
    plain = noise_of(replace(sampled(0.5), cohort=plan().cohort, privacy=without), TABLE.num_values)
    assert isinstance(plain, CentralNoise)
    assert epsilon([(noise.release, 50)], 1e-2) < epsilon([(plain.release, 50)], 1e-2)


@pytest.mark.parametrize("stops_s", [(), (10.0, 29.9, 35.0)])
def test_a_simulation_draws_the_same_coins_and_noise_over_stops(tmp_path: Path, stops_s: tuple[float, ...]) -> None:
    """Simulated devices are not enrolled, so all of them are the roster. Seeds derive from that of the simulation."""
    names = [f"device-{index}" for index in range(8)]
    members = tuple(Member(device=name, trainer=SyntheticTrainer(partition=index)) for index, name in enumerate(names))
    scenario = Scenario(
        plan=sampled(0.5, rounds=2), bundle=bundle_in(tmp_path), publisher=PUBLISHER, members=members, seed=3
    )
    expected = play(scenario)
    outcome = play(replace(scenario, stops_s=stops_s))
    digests = [version.version_sha256 for version in expected.versions]
    assert len(digests) == 2
    assert [version.version_sha256 for version in outcome.versions] == digests

"""A Run whose clip norm adapts: what devices send, the norm of each Round, and what it costs."""

import math
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support.private import PRIVACY, begin, private, rested, story
from support.staleness import TABLE, assignment, check_in, federate, settle
from support.virtual import PUBLISHER, Place, bundle_in, open_place, start

from fanin.clients.device.updates import Change, make_update
from fanin.commands.console.show import event_text
from fanin.commands.control.describe import description_text
from fanin.edge.floors.floor import PrivacyFloor
from fanin.edge.noise.clipping import ClipGrid
from fanin.edge.noise.distributions import DiscreteGaussian, draw
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput, InvalidPlan, InvalidUpdate
from fanin.protos.messages import Adopt, Command, Resume, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.privacy.ledger import from_text
from fanin.server.privacy.noising import CLIPPING, noise_of
from fanin.simulation import LoopbackTransport, Member, Scenario, SyntheticTrainer, play, run_virtual

NUM_VALUES = TABLE.num_values
BITS_NOISE = 3.0


def adaptive(max_rounds: int = 3, **changes: object) -> Plan:
    # With this quantile, no sum of bits leaves the norm as it is, and no few steps cancel: seeds are of the system.
    values = {"target_quantile": 0.53, "bits_noise": BITS_NOISE, "epsilon": 50.0, "keep_seed_rounds": 9} | changes
    return private(max_rounds, **values)


def norms_of(place: Place) -> list[float]:
    events = (entry.event for entry in place.state.runs.events("run"))
    published = [event for event in events if isinstance(event, VersionPublished) and event.round]
    return [event.privacy.clip_norm for event in published if event.privacy is not None]


def twin_norms(place: Place, plan: Plan, num_rounds: int) -> list[float]:
    """The algorithm as the paper has it, from the payloads and the seeds: exact fractions, and a series for exp."""
    privacy, norm, norms = plan.privacy, plan.privacy.clip_norm, []
    for number in range(1, num_rounds + 1):
        bits = []
        for update in place.state.rounds.updates("run", number):
            payload = b"".join(place.state.files.spool.read(update.header, update.device_id))
            bits.append(int.from_bytes(payload[-8:], "little", signed=True))
            integers = np.frombuffer(payload, "<i4", NUM_VALUES).astype(object)
            length = math.sqrt(int(np.sum(integers**2))) * 2.0 ** ClipGrid.of(norm, 32, NUM_VALUES).exponent
            assert bits[-1] in (-1, 1)
            assert length >= norm * 0.999 if bits[-1] == -1 else length <= norm * 1.001
        seed = place.state.rounds.noise_seed("run", number)
        assert seed is not None
        key = HKDF(SHA256(), 32, salt=None, info=b"fanin round noise v1 clip bits").derive(seed)
        noise = int(draw(key, DiscreteGaussian(4 * Fraction(privacy.bits_noise) ** 2), 0, 1)[0])
        share = Fraction(sum(bits) + noise, 2 * plan.cohort.buffer) + Fraction(1, 2)
        exponent = -Fraction(privacy.clip_learning_rate) * (share - Fraction(privacy.target_quantile))
        factor = sum(exponent**power / math.factorial(power) for power in range(60))
        norms.append(norm)
        norm = float(Fraction(norm) * factor)
    return norms


@pytest.mark.parametrize("change", [{}, {"target_quantile": 0.8, "clip_learning_rate": 1.0}])
def test_the_norms_of_a_run_are_those_of_the_paper_to_the_bit(tmp_path: Path, change: dict[str, float]) -> None:
    plan = adaptive(5, **change)
    federate(tmp_path, plan)

    async def compare() -> None:
        place = open_place(tmp_path)
        norms = norms_of(place)
        assert norms == twin_norms(place, plan, 5)
        assert len(set(norms)) == 5
        for number, norm in enumerate(norms, 1):
            record = place.state.rounds.round("run", number)
            assert record is not None
            assert set(record.grid) == {ClipGrid.of(norm, 32, NUM_VALUES).exponent}

    run_virtual(compare())


def test_the_ledger_has_one_release_for_each_norm(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, adaptive())
        await rested(place)
        ledger = await place.state.stores.ledger.counts(PRIVACY.population)
        ((text, count),) = ledger.counts.items()
        assert count == 3
        noise = noise_of(adaptive(), NUM_VALUES)
        assert noise is not None
        assert from_text(text) == noise.release
        # Rounds and the Run show their norms.
        norms = norms_of(place)
        events = [entry.event for entry in place.state.runs.events("run")]
        texts = [event_text(event) for event in events if isinstance(event, VersionPublished) and event.round]
        assert [f"clip norm {norm:.6g}" in text for norm, text in zip(norms, texts, strict=True)] == [True] * 3
        assert f"clip norm {norms[-1]:.6g}" in description_text(await place.runs.describe("run", 1))

    story(tmp_path, tell)


def test_more_rounds_continue_the_norm_and_a_rollback_restores_that_of_its_version(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        await begin(place, tmp_path, adaptive(2))
        await rested(place)
        first = norms_of(place)
        await place.runs.command(Command(command_id="more", run_id="run", what=Resume(rounds=1)))
        await rested(place)
        third = norms_of(place)[2]
        assert third not in first
        await place.runs.command(Command(command_id="back", run_id="run", what=Adopt(number=1, rounds=1)))
        await rested(place)
        assert norms_of(place)[3] == first[1]
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    story(tmp_path, tell)


@pytest.mark.parametrize("keep_seed_rounds", [0, 9])
def test_verify_recomputes_the_norm_and_notices_another_one(tmp_path: Path, keep_seed_rounds: int) -> None:
    federate(tmp_path, adaptive(2, keep_seed_rounds=keep_seed_rounds))

    async def damaged() -> None:
        place = open_place(tmp_path)
        verdicts = list(verify_run(place.state, "run"))
        assert [verdict.problem for verdict in verdicts] == ["", "", ""]
        assert [bool(verdict.from_sum) for verdict in verdicts[1:]] == [not keep_seed_rounds] * 2
        # The record of the second Round becomes that of the first one: a norm that does not follow from its bits.
        with closing(sqlite3.connect(tmp_path / "state" / "fanin.db")) as database, database:
            (first,) = database.execute(
                "SELECT artifact_proto FROM outer_states WHERE name = ? AND round = 1", (CLIPPING,)
            ).fetchone()
            database.execute(
                "UPDATE outer_states SET artifact_proto = ? WHERE name = ? AND round = 2", (first, CLIPPING)
            )
        assert [bool(verdict.problem) for verdict in verify_run(place.state, "run")] == [False, False, True]

    run_virtual(damaged())


def made(work: m.Assignment, length: float) -> tuple[m.UpdateHeader, bytes]:
    values = np.zeros(NUM_VALUES, np.float32)
    values[3] = length
    change = Change(values=values, counts={m.EXAMPLES: 7})
    return make_update(work, TABLE, change, m.Telemetry(runtime="synthetic 1"))


async def send(place: Place, device: str, update: tuple[m.UpdateHeader, bytes]) -> m.UploadReply:
    header, payload = update
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    return await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])


def run(folder: Path, plan: Plan, tell: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan)
        await settle()
        await tell(place)
        await settle()
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


@pytest.mark.parametrize(
    ("length", "bit"), [(0.4999, 1), (0.5, 1), (np.float32(0.50001), -1), (9.0, -1), (np.nan, 1), (0.0, 1)]
)
@pytest.mark.parametrize("codec", ["fixed32", "int8"])
def test_a_device_sends_its_bit_after_the_values_alone(tmp_path: Path, length: float, bit: int, codec: str) -> None:
    async def tell(place: Place) -> None:
        work = await assignment(place, "device-0") if codec == "fixed32" else await assigned(place, codec)
        header, payload = made(work, length)
        assert header.statistics.counts == {m.EXAMPLES: 1}
        assert np.frombuffer(payload[-16:], "<i8").tolist() == [1, bit]
        assert (await send(place, "device-0", (header, payload))).update_state is m.UpdateState.ACCEPTED

    run(tmp_path, replace(adaptive(1), codec=m.CodecSpec(name=codec, max_shift=0)), tell)


async def assigned(place: Place, codec: str) -> m.Assignment:
    capabilities = m.Capabilities(codecs=(codec,), runtimes=("synthetic 1",), graph_formats=("onnx",))
    hello = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
    answer = await place.coordinator.check_in("device-0", hello)
    assert isinstance(answer, m.Assigned)
    return answer.assignment


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ({"bits_noise": 0.0}, (m.EXAMPLES, m.CLIP_BITS)),
        ({}, (m.EXAMPLES,)),
        ({}, (m.EXAMPLES, m.CLIP_BITS, m.TRAIN_LOSS)),
        ({"mechanism": "skellam"}, (m.EXAMPLES, m.CLIP_BITS)),
        (None, (m.EXAMPLES, m.CLIP_BITS)),
    ],
)
def test_a_device_sends_no_bit_without_noise(
    tmp_path: Path, terms: dict[str, object] | None, names: tuple[str, ...]
) -> None:
    async def tell(place: Place) -> None:
        work = await assignment(place, "device-0")
        assert work.privacy is not None
        privacy = None if terms is None else replace(work.privacy, **terms)
        statistics = tuple(m.Statistic(name=name, bound=1) for name in names)
        with pytest.raises(InvalidInput) as excinfo:
            made(replace(work, privacy=privacy, statistics=statistics), 0.1)
        assert excinfo.value.code == "FN-1685"

    run(tmp_path, adaptive(1), tell)


def test_a_simulation_has_the_same_norms_over_stops(tmp_path: Path) -> None:
    members = tuple(Member(device=f"device-{index}", trainer=SyntheticTrainer(partition=index)) for index in range(4))
    scenario = Scenario(plan=adaptive(3), bundle=bundle_in(tmp_path), publisher=PUBLISHER, members=members, seed=3)
    expected, outcome = play(scenario), play(replace(scenario, stops_s=(5.0, 20.0, 40.0)))
    norms = [[each.privacy.clip_norm for each in one.versions if each.privacy] for one in (expected, outcome)]
    assert norms[0] == norms[1]
    assert len(set(norms[0])) == 3
    assert [each.version_sha256 for each in expected.versions] == [each.version_sha256 for each in outcome.versions]


@pytest.mark.parametrize("tail", [(1, 0), (1, 2), (1, -(2**63)), (2, 1), (0, -1), (-1, -1)])
def test_another_bit_is_refused_and_harms_no_other(tmp_path: Path, tail: tuple[int, int]) -> None:
    async def tell(place: Place) -> None:
        header, payload = made(await assignment(place, "device-9"), 0.1)
        wrong = payload[:-16] + np.array(tail, "<i8").tobytes()
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(place, "device-9", (replace(header, payload=artifact_of(wrong)), wrong))
        assert excinfo.value.code == "FN-1712"
        for index in range(4):
            work = await assignment(place, f"device-{index}")
            assert (await send(place, f"device-{index}", made(work, 0.1))).update_state is m.UpdateState.ACCEPTED
        await settle()
        assert len(norms_of(place)) == 1

    run(tmp_path, adaptive(1), tell)


@pytest.mark.parametrize(("counts", "cut", "code"), [({m.CLIP_BITS: 1}, 0, "FN-1712"), ({}, 16, "FN-0639")])
def test_a_bit_in_the_header_and_a_payload_without_one_are_refused(
    tmp_path: Path, counts: dict[str, int], cut: int, code: str
) -> None:
    async def tell(place: Place) -> None:
        header, payload = made(await assignment(place, "device-0"), 0.1)
        payload = payload[: len(payload) - cut]
        statistics = m.Statistics(counts={m.EXAMPLES: 1, **counts})
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(
                place, "device-0", (replace(header, statistics=statistics, payload=artifact_of(payload)), payload)
            )
        assert excinfo.value.code == code

    run(tmp_path, adaptive(1), tell)


def test_the_bound_and_the_floor_are_those_of_the_round(tmp_path: Path) -> None:
    """The norm of the second Round is another one: its bound is checked, and the device's owner bounds it."""

    async def tell(place: Place) -> None:
        first = await assignment(place, "device-0")
        for index in range(4):
            work = await assignment(place, f"device-{index}")
            await send(place, f"device-{index}", made(work, 0.1))
        await settle()
        second = await assignment(place, "device-0")
        assert first.privacy is not None
        assert second.privacy is not None
        low, high = sorted((first.privacy.clip_norm, second.privacy.clip_norm))
        assert low < high
        assert (
            second.privacy.squared_sensitivity
            == ClipGrid.of(second.privacy.clip_norm, 32, NUM_VALUES).squared_sensitivity
        )
        header, payload = made(second, 0.1)
        values = np.zeros(NUM_VALUES, "<i4")
        values[0] = math.isqrt(second.privacy.squared_sensitivity) + 1
        wrong = values.tobytes() + payload[-16:]
        with pytest.raises(InvalidUpdate) as excinfo:
            await send(place, "device-0", (replace(header, payload=artifact_of(wrong)), wrong))
        assert excinfo.value.code == "FN-1683"
        between = PrivacyFloor(mechanism="central", clip_norm=(low + high) / 2)
        for work in (first, second):
            replace(between, clip_norm=high).check(work, "its owner")
            assert work.privacy is not None
            if work.privacy.clip_norm == high:
                with pytest.raises(InvalidPlan, match=f"clip norm {high:g}"):
                    between.check(work, "its owner")
                continue
            between.check(work, "its owner")
            with pytest.raises(InvalidPlan, match="clip_bits without noise"):
                between.check(replace(work, privacy=replace(work.privacy, bits_noise=0.0)), "its owner")

    run(tmp_path, adaptive(2), tell)


def test_a_round_without_updates_moves_the_norm_by_noise_alone(tmp_path: Path) -> None:
    plan = adaptive(2)
    coins = replace(plan.privacy, sampling="coins", sampling_rate=0.5, population_size=4, delta=1e-2)
    cohort = replace(plan.cohort, quorum=0, min_report_s=math.inf, deadline_s=30.0)
    plan = replace(plan, cohort=cohort, privacy=coins)

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan)
        for _ in range(80):
            await settle()
        await check_in(place, "stranger")
        assert len(set(norms_of(place))) == 2
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())

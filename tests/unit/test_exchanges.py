"""Rounds of protocols with messages, from outside the package, on a virtual clock."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.endings import NUM_DEVICES, Ending, begin, ending, work_times
from support.mortal import Mortal
from support.nightly import in_ci
from support.protocols import protocols
from support.staleness import send
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Conflict, FaninError, InvalidInput, NotFound
from fanin.protos.plans import Plan, RetentionPlan, RoundPlan
from fanin.server.folder import open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.simulation import run_virtual

__all__ = ["protocols"]
pytestmark = pytest.mark.usefixtures("protocols")
NAMES = ("commit_reveal", "witnessed")
NUM_MOMENTS = 25
CAPABILITIES = m.Capabilities(
    codecs=("fixed32",), runtimes=("none",), graph_formats=("onnx",), round_protocols=("commit_reveal", "witnessed")
)


def plan_of(name: str, **changes: object) -> Plan:
    keys = {"concurrency": NUM_DEVICES, "buffer": NUM_DEVICES, "quorum": NUM_DEVICES, "max_rounds": 2} | changes
    whole = replace(plan(**keys), round=RoundPlan(protocol=name))
    # The ring of a masked sum holds the largest weight of each device.
    return replace(whole, aggregation=replace(whole.aggregation, max_examples=4096)) if name == "masked" else whole


def ended(name: str, folder: Path, kill_at: Collection[int] = (), *, loses_power: bool = False) -> Ending:
    async def federate(path: Path, kills: Collection[int], power: bool) -> Ending:
        mortal = Mortal(path, kills, loses_power=power)
        scene = await begin(mortal, path, plan_of(name), work_times(10.0, 10.0))
        await scene.await_rest()
        return await scene.end({})

    return ending(federate, folder, kill_at, loses_power=loses_power)


@pytest.mark.parametrize("name", in_ci(NAMES, {"witnessed"}))
def test_a_coordinator_killed_around_each_roster_ends_the_run_with_the_same_bits(tmp_path: Path, name: str) -> None:
    undisturbed = ended(name, tmp_path / "undisturbed")
    moments = undisturbed.moments
    rosters = [number for number, what in enumerate(moments, 1) if what in ("before Freeze", "after Freeze")]
    # Of the first Round. In CI, after the closed set alone.
    for number in rosters[:4] if name == "commit_reveal" else rosters[2:3]:
        killed = ended(name, tmp_path / f"killed-{number}", (number,))
        assert killed.record == undisturbed.record, (number, moments[number - 1])


@pytest.mark.nightly
@pytest.mark.parametrize("loses_power", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_coordinator_killed_at_any_moment_ends_the_run_with_the_same_bits(
    tmp_path: Path, name: str, loses_power: bool
) -> None:
    undisturbed = ended(name, tmp_path / "undisturbed")
    opened = undisturbed.moments.index("after GoOn")
    moments = random.Random(name).sample(range(opened, len(undisturbed.moments) + 1), NUM_MOMENTS)
    for number in moments:
        killed = ended(name, tmp_path / f"killed-{number}", (number,), loses_power=loses_power)
        assert killed.record == undisturbed.record, (number, undisturbed.moments[number - 1])


@contextmanager
def refused(kind: type[FaninError], code: str) -> Iterator[None]:
    """Check that the block raises an error of this kind with this code."""
    with pytest.raises(kind) as excinfo:
        yield
    assert excinfo.value.code == code, excinfo.value


async def assigned(place: Place, *devices: str) -> list[m.Assignment]:
    """Return the Assignments of devices that check in."""
    check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=1.0)
    answers = await asyncio.gather(*(place.coordinator.check_in(device, check_in) for device in devices))
    return [answer.assignment for answer in answers if isinstance(answer, m.Assigned)]


def message(assignment: m.Assignment, phase: str, payload: bytes, wait_s: float = 0.0) -> m.ExchangeRequest:
    return m.ExchangeRequest(assignment_id=assignment.assignment_id, phase=phase, payload=payload, wait_s=wait_s)


def in_place(folder: Path, name: str, test: Callable[[Place], Awaitable[None]], **changes: object) -> None:
    """Run a test in a place whose Run has this protocol."""

    async def main() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan_of(name, **changes))
        await test(place)
        await place.coordinator.stop()
        await place.runs.stop()

    run_virtual(main())


BAD = {
    "a phase without messages": ("training", b"abc", InvalidInput, "FN-1602"),
    "an unknown phase": ("comitting", b"abc", InvalidInput, "FN-1602"),
    "no bytes": ("committing", b"", InvalidInput, "FN-1603"),
    "too many bytes": ("committing", bytes(33), InvalidInput, "FN-1603"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_message_is_the_failure_of_its_call_alone(tmp_path: Path, case: str) -> None:
    phase, payload, kind, code = BAD[case]

    async def test(place: Place) -> None:
        work, other = await assigned(place, "a", "b")
        with refused(kind, code):
            await place.coordinator.exchange("a", message(work, phase, payload))
        # The device corrects itself, and no other device notices.
        for device, each in (("a", work), ("b", other)):
            outcome = await place.coordinator.exchange(device, message(each, "committing", bytes(32)))
            assert isinstance(outcome, m.ExchangePause)

    in_place(tmp_path, "commit_reveal", test)


def test_the_first_message_is_final_and_repeated_bytes_are_answered_alike(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        (work,) = await assigned(place, "a")
        exchange = place.coordinator.exchange
        for _ in range(2):
            assert isinstance(await exchange("a", message(work, "committing", bytes(32))), m.ExchangePause)
        with refused(InvalidInput, "FN-1604"):
            await exchange("a", message(work, "committing", bytes(31) + b"x"))
        stored = await place.state.stores.messages.message("run", 1, "committing", "a")
        assert stored == bytes(32)

    in_place(tmp_path, "commit_reveal", test)


def test_a_device_without_the_assignment_or_without_a_place_changes_nothing(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        (work,) = await assigned(place, "a")
        exchange = place.coordinator.exchange
        with refused(NotFound, "FN-0613"):
            await exchange("b", message(work, "committing", bytes(32)))
        with refused(NotFound, "FN-0613"):
            await exchange("a", replace(message(work, "committing", bytes(32)), assignment_id="run.7.forged"))
        await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, failure="no"))
        await assigned(place, "b", "c", "d")
        with refused(Conflict, "FN-1605"):
            await exchange("a", message(work, "committing", bytes(32)))
        assert await place.state.stores.messages.messages("run", 1) == ()

    in_place(tmp_path, "commit_reveal", test)


def test_a_wrong_message_ends_the_assignment_and_the_round_continues_without_the_device(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        devices = ("a", "b", "c")
        works = dict(zip(devices, await assigned(place, *devices), strict=True))
        exchange = place.coordinator.exchange
        commitments = [exchange(device, message(works[device], "committing", bytes(32), 5.0)) for device in devices]
        answers = await asyncio.gather(*commitments)
        assert answers == [m.ExchangeAnswer(message=bytes(96))] * 3
        # No share has a digest of zeros.
        with refused(InvalidInput, "FN-1606"):
            await exchange("a", message(works["a"], "revealing", b"share"))
        reply = await place.coordinator.report(
            "a", m.Report(assignment_id=works["a"].assignment_id, progress=m.TrainingProgress())
        )
        assert reply.round_state is m.RoundState.CLOSED
        assert await place.state.stores.messages.senders("run", 1, "revealing") == ()

    in_place(tmp_path, "commit_reveal", test, quorum=2)


def test_an_update_before_the_messages_is_refused(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        (work,) = await assigned(place, "a")
        with refused(Conflict, "FN-1607"):
            await send(place, "a", work)

    in_place(tmp_path, "commit_reveal", test)


def test_a_phase_without_its_quorum_fails_the_round_at_its_deadline(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        works = await assigned(place, "a", "b", "c")
        exchange = place.coordinator.exchange
        # 30 s are the protocol's deadline of the phase.
        outcome = await exchange("a", message(works[0], "committing", bytes(32), 40.0))
        assert outcome == m.ExchangeEnd(reason="the round has ended")
        description = await place.runs.describe("run", 2)
        assert [each.phase for each in description.rounds][-1] == "failed"
        assert await place.state.stores.messages.messages("run", 1) == ()

    in_place(tmp_path, "commit_reveal", test)


def test_a_round_with_a_quorum_of_messages_continues_without_the_others(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        works = await assigned(place, "a", "b", "c")
        exchange = place.coordinator.exchange
        sent = [
            exchange(name, message(work, "committing", bytes(32), 40.0))
            for name, work in zip("ab", works, strict=False)
        ]
        assert await asyncio.gather(*sent) == [m.ExchangeAnswer(message=bytes(64))] * 2
        late = await exchange("c", message(works[2], "committing", bytes(32)))
        assert isinstance(late, m.ExchangeEnd)
        # In the next phase, a device outside the roster has no place.
        with refused(Conflict, "FN-1605"):
            await exchange("c", message(works[2], "revealing", bytes(32)))

    in_place(tmp_path, "commit_reveal", test, quorum=2)


def test_messages_are_removed_with_the_updates_of_their_round(tmp_path: Path) -> None:
    undisturbed = ended("witnessed", tmp_path)
    assert undisturbed.record

    async def main() -> None:
        state = open_state(tmp_path / "life-0", Durability.PROCESS, (inline, inline), lambda: 1e9)
        messages = state.stores.messages
        assert len(await messages.messages("run", 1)) == 2 * NUM_DEVICES
        what = await state.stores.retention.remove("run", RetentionPlan(keep_versions=5, keep_updates=1), 1e9)
        assert what.rounds == (1,)
        assert await messages.messages("run", 1) == ()
        assert [roster.phase for roster in await messages.rosters("run", 1)] == ["joining", "witnessing"]
        assert len(await messages.messages("run", 2)) == 2 * NUM_DEVICES

    run_virtual(main())


def test_masks_that_cancel_publish_the_bits_of_the_plain_protocol(tmp_path: Path) -> None:
    """``ended`` verifies the Versions. The tail has weights and statistics, and the sum wraps in a ring of 48 bits."""
    plain, masked = ended("plain", tmp_path / "plain"), ended("masked", tmp_path / "masked")
    # The grid of a masked Round stays, so the second Round has another one.
    assert masked.record[3] == plain.record[3]
    assert masked.record[3][0] == "VersionPublished"


@pytest.mark.nightly
def test_a_correction_of_the_sum_is_published_and_verified(tmp_path: Path) -> None:
    """``ended`` verifies the Versions. The protocols of this test train the same Updates."""
    plain, corrected = ended("commit_reveal", tmp_path / "plain"), ended("witnessed", tmp_path / "corrected")
    assert plain.record[0] != corrected.record[0]


def test_random_requests_end_with_an_outcome_or_an_error_and_harm_no_other_device(tmp_path: Path) -> None:
    rng = random.Random(0)

    async def test(place: Place) -> None:
        works = dict(zip("abc", await assigned(place, *"abc"), strict=True))
        ids = [*(work.assignment_id for work in works.values()), "run.1.forged", "run.2.x", "other.1.x", "run"]
        phases = ["committing", "revealing", "training", "closing", "published", "unknown"]
        for _ in range(300):
            request = m.ExchangeRequest(
                assignment_id=rng.choice(ids),
                phase=rng.choice(phases),
                payload=rng.randbytes(rng.choice([0, 1, 31, 32, 33, 5000])),
            )
            try:
                outcome = await place.coordinator.exchange(rng.choice("ab"), request)
                assert isinstance(outcome, m.ExchangeOutcome)
            except FaninError as exc:
                assert exc.code, exc
        # The third device sent nothing, and still takes part.
        await place.coordinator.exchange("c", message(works["c"], "committing", bytes(32)))
        assert await place.state.stores.messages.message("run", 1, "committing", "c") == bytes(32)

    in_place(tmp_path, "commit_reveal", test)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NAMES, "masked"])
def test_devices_that_restart_at_any_moment_repeat_their_messages(tmp_path: Path, name: str) -> None:
    """A restarted device has its folder: it gets its Assignment again, and the Round ends with the same bits."""

    async def federate(path: Path, restart_s: float) -> Ending:
        mortal = Mortal(path)
        scene = await begin(mortal, path, plan_of(name), work_times(10.0, 10.0))
        for task in scene.tasks:
            task.cancel()
        await asyncio.gather(*scene.tasks, return_exceptions=True)
        devices = mortal.devices(NUM_DEVICES, lambda _: 5.0)

        async def restarting(index: int) -> None:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(restart_s + 0.1 * index):
                        await devices[index].run()
                devices[index].restart()

        scene.tasks[:] = [asyncio.create_task(restarting(index)) for index in range(NUM_DEVICES)]
        await scene.await_rest()
        return await scene.end({})

    async def main(restart_s: float) -> Ending:
        async with asyncio.timeout(10_000.0):
            return await federate(tmp_path / f"{restart_s}", restart_s)

    undisturbed = run_virtual(main(1000.0))
    # Shorter than the exchanges, about as long as them, and longer than the training.
    for restart_s in (5.4, 5.7, 6.1, 7.3):
        restarted = run_virtual(main(restart_s))
        assert restarted.record == undisturbed.record, restart_s


def test_a_device_without_the_protocol_is_not_selected(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        capabilities = replace(CAPABILITIES, round_protocols=("witnessed",))
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=1.0)
        answer = await place.coordinator.check_in("a", check_in)
        assert isinstance(answer, m.Rejected)
        assert (answer.reason, answer.text) == (
            m.RejectReason.UNSUITABLE,
            "round protocol: got ['witnessed'], expected commit_reveal",
        )

    in_place(tmp_path, "commit_reveal", test)


def test_the_failure_of_a_round_names_the_phase_without_messages(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        await assigned(place, *"abc")
        await asyncio.sleep(40.0)
        events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
        failed = [event for event in events if isinstance(event, m.RoundFailed)]
        assert failed[0].reason.startswith("0 messages in the phase committing, expected at least 3")

    in_place(tmp_path, "commit_reveal", test)

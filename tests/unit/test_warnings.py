"""Warnings of a Run: each once, in the events, in the description and in the log; the Run continues."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from support.staleness import TABLE, assignment, settle, watched
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.commands.console.show import event_text
from fanin.commands.control.describe import description_row, description_text
from fanin.edge.runtimes.evaluations import loss_count
from fanin.protos import messages as m
from fanin.protos.messages import RunWarned
from fanin.protos.plans import Plan
from fanin.server.runs.driving.warnings import UpdateWarnings
from fanin.server.storage.records import Contributors
from fanin.simulation import LoopbackTransport, run_virtual

NO_COUNTS: Mapping[str, int] = MappingProxyType({})
SCAFFOLD = m.StageSpec(name="scaffold", options={"num_devices": 10.0})


async def upload(
    place: Place, device: str, examples: int, partition: int | None = None, counts: Mapping[str, int] = NO_COUNTS
) -> None:
    """Send an Update of a device."""
    change = Change(values=np.zeros(TABLE.num_values, np.float32), counts={m.EXAMPLES: examples, **counts})
    telemetry = m.Telemetry(runtime="synthetic 1", partition=partition)
    header, payload = make_update(await assignment(place, device), TABLE, change, telemetry)
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    reply = await line.upload(header, lambda first, size: payload[first : first + size])
    assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


def warned(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> tuple[RunWarned, ...]:
    """Return the warnings of a Run. Its events and its description have the same ones."""

    async def main() -> tuple[RunWarned, ...]:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        description = await place.runs.describe("run", 1)
        events = [entry.event async for entry in place.runs.watch("run", 0)]
        found = tuple(event for event in events if isinstance(event, RunWarned))
        assert description.warnings == found
        assert [event_text(each) for each in found] == [f"warning: {each.text}" for each in found]
        text = description_text(description)
        assert all(f"  warning   {each.text}\n" in text for each in found)
        assert [row["text"] for row in description_row(description)["warnings"]] == [each.text for each in found]
        await place.runs.stop()
        return found

    return run_virtual(main())


def plan_of(num_rounds: int, **changes: int) -> Plan:
    return plan(concurrency=2, buffer=2, quorum=2, max_rounds=num_rounds, **changes)


def test_a_cap_that_binds_is_a_warning_once_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(place: Place) -> None:
        for _ in range(2):
            await upload(place, "a", 60_000)
            await upload(place, "b", 100)

    run_plan = plan_of(2)
    run_plan = replace(run_plan, aggregation=replace(run_plan.aggregation, max_examples=4096))
    (warning,) = warned(tmp_path, run_plan, story)
    assert (warning.code, warning.subject) == ("examples_capped", "")
    assert warning.text == (
        "aggregation.max_examples = 4096 cuts the weight of 1 of 2 updates of round 1: the largest has 60000 examples, "
        "and 4196 of 60100 examples count; raise it, or remove it for the mean over all examples"
    )
    assert caplog.text.count(warning.text) == 1


@pytest.mark.parametrize(
    ("partitions", "pairs"),
    [((3, 3), ["a b"]), ((3, 4), []), ((None, None), []), ((0, None), []), ((0, 0), ["a b"])],
    ids=str,
)
def test_two_devices_of_one_partition_are_named_once(
    tmp_path: Path, partitions: Sequence[int | None], pairs: list[str]
) -> None:
    async def story(place: Place) -> None:
        for _ in range(2):
            for device, partition in zip("ab", partitions, strict=True):
                await upload(place, device, 10, partition)

    warnings = warned(tmp_path, plan_of(2), story)
    assert [(each.code, each.subject) for each in warnings] == [("shared_partition", pair) for pair in pairs]
    for each in warnings:
        assert each.text == (
            f"the devices a and b both report partition {partitions[0]}: if both have its examples, these count twice; "
            "start each device with its own --partition"
        )


def test_devices_of_one_partition_are_named_also_if_they_take_part_in_different_rounds(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        for devices in ("ab", "ca", "cb"):
            for device in devices:
                await upload(place, device, 10, {"a": 1, "b": 2, "c": 2}[device])

    assert [each.subject for each in warned(tmp_path, plan_of(3), story)] == ["b c"]


def test_many_examples_and_their_loss_count_exactly(tmp_path: Path) -> None:
    """Without a cap no warning names one. 50 million examples at 2.5 nats passed 2^40 in units of 2^-16."""
    devices = {"a": (50_000_000, 2.5), "b": ((1 << 32) + 5, 1.5)}

    async def story(place: Place) -> None:
        for device, (num_examples, loss) in devices.items():
            total = loss_count(loss * num_examples, num_examples, 2)
            await upload(place, device, num_examples, counts={m.TRAIN_LOSS: total})
        (version,) = [each for each in await watched(place) if each.round]
        numbers, losses = zip(*devices.values(), strict=True)
        assert version.total_examples == sum(numbers)
        assert version.train_loss == pytest.approx(np.average(losses, weights=numbers), rel=1e-12)

    assert warned(tmp_path, plan_of(1), story) == ()


def test_sums_at_their_bound_are_named(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        for device, counts in (("a", {"train.acc": 70_000, m.TRAIN_LOSS: m.MAX_SUM}), ("b", {"train.acc": 7})):
            await upload(place, device, 100_000_000, counts=counts)

    run_plan = replace(plan_of(1), statistics=(m.Statistic(name="train.acc", bound=65_536),))
    first, second = warned(tmp_path, run_plan, story)
    assert [(each.code, each.subject) for each in (first, second)] == [
        ("statistic_cut", "train.acc"),
        ("statistic_cut", "train_loss_q16"),
    ]
    assert first.text == (
        "1 of 2 updates of round 1 report train.acc at its bound, 65536: a larger sum is cut to it, so its mean may be "
        "wrong; raise its bound in the plan"
    )
    assert second.text.endswith("its mean may be wrong; lower the learning rate if it diverges")


@pytest.mark.parametrize(
    ("num_updates", "num_devices", "has_ended", "subject"),
    [
        (4, 4, False, ""),
        (12, 11, False, "more"),
        (100, 11, True, "more"),
        (100, 4, False, ""),
        (100, 4, True, "far fewer"),
        (100, 9, True, ""),
        (4, 4, True, ""),
    ],
)
def test_scaffold_warns_of_another_number_of_devices(
    num_updates: int, num_devices: int, has_ended: bool, subject: str
) -> None:
    warnings = UpdateWarnings(replace(plan_of(1), stages=(SCAFFOLD,)))
    contributors = Contributors(num_updates=num_updates, num_devices=num_devices)
    found = warnings.of_devices(contributors, has_ended=has_ended)
    assert [each.subject for each in found] == ([subject] if subject else [])
    if subject:
        assert found[0].text == (
            f"{num_devices} devices took part, {subject} than num_devices = 10 of the stage scaffold, whose states "
            "assume that number; set num_devices to the number of all devices of the run"
        )
    warnings.note(found)
    assert warnings.of_devices(contributors, has_ended=has_ended) == ()


def test_a_plan_without_scaffold_has_no_number_of_devices() -> None:
    contributors = Contributors(num_updates=9, num_devices=9)
    assert UpdateWarnings(plan_of(1)).of_devices(contributors, has_ended=True) == ()

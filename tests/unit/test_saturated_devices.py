"""Devices that lose many values at the ends of the grid's range: in the event, on the terminal, on the device."""

import json
import logging
from pathlib import Path

import pytest
from support.scenarios import CALM, PATIENT_S, SHAPES
from support.scripted import run, scripted_coordinator
from support.virtual import PUBLISHER, plan

from fanin.commands.console.show import event_row, event_text
from fanin.commands.control.describe import description_row, description_text
from fanin.protos import messages as m
from fanin.protos.messages import (
    MAX_SATURATED_DEVICES,
    LoggedEvent,
    RunDescription,
    VersionPublished,
    saturated_devices,
)
from fanin.server.aggregation.statistics import saturated_devices_of
from fanin.simulation import Federation, Member, SyntheticTrainer, run_virtual, synthetic_bundle

SCALES = (0.01, 100.0, 4.0, 1000.0)
"""Standard deviations of the changes. The first grid ends at +-4, which a third of the third device's values exceed."""


def test_one_percent_of_the_values_is_reported_only_if_more_are_cut() -> None:
    updates = {"one": {m.SATURATED: 10}, "two": {m.SATURATED: 11}, "three": {m.SATURATED: 500}, "four": {}}
    saturated = saturated_devices_of(updates, 1000)
    assert (saturated.num_devices, list(saturated.num_values.items())) == (2, [("three", 500), ("two", 11)])


def test_an_event_names_few_of_many_devices() -> None:
    saturated = saturated_devices({f"device-{number:04}": 10 + number for number in range(4000)})
    assert (saturated.num_devices, len(saturated.num_values)) == (4000, MAX_SATURATED_DEVICES)
    assert next(iter(saturated.num_values)) == "device-3999"


def test_a_round_reports_each_such_device_once_in_its_version(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)

    async def run() -> tuple[list[LoggedEvent], RunDescription]:
        async with Federation(seed=1) as federation:
            await federation.start_run("run", plan(deadline_s=PATIENT_S, max_rounds=1), bundle, PUBLISHER)
            for index, scale in enumerate(SCALES):
                trainer = SyntheticTrainer(partition=index, scale=scale)
                federation.join(Member(device=f"device-{index}", trainer=trainer, habits=CALM), bundle)
            events = [entry async for entry in federation.watch("run")]
            return events, await federation.runs.describe("run", 10)

    events, description = run_virtual(run())
    (published,) = (entry for entry in events if isinstance(entry.event, VersionPublished) and entry.event.round)
    event = published.event
    assert isinstance(event, VersionPublished)
    assert event.saturated.num_devices == 3
    assert list(event.saturated.num_values) == ["device-3", "device-1", "device-2"]
    assert sum(event.saturated.num_values.values()) == event.num_saturated
    most = event.saturated.num_values["device-3"]
    text = f" (more than 1 % of the values of 3 devices: device-3 {most}, device-1 "
    assert text in event_text(event)
    row = json.loads(json.dumps(event_row(published)))
    assert row["saturated"] == {"num_devices": 3, "num_values": dict(event.saturated.num_values)}
    assert description.saturated == event.saturated
    assert f"  saturated in version 1: more than 1 % of the values of 3 devices: device-3 {most}" in description_text(
        description
    )
    assert description_row(description)["saturated"] == row["saturated"]


@pytest.mark.parametrize(("scale", "is_warned"), [(0.01, False), (1e9, True)])
def test_the_device_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: float, is_warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        run(scripted_coordinator(tmp_path), tmp_path, SyntheticTrainer(partition=0, scale=scale))
    text = "train: 11 of the 11 values of the update were out of the range of the grid and were cut to its end"
    assert (text in caplog.text) == is_warned

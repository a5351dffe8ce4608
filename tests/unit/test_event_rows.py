"""The rows of `fanin watch --json`: each kind of event, with everything that it may hold, is JSON."""

import json
from dataclasses import fields
from typing import get_args

import pytest

from fanin.commands.console.show import event_row, event_text
from fanin.protos import messages as m
from fanin.protos.messages.events import RoundTimes

ALICE = m.Principal(kind=m.PrincipalKind.OPERATOR, id="alice")
SPREAD = m.DeviceSpread(num_devices=2, mean=1.0, min=0.5, p10=0.5, median=1.0, p90=1.5, max=1.5)
EVENTS: list[m.RunEvent] = [
    m.RoundOpened(round=1, base_version=0),
    m.RoundClosed(round=1, num_accepted=1, accepted=("a",)),
    m.RoundFailed(round=1, reason="too few"),
    m.RoundExtended(round=1, extension_s=1.0, num_devices=1, device_ids=("a",)),
    m.RoundLacks(round=1, missing={"region": 1}, text="region"),
    m.DevicesGone(round=1, num_devices=1, device_ids=("a",)),
    m.VersionPublished(
        number=1,
        version_sha256="0" * 64,
        parent=0,
        round=1,
        saturated=m.SaturatedDevices(num_devices=1, num_values={"a": 5}),
        evaluation=m.Evaluation(
            num_examples=1, loss=1.0, accuracy_float=1.0, accuracy_int8=1.0, int8_agreement=1.0, num_labels=1
        ),
        device_spreads={"train_loss": SPREAD},
        times=RoundTimes(num_devices=1, wait_s=2.0),
        by=ALICE,
        coverage=m.Coverage(num_devices=1, num_enrolled=2, required={"region": 1}),
        privacy=m.SpentPrivacy(population="phones", epsilon=0.5, delta=1e-6, budget=2.0),
    ),
    m.RunRested(state=m.RunState.PAUSED, reason="asked", by=ALICE),
    m.RunResumed(rounds=1, by=ALICE),
    m.RunWarned(code="FN-0287", text="slow"),
]


def test_the_list_has_each_kind_of_event_with_each_part() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(m.RunEvent))
    assert all(getattr(event, field.name) is not None for event in EVENTS for field in fields(event))


@pytest.mark.parametrize("event", EVENTS, ids=[type(event).__name__ for event in EVENTS])
def test_the_row_of_an_event_is_json(event: m.RunEvent) -> None:
    row = json.loads(json.dumps(event_row(m.LoggedEvent(sequence=1, time=2.0, event=event))))
    assert (row["event"], row["sequence"], row["time_s"]) == (type(event).__name__, 1, 2.0)
    if isinstance(event, m.VersionPublished):
        assert (row["by"], row["times"]["wait_s"]) == ("operator alice", 2.0)
        assert row["coverage"] == {"num_devices": 1, "num_enrolled": 2, "required": {"region": 1}}


def test_the_text_of_an_event_is_one_line() -> None:
    for event in (
        m.RoundFailed(round=1, reason="too few\nround 2 closed"),
        m.RunRested(state=m.RunState.PAUSED, reason="asked\rrun resumed"),
        m.RunWarned(code="FN-0287", text="slow\u2028version 9"),
    ):
        assert event_text(event).isprintable()

"""Alarms about expected devices: who never came, who stopped coming, and who comes and gets no work."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import CAPABILITIES, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.messages import RunWarned
from fanin.protos.plans import ParticipantsPlan
from fanin.server.access.registry import Registry
from fanin.server.administration.devices import Devices
from fanin.server.selection.absence import ExpectedDevice, alarms_of, window_of
from fanin.server.storage.records import EnrolledDevice, Sighting
from fanin.simulation import run_virtual

NOW_S = 100_000.0
WINDOW_S = 1800.0
OLD_S = NOW_S - 2 * WINDOW_S
DEVICE = ExpectedDevice(device_id="a", known_since=OLD_S, last_seen=NOW_S)
ENROLLED = [EnrolledDevice(public_key=SigningKey(bytes([number]) * 32).public) for number in range(2)]
A, B = (device.device_id for device in ENROLLED)
STRANGER = "f" * 32


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ""),
        ({"last_seen": OLD_S}, "device_stopped_coming"),
        ({"last_seen": OLD_S, "is_here": True}, ""),
        ({"last_seen": NOW_S - WINDOW_S + 1.0}, ""),
        ({"last_seen": None}, ""),
        ({"last_seen": None, "is_required": True}, "device_never_came"),
        ({"last_seen": None, "is_required": True, "is_enrolled": False}, "device_never_came"),
        ({"last_seen": None, "is_required": True, "known_since": NOW_S - 1.0}, ""),
        ({"obstacle": "its runtime has no onnx"}, "device_without_work"),
        ({"is_here": True, "last_seen": None, "obstacle": "it pauses"}, "device_without_work"),
        ({"last_seen": OLD_S, "obstacle": "its runtime has no onnx"}, "device_stopped_coming"),
    ],
)
def test_each_cause_has_its_code(changes: dict[str, object], code: str) -> None:
    alarms = alarms_of([replace(DEVICE, **changes)], NOW_S, WINDOW_S)  # type: ignore[arg-type]  # fields by name
    assert [alarm.code for alarm in alarms.values()] == ([code] if code else [])
    assert all(alarm.subject == "a" for alarm in alarms.values())


def test_a_device_has_stopped_after_three_deadlines_or_half_an_hour() -> None:
    assert (window_of(60.0), window_of(3600.0)) == (1800.0, 10_800.0)


def test_an_alarm_names_the_label_and_the_reason() -> None:
    device = replace(DEVICE, label="Charit\u00e9", obstacle="needs the codec int8")
    assert alarms_of([device], NOW_S, WINDOW_S)["a"] == RunWarned(
        code="device_without_work",
        subject="a",
        text="device 'Charit\u00e9' (a) checks in and gets no work: needs the codec int8",
    )


def warned(place: Place) -> list[tuple[str, str, bool]]:
    entries = [entry.event for entry in place.state.runs.events("run")]
    return [(each.code, each.subject, each.is_over) for each in entries if isinstance(each, RunWarned)]


async def codes(place: Place) -> set[tuple[str, str]]:
    return {(each.code, each.subject) for each in (await place.runs.describe("run", 1)).warnings}


async def saw(place: Place, device: str) -> None:
    await place.state.stores.devices.note({device: Sighting(seen_at=place.state.stores.wall())})


def test_alarms_are_recorded_once_and_end_with_their_cause(tmp_path: Path) -> None:
    required = {f"id:{A}": 1, f"id:{STRANGER}": 1}
    base = plan(concurrency=3, buffer=3, quorum=1, deadline_s=60.0, max_rounds=1)

    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll(ENROLLED, place.state.stores.wall())
        run_plan = replace(base, participants=ParticipantsPlan(required=required, on_missing="wait"))
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        assert warned(place) == []
        await saw(place, B)
        await send(place, B)
        # Both required devices never come. The third one took part, and then stops.
        await asyncio.sleep(3 * WINDOW_S)
        expected = {
            ("device_never_came", A),
            ("device_never_came", STRANGER),
            ("device_stopped_coming", B),
        }
        assert await codes(place) == expected
        assert len(warned(place)) == 3
        await saw(place, A)
        await saw(place, B)
        await asyncio.sleep(400.0)
        assert await codes(place) == {("device_never_came", STRANGER)}
        assert sorted(warned(place)[3:]) == sorted([("device_never_came", A, True), ("device_stopped_coming", B, True)])
        # It stops again, after a restart.
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        await asyncio.sleep(2 * WINDOW_S)
        assert ("device_stopped_coming", A) in await codes(place)
        await place.runs.stop()

    run_virtual(main())


def test_a_required_device_whose_codec_does_not_fit_is_named_with_the_reason(tmp_path: Path) -> None:
    base = plan(concurrency=2, buffer=2, quorum=1, deadline_s=60.0, max_rounds=1)

    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll(ENROLLED, place.state.stores.wall())
        run_plan = replace(base, participants=ParticipantsPlan(required={f"id:{A}": 1}))
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        wrong = replace(CAPABILITIES, codecs=("int8",))
        now_s = place.state.stores.wall()
        answer = await place.coordinator.check_in(A, m.CheckIn(protocol=m.PROTOCOL, capabilities=wrong, wait_s=0.1))
        assert isinstance(answer, m.Rejected)
        # As the rim notes it: the check-in, and why it was rejected.
        noted = Sighting(seen_at=now_s, rejection=answer.text, rejected_at=now_s)
        await place.state.stores.devices.note({A: noted})
        await asyncio.sleep(400.0)
        (warning,) = (await place.runs.describe("run", 1)).warnings
        assert (warning.code, warning.subject) == ("device_without_work", A)
        assert answer.text[:40] in warning.text
        await place.runs.stop()

    run_virtual(main())


def test_the_alarm_of_a_ban_ends_with_it(tmp_path: Path) -> None:
    base = plan(concurrency=2, buffer=2, quorum=1, deadline_s=60.0, max_rounds=1)

    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll(ENROLLED, place.state.stores.wall())
        run_plan = replace(base, participants=ParticipantsPlan(required={f"id:{A}": 1}))
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await saw(place, A)
        registry = Registry(place.state.devices, place.state.stores.wall)
        devices = Devices(stores=place.state.stores, registry=registry, coordinator=place.coordinator, runs=place.runs)
        operator = m.Principal(kind=m.PrincipalKind.ADMIN, id="operator")
        await devices.change(m.DeviceChange(device_id=A, what=m.BanDevice(reason="lost")), operator)
        await settle()
        assert await codes(place) == {("device_without_work", A)}
        await devices.change(m.DeviceChange(device_id=A, what=m.UnbanDevice()), operator)
        await settle()
        assert (await place.runs.describe("run", 1)).warnings == ()
        await place.runs.stop()

    run_virtual(main())

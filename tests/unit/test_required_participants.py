"""Participants that a Plan requires: they get a place, and no Round publishes a Version without them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import CAPABILITIES, assignment, check_in, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.commands.console.show import event_row, waits_text
from fanin.commands.control.describe import description_row, description_text
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import Coverage, RoundFailed, RoundLacks, VersionPublished
from fanin.protos.plans import ParticipantsPlan, Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.selection.coverage import Lack, coverage_problem, lack_of
from fanin.server.storage.records import EnrolledDevice, Sighting
from fanin.simulation import run_virtual

ENROLLED = [EnrolledDevice(public_key=SigningKey(bytes([number]) * 32).public) for number in range(4)]
A, B, C, D = (device.device_id for device in ENROLLED)
TAG = "tag:site=charit\u00e9"
DEADLINE_S = 60.0


def plan_of(participants: ParticipantsPlan, *, places: int = 2, quorum: int = 1) -> Plan:
    base = plan(concurrency=places, buffer=places, quorum=quorum, deadline_s=DEADLINE_S, max_rounds=1)
    return replace(base, participants=participants)


def run(folder: Path, run_plan: Plan, story: Callable[[Place], Awaitable[None]]) -> None:
    """Run a story with four enrolled devices, of which the third one has a tag."""

    async def main() -> None:
        place = open_place(folder)
        await place.state.stores.devices.enroll(ENROLLED, 1.0)
        await tag(place, C)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        await story(place)
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


async def tag(place: Place, device: str) -> None:
    change = m.DeviceChange(device_id=device, what=m.TagDevice(set={"site": "charit\u00e9"}))
    await place.state.stores.devices.change(change, None, 1.0)


def events(place: Place, kind: type) -> list[object]:
    return [entry.event for entry in place.state.runs.events("run") if isinstance(entry.event, kind)]


def published(place: Place) -> list[Coverage | None]:
    return [event.coverage for event in events(place, VersionPublished) if event.round]  # type: ignore[attr-defined]


async def take_part(place: Place, *devices: str) -> None:
    for device in devices:
        assert (await send(place, device)).update_state is m.UpdateState.ACCEPTED
    await settle()


@pytest.mark.parametrize(("entry", "device"), [(f"id:{B}", B), (TAG, C)])
def test_a_place_is_kept_for_a_required_participant(tmp_path: Path, entry: str, device: str) -> None:
    async def story(place: Place) -> None:
        work = await assignment(place, A)
        assert isinstance(await check_in(place, D), m.Wait)
        await send(place, A, work)
        # The quorum is there, and its time has passed.
        await asyncio.sleep(30.0)
        assert published(place) == []
        await take_part(place, device)
        assert published(place) == [Coverage(num_devices=2, num_enrolled=4, required={entry: 1})]

    run(tmp_path, plan_of(ParticipantsPlan(required={entry: 1})), story)


def test_a_required_participant_is_selected_before_those_who_came_first(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        request = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=5.0)
        tasks = {each: asyncio.create_task(place.coordinator.check_in(each, request)) for each in (A, D, C, B)}
        await settle()
        answers = {each: await task for each, task in tasks.items()}
        assert isinstance(answers[C], m.Assigned) and isinstance(answers[B], m.Assigned)
        assert isinstance(answers[A], m.Wait) and isinstance(answers[D], m.Wait)

    run(tmp_path, plan_of(ParticipantsPlan(required={TAG: 1, f"id:{B}": 1})), story)


def test_a_round_that_lacks_a_participant_fails_at_its_deadline_and_says_who(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        label = m.DeviceChange(device_id=B, what=m.LabelDevice(label="Charit\u00e9"))
        await place.state.stores.devices.change(label, None, 1.0)
        await take_part(place, A)
        await asyncio.sleep(DEADLINE_S + 2.0)
        (failed, *_) = events(place, RoundFailed)
        assert isinstance(failed, RoundFailed)
        assert failed.reason == (
            f"required participants are missing: id:{B[:12]} ('Charit\u00e9') [never came], 1 of 1 with {TAG}, which 1 "
            "enrolled have"
        )
        assert published(place) == []

    run(tmp_path, plan_of(ParticipantsPlan(required={f"id:{B}": 1, TAG: 1}), places=3), story)


def test_a_round_that_waits_says_so_and_publishes_once_the_participant_came(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        await take_part(place, A)
        await asyncio.sleep(3 * DEADLINE_S)
        (lacks,) = events(place, RoundLacks)
        assert isinstance(lacks, RoundLacks)
        assert (lacks.round, dict(lacks.missing)) == (1, {TAG: 1})
        info = (await place.runs.describe("run", 1)).run
        assert info.state is m.RunState.RUNNING and f"round 1 waits: {lacks.text}" in info.reason
        # A device that gets the tag while the Round waits is a participant, too.
        await tag(place, B)
        await asyncio.sleep(DEADLINE_S)
        await take_part(place, B)
        assert published(place) == [Coverage(num_devices=2, num_enrolled=4, required={TAG: 1})]
        description = await place.runs.describe("run", 1)
        assert description.coverage == published(place)[0]
        assert f"  coverage  2 of 4 enrolled devices in version 1: {TAG} 1\n" in description_text(description)
        row = {"num_devices": 2, "num_enrolled": 4, "required": {TAG: 1}}
        assert description_row(description)["coverage"] == row
        (entry,) = [each for each in place.state.runs.events("run") if isinstance(each.event, VersionPublished)]
        assert event_row(entry)["coverage"] == row
        assert events(place, RoundFailed) == []

    run(tmp_path, plan_of(ParticipantsPlan(required={TAG: 1}, on_missing="wait")), story)


def test_a_round_waits_over_a_restart_and_publishes_nothing_without_the_participant(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll(ENROLLED, 1.0)
        run_plan = plan_of(ParticipantsPlan(required={f"id:{B}": 1}, on_missing="wait"))
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        await take_part(place, A)
        await asyncio.sleep(DEADLINE_S + 2.0)
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        await asyncio.sleep(DEADLINE_S)
        assert published(place) == [] and events(place, RoundFailed) == []
        await take_part(place, B)
        assert len(published(place)) == 1
        await place.runs.stop()
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []

    run_virtual(main())


@pytest.mark.parametrize("on_missing", ["fail", "wait"])
def test_the_deadline_starts_when_those_who_wait_for_a_required_device_complete_the_quorum(
    tmp_path: Path, on_missing: str
) -> None:
    async def story(place: Place) -> None:
        # The required device came once, and stopped.
        await place.state.stores.devices.note({B: Sighting(seen_at=1_800_000_000.0)})
        await take_part(place, A)
        request = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=5.0)
        waiting = [asyncio.create_task(place.coordinator.check_in(each, request)) for each in (A, D)]
        await settle()
        description = await place.runs.describe("run", 1)
        assert description.live.deadline_s > 0.0
        (lacks,) = events(place, RoundLacks)
        assert f"id:{B[:12]} [last seen 2027-01-15 08:00 UTC]" in lacks.text  # type: ignore[attr-defined]
        assert description.run.reason == f"round 1 waits: {lacks.text}"  # type: ignore[attr-defined]
        assert description.run.reason.partition(": ")[2] in waits_text(description.live)
        await asyncio.gather(*waiting)
        await asyncio.sleep(DEADLINE_S)
        assert bool(events(place, RoundFailed)) == (on_missing == "fail")

    required = ParticipantsPlan(required={f"id:{B}": 1}, on_missing=on_missing)
    run(tmp_path, plan_of(required, quorum=2), story)


def test_a_round_needs_its_least_number_of_devices_and_of_examples(tmp_path: Path) -> None:
    async def devices(place: Place) -> None:
        await take_part(place, A, B)
        await asyncio.sleep(DEADLINE_S + 2.0)
        (failed, *_) = events(place, RoundFailed)
        assert "1 of 3 devices (participants.min_devices)" in failed.reason  # type: ignore[attr-defined]

    async def examples(place: Place) -> None:
        # 10 examples of each device.
        await take_part(place, A, B)
        (failed, *_) = events(place, RoundFailed)
        assert "5 of 25 examples (participants.min_examples)" in failed.reason  # type: ignore[attr-defined]

    (tmp_path / "devices").mkdir()
    (tmp_path / "examples").mkdir()
    run(tmp_path / "devices", plan_of(ParticipantsPlan(min_devices=3), places=4), devices)
    run(tmp_path / "examples", plan_of(ParticipantsPlan(min_examples=25, on_missing="wait")), examples)


def test_a_device_that_was_silent_takes_no_place_of_a_required_one(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        speaks = replace(CAPABILITIES, reports_progress=True)
        request = m.CheckIn(protocol=m.PROTOCOL, capabilities=speaks, wait_s=0.1)
        answer = await place.coordinator.check_in(A, request)
        assert isinstance(answer, m.Assigned)
        await asyncio.sleep(10.0)
        await take_part(place, D)
        report = m.Report(assignment_id=answer.assignment.assignment_id, progress=m.TrainingProgress(step=1))
        await place.coordinator.report(A, report)
        assert (await place.runs.describe("run", 1)).live.at_work == ()
        # Nor does its late Update fill the Round.
        late = await send(place, A, answer.assignment)
        assert late.update_state is m.UpdateState.DISCARDED
        await take_part(place, B)
        assert published(place) == [Coverage(num_devices=2, num_enrolled=4, required={f"id:{B}": 1})]

    run(tmp_path, plan_of(ParticipantsPlan(required={f"id:{B}": 1})), story)


@pytest.mark.parametrize(
    ("participants", "places", "code"),
    [
        ({"required": {f"id:{A}": 2}}, 2, "FN-1500"),
        ({"required": {f"tag:n={number}": 1 for number in range(257)}}, 2, "FN-1500"),
        ({"on_missing": "wait"}, 2, "FN-1501"),
        ({"required": {f"id:{A}": 1, f"id:{B}": 1, f"id:{C}": 1}}, 2, "FN-1502"),
        ({"required": {"tag:site=a": 2, "tag:site=b": 1}}, 2, "FN-1502"),
        ({"min_devices": 3}, 2, "FN-1502"),
        ({"required": {"id:abc": 1}}, 2, "FN-0201"),
        ({"required": {"tag:site": 1}}, 2, "FN-0201"),
        ({"required": {TAG: 0}}, 2, "FN-0201"),
        ({"required": {TAG: 1.5}}, 2, "FN-0201"),
        ({"on_missing": "shrug"}, 2, "FN-0201"),
    ],
)
def test_each_contradiction_has_its_code(participants: dict[str, object], places: int, code: str) -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        plan_of(ParticipantsPlan(**participants), places=places)  # type: ignore[arg-type]  # wrong on purpose
    assert excinfo.value.code == code


def test_participants_of_different_tags_may_be_the_same_devices() -> None:
    plan_of(ParticipantsPlan(required={"tag:site=a": 2, "tag:kind=phone": 2}), places=2)


@pytest.mark.parametrize("changes", [{"buffer": 1, "quorum": 1}, {"max_staleness": 2}])
def test_a_plan_whose_fastest_devices_fill_a_round_requires_nobody(changes: dict[str, int]) -> None:
    base = plan(**{"concurrency": 2, "buffer": 2, "quorum": 1, **changes})
    with pytest.raises(InvalidPlan) as excinfo:
        replace(base, participants=ParticipantsPlan(required={TAG: 1}))
    assert excinfo.value.code == "FN-1503"


def test_a_tag_that_nobody_has_is_refused_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll(ENROLLED, 1.0)
        run_plan = plan_of(ParticipantsPlan(required={TAG: 1}))
        for attempt in (place.runs.check_plan(run_plan), start(place.runs, bundle_in(tmp_path), run_plan)):
            with pytest.raises(InvalidPlan) as excinfo:
                await attempt
            assert excinfo.value.code == "FN-1504"
        await tag(place, C)
        await place.runs.check_plan(run_plan)

    run_virtual(main())


def test_a_lack_only_shrinks() -> None:
    lack = lack_of(ParticipantsPlan(required={f"id:{A}": 1, TAG: 2}, min_examples=15))
    assert lack and lack.num_places == 3
    lack = lack.after({TAG}, 10)
    assert dict(lack.missing) == {f"id:{A}": 1, TAG: 1, "min_examples": 5}
    lack = lack.after({TAG, f"id:{A}"}, 10)
    assert not lack and lack.num_places == 0 and not Lack()


def test_verify_recomputes_devices_and_examples() -> None:
    required = ParticipantsPlan(required={f"id:{A}": 1, TAG: 1}, min_examples=10)
    good = Coverage(num_devices=2, num_enrolled=4, required={f"id:{A}": 1, TAG: 1})
    event = VersionPublished(number=1, version_sha256="", parent=0, round=1, total_examples=20, coverage=good)
    assert coverage_problem(required, (A, C), event, 20) == ""
    assert coverage_problem(required, (B, C), event, 20) == f"has 0 of 1 required participants id:{A}"
    assert coverage_problem(required, (A, C), event, 19).startswith("recorded 2 devices and 20 examples")
    assert coverage_problem(required, (A, C), replace(event, coverage=None), 20) != ""
    more = replace(required, min_examples=30)
    assert coverage_problem(more, (A, C), event, 20) == "has 2 devices and 20 examples, less than the plan requires"

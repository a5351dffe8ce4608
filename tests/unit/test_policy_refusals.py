"""Devices that refuse a Run by their policy, as the coordinator sees it: counted, named, and selected last."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import assignment, check_in, send, settle
from support.virtual import PUBLISHER, SHAPES, Place, open_place, plan, start

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import ParticipantsPlan
from fanin.server.runs.view import Failures, policy_code
from fanin.server.storage.records import EnrolledDevice
from fanin.simulation import run_virtual, synthetic_bundle

REFUSAL = "privacy floor of the device's owner: got round protocol plain, expected secagg [FN-1700]"
ENROLLED = EnrolledDevice(public_key=SigningKey(bytes([7]) * 32).public)
PLAN = plan(concurrency=1, buffer=1, quorum=1, deadline_s=600.0, max_rounds=1)


def bundle_of(folder: Path, floor: PrivacyFloor = NO_FLOOR) -> Bundle:
    """Return a Bundle whose publisher states a floor."""
    plain = synthetic_bundle(folder / "plain", PUBLISHER, SHAPES)
    artifacts = {name: plain.artifact(name) for name in plain.manifest.artifacts}
    manifest = dump_manifest(replace(plain.manifest, privacy_floor=floor))
    write_bundle(folder / "floored", manifest, artifacts, PUBLISHER)
    return open_folder(folder / "floored", trusted=[PUBLISHER.public])


async def refuse(place: Place, device: str, reason: str = REFUSAL) -> None:
    """Check in, and give the Assignment up."""
    work = await assignment(place, device)
    await place.coordinator.uploads.report(device, m.Report(assignment_id=work.assignment_id, failure=reason))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (REFUSAL, "FN-1700"),
        ("policy.toml: not TOML [FN-1704]", "FN-1704"),
        ("training: it failed [FN-0842]", ""),
        ("[FN-1700] at another place", ""),
        ("", ""),
    ],
)
def test_a_refusal_by_policy_has_one_of_its_codes(reason: str, code: str) -> None:
    assert policy_code(reason) == code


def test_refusals_by_policy_are_counted_among_the_failures() -> None:
    failures = Failures()
    for reason in (REFUSAL, "training: it failed [FN-0842]", REFUSAL, "policy.toml: not TOML [FN-1704]"):
        failures.note(reason)
    assert failures.num_by_policy == 3


def test_the_operator_reads_the_floor_and_another_device_gets_the_place(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_of(tmp_path), PLAN)
        await settle()
        await refuse(place, "strict")
        description = await place.runs.describe("run", 1)
        (count,) = description.live.failures
        assert (count.code, count.num_times, count.newest) == ("FN-1700", 1, REFUSAL)
        assert "1 device gave up (1 by policy)" in description.live.trouble
        # Other failures are free twice. This one would come again, so the device pauses at once.
        assert isinstance(await check_in(place, "strict"), m.Wait)
        reply = await send(place, "other")
        assert reply.update_state is m.UpdateState.ACCEPTED
        await place.runs.stop()

    run_virtual(main())


def test_a_required_device_that_refuses_is_an_alarm_with_its_reason(tmp_path: Path) -> None:
    device = ENROLLED.device_id

    async def main() -> None:
        place = open_place(tmp_path)
        await place.state.stores.devices.enroll([ENROLLED], place.state.stores.wall())
        await start(
            place.runs,
            bundle_of(tmp_path),
            replace(PLAN, participants=ParticipantsPlan(required={f"id:{device}": 1}, on_missing="wait")),
        )
        await settle()
        await refuse(place, device)
        await place.coordinator.activity.flush()
        await asyncio.sleep(400.0)
        (warning,) = (await place.runs.describe("run", 1)).warnings
        assert (warning.code, warning.subject) == ("device_without_work", device)
        assert "it refuses the run by its policy: privacy floor of the device's owner" in warning.text
        assert (await place.state.stores.devices.device(device)).last_rejection == REFUSAL
        await place.runs.stop()

    run_virtual(main())


def test_a_coordinator_refuses_a_plan_below_the_floor_of_the_manifest(tmp_path: Path) -> None:
    floor = PrivacyFloor(protocol="secagg", mechanism="central", clip_norm=1.0)

    async def main() -> None:
        place = open_place(tmp_path)
        with pytest.raises(InvalidPlan, match="FN-1703") as caught:
            await start(place.runs, bundle_of(tmp_path, floor), PLAN)
        assert "round protocol plain, expected secagg; no differential privacy" in str(caught.value)
        await place.runs.stop()

    run_virtual(main())

"""Runs with stages that are damaged, falsified or refused: the findings of ``fanin verify``, and the error messages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.stage_runs import (
    CAPABILITIES,
    FEEDBACK,
    NUM,
    STAGED_PLAN,
    StagedDevice,
    change_of,
    falsify,
    open_run,
    problems,
    roll_back,
    scaffold,
    take_round,
)
from support.staleness import settle
from support.virtual import PUBLISHER, bundle_in, open_place, plan, start

from fanin.edge.bundles.versions import add_auxiliary, sign_version
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.protos.errors import InvalidPlan, InvalidUpdate, InvalidVersion, NotFound
from fanin.protos.messages import Command, Pause, RoundFailed
from fanin.simulation import run_virtual

# Verification.


def test_verify_finds_a_false_auxiliary_tensor(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        for _ in range(2):
            await take_round(place, devices)
        await place.runs.stop()
        assert problems(place) == []
        data = encode_parameters(TensorTable.of({"values": (NUM,)}), np.ones(NUM, np.float32))
        for ref, piece in cut(data):
            place.state.blobs.put(ref.sha256, piece)
        falsify(tmp_path, place, {"control": artifact_of(data)})
        # The next Version was computed from the true one.
        assert problems(place) == [f"round {number}: recomputed another auxiliary tensor control" for number in (1, 2)]
        falsify(tmp_path, place, {})
        assert problems(place)[0] == "round 1: signed the auxiliary tensors [], not ['control']"

    run_virtual(main())


def test_verify_finds_an_auxiliary_tensor_of_a_version_from_outside(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        await take_round(place, devices)
        await roll_back(place, 1, "back")
        await place.runs.stop()
        first = place.state.runs.version("run", 1)
        assert first is not None
        falsify(tmp_path, place, dict(first.auxiliary), number=2)
        assert problems(place) == ["has the auxiliary tensors ['control'], which it adopted from no version"]

    run_virtual(main())


def test_a_damaged_auxiliary_tensor_fails_the_round_with_a_reason(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        await take_round(place, devices)
        works = [await device.assignment(place) for device in devices]
        updates = [
            await device.update(place, work, change_of(device.name, 2))
            for device, work in zip(devices, works, strict=True)
        ]
        (ref,) = works[0].version.auxiliary["control"].chunks
        path = tmp_path / "state" / "blobs" / ref.sha256[:2] / ref.sha256
        path.write_bytes(bytes(len(path.read_bytes())))
        for device, (header, payload) in zip(devices, updates, strict=True):
            await device.transport(place).upload(header, lambda first, size, data=payload: data[first : first + size])
        await settle()
        failures = [event.event for event in place.state.runs.events("run") if isinstance(event.event, RoundFailed)]
        assert [event.reason for event in failures][:1] == [
            "version 1 is damaged on the coordinator's disk; the coordinator's log has the details"
        ]
        await place.runs.stop()

    run_virtual(main())


# Bad input: one error message each.


def test_a_publication_does_not_permit_the_download_of_auxiliary_tensors(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        await take_round(place, devices)
        work = await devices[0].assignment(place)
        (ref,) = work.version.auxiliary["control"].chunks
        publications = place.runs.find_publications("run")
        assert publications is not None
        publication = publications.publish("c")
        stranger = StagedDevice("c").transport(place)
        expected = f"chunk {ref.sha256[:16]!r}: not one that this assignment needs; check in again"
        with raises(NotFound, expected):
            await stranger.download(publication.download_id, ref.sha256)
        assert await devices[0].transport(place).download(work.assignment_id, ref.sha256)
        await place.runs.stop()

    run_virtual(main())


def test_a_device_without_the_stages_is_assigned_no_work(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path, STAGED_PLAN)
        await settle()
        answer = await StagedDevice("a").check_in(place, replace(CAPABILITIES, stages=("error_feedback",)))
        assert answer == m.Rejected(
            reason=m.RejectReason.UNSUITABLE,
            text="stages: got ['error_feedback'], expected ['scaffold', 'error_feedback']",
        )
        # A device's download limit covers the parameters and the control variate together.
        limit = place.runs.driver("run").setup.download_bytes(("onnx",))
        assert limit >= 2 * 4 * NUM
        answer = await StagedDevice("a").check_in(place, replace(CAPABILITIES, max_download_bytes=limit - 1))
        assert isinstance(answer, m.Rejected)
        assert answer.text == f"download: a limit of {limit - 1} bytes, expected at least {limit}"
        await place.runs.stop()

    run_virtual(main())


def test_an_update_without_the_second_group_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        place, device = await open_run(tmp_path, STAGED_PLAN), StagedDevice("a")
        await settle()
        header, payload = await device.update(place, await device.assignment(place), change_of("a", 1))
        with raises(InvalidUpdate, "update: got 2 shifts up to 0, expected 4 up to 0"):
            await device.transport(place).upload(
                replace(header, shifts=(0, 0)), lambda first, size: payload[first : first + size]
            )
        device = StagedDevice("b")
        header, payload = await device.update(place, await device.assignment(place), change_of("b", 1))
        half_payload, connection = payload[: len(payload) // 2], device.transport(place)
        short_header = replace(header, payload=artifact_of(half_payload))
        expected = f"update: got {4 * NUM} bytes, expected {8 * NUM} for {2 * NUM} values; the model has another shape"
        with raises(InvalidUpdate, expected):
            await connection.upload(short_header, lambda first, size: half_payload[first : first + size])
        await place.runs.stop()

    run_virtual(main())


def test_as_many_values_may_be_saturated_as_all_groups_have(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path, STAGED_PLAN)
        await settle()

        async def send(name: str, num_saturated: int) -> m.UploadReply:
            device = StagedDevice(name)
            header, payload = await device.update(place, await device.assignment(place), change_of(name, 1))
            counts = dict(header.statistics.counts) | {m.SATURATED: num_saturated}
            changed_header = replace(header, statistics=m.Statistics(counts=counts))
            return await device.transport(place).upload(
                changed_header, lambda first, size: payload[first : first + size]
            )

        with raises(InvalidUpdate, f"update: got saturated = {2 * NUM + 1}, expected at most {2 * NUM}"):
            await send("a", 2 * NUM + 1)
        assert (await send("b", 2 * NUM)).update_state is m.UpdateState.ACCEPTED
        await place.runs.stop()

    run_virtual(main())


MISSING_INPUTS = (
    "run run: got the stage 'scaffold', but the train graph has no inputs control.<name>, so no device could "
    "correct its gradients; export the App with Recipe(scaffold=True), or remove the stage"
)


def test_stages_and_bundle_that_do_not_fit_start_no_run(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        with raises(InvalidPlan, MISSING_INPUTS):
            await start(place.runs, bundle_in(tmp_path), STAGED_PLAN)
        unknown_plan = plan(stages=(m.StageSpec(name="scafold"), FEEDBACK))
        with pytest.raises(InvalidPlan, match="FN-0210"):
            await start(place.runs, bundle_in(tmp_path / "unknown"), unknown_plan)
        missing = (
            "plan: stages: scaffold: options.num_devices: missing, expected an integer from 1 to 1099511627776; add it"
        )
        with raises(InvalidPlan, missing):
            await start(place.runs, bundle_in(tmp_path / "options"), plan(stages=(replace(scaffold(1), options={}),)))
        small_plan = plan(stages=(scaffold(2), FEEDBACK), concurrency=3, buffer=3, quorum=3)
        expected = (
            "run run: got scaffold num_devices 2 and cohort.concurrency 3, expected at least 3: num_devices counts all "
            "devices of the Run"
        )
        with raises(InvalidPlan, expected):
            await start(place.runs, bundle_in(tmp_path / "few", scaffold=True), small_plan)
        assert (await place.runs.listed()).runs == ()
        await place.runs.stop()

    run_virtual(main())


def test_a_version_from_outside_has_no_auxiliary_tensors(tmp_path: Path) -> None:
    async def main() -> None:
        place, devices = await open_run(tmp_path, STAGED_PLAN), [StagedDevice("a"), StagedDevice("b")]
        await settle()
        await take_round(place, devices)
        await place.runs.command(Command(command_id="pause", run_id="run", what=Pause()))
        await settle()
        newest = await place.state.stores.runs.newest_version("run")
        version = sign_version(
            PUBLISHER,
            parent=newest,
            run_id="run",
            bundle_sha256=newest.bundle_sha256,
            parameters=newest.parameters,
        )
        with raises(
            InvalidVersion,
            "version 2 of run run: got the auxiliary tensors ['control'], expected none: they begin with zeros after a "
            "version from outside; publish the parameters alone",
        ):
            await place.runs.publish_version(add_auxiliary(PUBLISHER, version, newest.auxiliary), 5)
        await place.runs.publish_version(version, 5)
        await settle()
        assert (await devices[0].assignment(place)).state == m.StageState(lineage=2, round=0)
        await take_round(place, devices)
        assert problems(place) == []
        await place.runs.stop()

    run_virtual(main())

"""Roles of tensors through the production coordinator: statistics, counters, and Versions out of their range."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.errors import raises
from support.staleness import CAPABILITIES, assignment, check_in, settle
from support.virtual import PUBLISHER, Place, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.commands.console.show import event_text
from fanin.edge.assembly.assemble import AssembledGraphs
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.bundles.versions import sign_version
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidPlan, InvalidUpdate, InvalidVersion
from fanin.protos.messages import Adopt, Command, Pause, RoundFailed, Stop, VersionPublished
from fanin.protos.plans import FlowerPlan, Plan
from fanin.protos.roles import RoleKind, TensorRole
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, run_virtual, synthetic_bundle

SHAPES: Final = {
    "norm.num_batches_tracked": (),
    "norm.running_mean": (2,),
    "norm.running_var": (2,),
    "weight": (3,),
}
TABLE: Final = TensorTable.of(SHAPES)
EXAMPLES: Final = {"a": 30, "b": 10}
NESTEROV: Final = plan(
    concurrency=2, buffer=2, quorum=2, max_rounds=9, outer_optimizer="nesterov",
    outer_options={"learning_rate": 0.5, "momentum": 0.5},
)  # fmt: skip
Changes = Mapping[str, Mapping[str, float]]
"""The change of each tensor by each device; that of a tensor without one is 0."""


async def open_run(folder: Path, run_plan: Plan = NESTEROV) -> Place:
    place = open_place(folder)
    await start(place.runs, synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES), run_plan)
    await settle()
    return place


async def take_round(place: Place, changes: Changes) -> None:
    for device, by_name in changes.items():
        work = await assignment(place, device)
        values = TABLE.flatten({name: np.full(shape, by_name.get(name, 0.0)) for name, shape in SHAPES.items()})
        change = Change(values=values, counts={m.EXAMPLES: EXAMPLES[device]})
        header, payload = make_update(work, TABLE, change, m.Telemetry(runtime="synthetic 1"))
        line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
        reply = await line.upload(header, lambda offset, size_bytes, data=payload: data[offset : offset + size_bytes])
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


def both(**by_name: float) -> Changes:
    return {device: {name.replace("__", "."): change for name, change in by_name.items()} for device in EXAMPLES}


async def newest(place: Place) -> Mapping[str, Float32s]:
    version = await place.state.stores.runs.newest_version("run")
    return TABLE.views(load_parameters(place.state.blobs, version, TABLE))


async def events(place: Place) -> list[object]:
    await place.runs.command(Command(run_id="run", command_id="end", what=Stop()))
    return [entry.event async for entry in place.runs.watch("run", 0)]


async def publish(place: Place, data: bytes) -> None:
    """Publish a Version from outside."""
    parameters = artifact_of(data)
    await place.runs.put_chunk(parameters.sha256, data)
    parent = await place.state.stores.runs.newest_version("run")
    bundle_sha256 = parent.bundle_sha256
    version = sign_version(PUBLISHER, parent=parent, run_id="run", bundle_sha256=bundle_sha256, parameters=parameters)
    await place.runs.publish_version(version, 1)


def problems(place: Place) -> list[str]:
    return [verdict.problem for verdict in verify_run(place.state, "run")]


def test_statistics_and_counters_get_the_mean_and_parameters_the_outer_step(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path)
        changes = {
            "a": {"norm.num_batches_tracked": 3000, "norm.running_mean": -0.5, "norm.running_var": 0.25, "weight": 1.0},
            "b": {"norm.num_batches_tracked": 1001, "norm.running_mean": 0.5, "norm.running_var": 0.75, "weight": 1.0},
        }
        for number in (1, 2):
            await take_round(place, changes)
            values = await newest(place)
            # (30 x 3000 + 10 x 1001) / 40 = 2500.25. A plain grid of the first Round would cut the counter to 4.
            assert values["norm.num_batches_tracked"] == number * 2500
            assert np.allclose(values["norm.running_mean"], number * -0.25)
            assert np.allclose(values["norm.running_var"], number * 0.375)
        # Momentum 1.0, then 1.5: the steps are 0.5 x (1.0 + 0.5 x 1.0) and 0.5 x (1.0 + 0.5 x 1.5).
        assert np.allclose(values["weight"], 0.75 + 0.875)
        assert problems(place) == ["", "", ""]
        await place.runs.stop()

    run_virtual(main())


def test_a_counter_rounds_a_tie_to_even(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path)
        for number, expected in ((1, 2), (3, 4), (5, 8)):
            # (30 x n + 10 x (n + 2)) / 40 = n + 0.5
            counts = {"a": {"norm.num_batches_tracked": number}, "b": {"norm.num_batches_tracked": number + 2}}
            before = (await newest(place))["norm.num_batches_tracked"]
            await take_round(place, counts)
            after = (await newest(place))["norm.num_batches_tracked"]
            assert after - before == {1: 2, 3: 4, 5: 6}[number], expected
        await place.runs.stop()

    run_virtual(main())


def test_a_variance_one_step_below_zero_is_set_to_zero_and_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path)
        work = await assignment(place, "a")
        step = 2.0 ** work.grid[list(SHAPES).index("norm.running_var")]
        await take_round(place, both(norm__running_var=-step, weight=0.5))
        assert (await newest(place))["norm.running_var"].tolist() == [0.0, 0.0]
        (version,) = [each for each in await events(place) if isinstance(each, VersionPublished) and each.round]
        assert version.num_clamped == 2
        assert "2 values set to the end of a range" in event_text(version)
        assert problems(place) == ["", ""]
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_a_device_whose_variance_is_below_that_is_refused_and_harms_no_other(
    tmp_path: Path, max_staleness: int
) -> None:
    async def main() -> None:
        aggregation = replace(NESTEROV.aggregation, max_staleness=max_staleness)
        place = await open_run(tmp_path, replace(NESTEROV, aggregation=aggregation))
        await take_round(place, both(norm__running_var=0.25))
        for _ in range(2):
            # The value is the base's 0.25 plus the change: the change alone would be within the range.
            with raises(
                InvalidUpdate,
                "update: tensor 'norm.running_var': after the training it has 2 values out of range, such as -0.125, "
                "expected at least 0, because it is a statistic; correct the training, or the role or range that the "
                "run declares for the tensor",
            ):
                await take_round(place, {"b": {"norm.running_var": -0.375}})
            assert not list((tmp_path / "state" / "updates" / "run").glob("2/*"))
            assert not [path for path in (tmp_path / "state" / "spool").rglob("*") if path.is_file()]
            # It pauses, and longer each time.
            assert isinstance(await check_in(place, "b"), m.Wait)
            await asyncio.sleep(40.0)
        await take_round(place, both(norm__running_var=0.5))
        assert (await newest(place))["norm.running_var"].tolist() == [0.75, 0.75]
        assert not [each for each in await events(place) if isinstance(each, RoundFailed) and "var" in each.reason]
        assert problems(place) == ["", "", ""]
        await place.runs.stop()

    run_virtual(main())


def test_an_outer_step_out_of_the_range_of_a_parameter_fails_the_round(tmp_path: Path) -> None:
    """Each device keeps the range, so no device is the cause."""

    async def main() -> None:
        place = open_place(tmp_path)
        bundle = write_arrays({"gate": np.ones(2, np.float32)}, tmp_path / "bundle", PUBLISHER, "arrays")
        roles = {"gate": TensorRole(role=RoleKind.PARAMETER, lowest=0.5)}
        run_plan = replace(NESTEROV, flower=FlowerPlan(roles=roles))
        run_plan = replace(
            run_plan, aggregation=replace(run_plan.aggregation, outer_options={"learning_rate": 2.0, "momentum": 0.5})
        )
        await start(place.runs, bundle, run_plan)
        await settle()
        capabilities = replace(CAPABILITIES, graph_formats=("arrays",))
        for size, text in ((-0.75, "after the training it has 2 values out of range, such as 0.25"), (-0.5, "")):
            for device in "c" if text else "ab":
                check = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
                answer = await place.coordinator.check_in(device, check)
                assert isinstance(answer, m.Assigned), answer
                work = answer.assignment
                change = Change(values=np.full(2, size, np.float32), counts={m.EXAMPLES: 10})
                header, payload = make_update(work, bundle.manifest.table, change, m.Telemetry(runtime="flower 1"))
                line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
                with pytest.raises(InvalidUpdate, match=text) if text else nullcontext():
                    await line.upload(header, lambda at, size_bytes, data=payload: data[at : at + size_bytes])
        await settle()
        failed, _stopped = [each for each in await events(place) if isinstance(each, RoundFailed)]
        assert failed.reason == (
            "tensor 'gate': the next version would have 2 values out of range, such as -0.5, expected at least 0.5, "
            "because it is a parameter; lower aggregation.outer_options.learning_rate, or correct the role or range "
            "that the run declares for the tensor; the coordinator's log has the details"
        )
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("norm.running_var", -1e-9, "got -1e-09, expected finite numbers of at least 0, because it is a statistic"),
        ("norm.num_batches_tracked", 0.5, "got 0.5, expected whole numbers of at least 0, because it is a counter"),
    ],
)
def test_a_version_from_outside_is_refused_by_the_name_of_its_tensor(
    tmp_path: Path, name: str, value: float, text: str
) -> None:
    async def main() -> None:
        place = await open_run(tmp_path)
        await place.runs.command(Command(run_id="run", command_id="pause", what=Pause()))
        flat = np.zeros(TABLE.num_values, np.float32)
        TABLE.views(flat)[name][...] = value
        with raises(InvalidVersion, f"parameters: tensor {name!r}: {text}; correct its values"):
            await publish(place, encode_parameters(TABLE, flat))
        await place.runs.stop()

    run_virtual(main())


def test_a_version_of_another_run_is_adopted_only_within_the_ranges_of_this_plan(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = write_arrays({"w": np.ones(2, np.float32)}, tmp_path / "bundle", PUBLISHER, "arrays")
        roles = {"w": TensorRole(role=RoleKind.PARAMETER, lowest=0.5)}
        ranged = replace(NESTEROV, flower=FlowerPlan(roles=roles))
        for run_id, run_plan in (("run", NESTEROV), ("ranged", ranged)):
            await start(place.runs, bundle, run_plan, run_id)
            await place.runs.command(Command(run_id=run_id, command_id=f"pause-{run_id}", what=Pause()))
        await publish(place, encode_parameters(bundle.manifest.table, np.array([0.25, 1.0], np.float32)))
        adopt = Adopt(from_run_id="run", number=1)
        text = "parameters: tensor 'w': got 0.25, expected finite numbers of at least 0.5, because it is a parameter"
        with raises(InvalidVersion, f"{text}; correct its values"):
            await place.runs.command(Command(run_id="ranged", command_id="adopt", what=adopt))
        await place.runs.stop()

    run_virtual(main())


def test_a_bundle_with_graphs_takes_no_roles_from_a_plan(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
        roles = {"weight": TensorRole(role=RoleKind.STATISTIC)}
        with pytest.raises(InvalidPlan, match="FN-0260"):
            await start(place.runs, bundle, replace(NESTEROV, flower=FlowerPlan(roles=roles)))
        await place.runs.stop()

    run_virtual(main())


def test_graphs_of_another_exporter_have_the_roles_of_their_names() -> None:
    graphs = {"onnx": {"train": b"", "evaluate": b"", "infer": b""}}
    values = {"norm.running_var": np.ones(2, np.float32), "weight": np.zeros(3, np.float32)}
    spec = AssembledGraphs(name="mine", batch_size=1, num_classes=2, parameters=values, graphs=graphs)
    assert spec.table.roles == {"norm.running_var": TensorRole(role=RoleKind.STATISTIC, lowest=0.0)}
    reason = "expected finite numbers of at least 0, because it is a statistic; correct its values"
    with raises(InvalidBundle, f"assemble: tensor 'norm.running_var': got -1, {reason}"):
        replace(spec, parameters={"norm.running_var": np.full(2, -1, np.float32)})

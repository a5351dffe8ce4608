"""What ``topk`` cannot work with is refused when the Run starts, and wrong payloads before they count."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.secagg import plan_of
from support.stage_runs import CAPABILITIES, FEEDBACK, StagedDevice, scaffold
from support.virtual import bundle_in, open_place, plan, start

from fanin.edge.codecs.sparse import topk
from fanin.edge.codecs.sparse.requirements import check_sparse_model
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidPlan, InvalidUpdate
from fanin.protos.plans import AggregationPlan, Plan, PrivacyPlan
from fanin.protos.roles import RoleKind, TensorRole
from fanin.server.aggregation.verify import verify_run
from fanin.server.runs.recorded_setup import check_names
from fanin.server.selection.policies import POLICIES
from fanin.simulation import run_virtual

TOPK = m.CodecSpec(name="topk", max_shift=0, options={"fraction": 0.1, "bits": 8})
ABLE = replace(CAPABILITIES, codecs=("topk",))


def sparse_plan(**changes: object) -> Plan:
    return plan(codec=TOPK, concurrency=2, buffer=2, quorum=2, **changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rule": "median"}, "FN-1841"),
        ({"rule": "geometric_median"}, "FN-1841"),
        ({"stages": (scaffold(4), FEEDBACK)}, "FN-1843"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        check_names(sparse_plan(**changes), POLICIES)
    assert caught.value.code == code


def test_a_plan_that_masks_updates_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="indices would show") as caught:
        check_names(replace(plan_of("secagg", 10, 10), codec=TOPK), POLICIES)
    assert caught.value.code == "FN-1842"


def test_differential_privacy_is_refused() -> None:
    private = PrivacyPlan(
        mechanism="central",
        clip_norm=1.0,
        noise_multiplier=1.0,
        epsilon=8.0,
        delta=1e-3,
        population="p",
        population_size=100,
    )
    dense = replace(plan(), aggregation=AggregationPlan(max_examples=1), privacy=private)
    with pytest.raises(InvalidPlan, match="proven norm") as caught:
        replace(dense, codec=TOPK)
    assert caught.value.code == "FN-1682"


def test_a_plan_with_error_feedback_and_a_sum_is_accepted() -> None:
    assert set(check_names(sparse_plan(stages=(FEEDBACK,), outer_optimizer="fedadam"), POLICIES)) == {"error_feedback"}


@pytest.mark.parametrize("kind", [RoleKind.STATISTIC, RoleKind.COUNTER])
def test_a_model_with_statistics_or_counters_is_refused(kind: RoleKind) -> None:
    table = TensorTable.of({"a": (2,), "norm": (3,)}).with_roles({"norm": TensorRole(role=kind)})
    with pytest.raises(InvalidPlan, match="norm") as caught:
        check_sparse_model(sparse_plan(), table)
    assert caught.value.code == "FN-1844"
    check_sparse_model(sparse_plan(), TensorTable.of({"a": (2,)}))
    check_sparse_model(plan(), table)


def test_an_update_with_wrong_indices_leaves_no_trace_and_the_round_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path, scaffold=False), sparse_plan(max_rounds=1))
        rng = np.random.default_rng(0)
        for device in (StagedDevice("c"), StagedDevice("a"), StagedDevice("b")):
            answer = await device.check_in(place, ABLE)
            assert isinstance(answer, m.Assigned), answer
            header, payload = await device.update(place, answer.assignment, rng.normal(0, 0.1, 22).astype(np.float32))
            assert len(payload) == topk(fraction=0.1).slice_bytes(22) == header.payload.size_bytes
            if device.name == "c":
                # The high parts are right, and the low bits of all indices are 0: they begin in the second byte.
                payload = bytes([0b111, 0, 0, 0, *payload[4:]])
                header = replace(header, payload=artifact_of(payload))
                with pytest.raises(InvalidUpdate, match="duplicate index: got 0 after 0") as caught:
                    await device.transport(place).upload(header, lambda at, size, data=payload: data[at : at + size])
                assert caught.value.code == "FN-1840"
                assert place.state.rounds.update("run", 1, "c") is None
            else:
                await device.transport(place).upload(header, lambda at, size, data=payload: data[at : at + size])
        async for _ in place.runs.watch("run", 0):
            pass
        assert [verdict.problem for verdict in verify_run(place.state, "run")] == ["", ""]
        await place.runs.stop()

    run_virtual(main())

"""The weights of Updates by examples, uniform and by site, and Updates without a value, in Runs that are recomputed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.scenarios import CALM, SHAPES, bundle_in, outcome_of
from support.secagg import outcome as masked_outcome
from support.secagg import plan_of
from support.virtual import PUBLISHER, plan

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.edge.tensors import Float64s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import AggregationPlan, Plan
from fanin.server.aggregation.checked import rule_of
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.server.protocols.known import protocol_of
from fanin.simulation import Federation, Member, SyntheticTrainer, run_virtual

NUM_DEVICES = 4
SITES = {"device-0": 7, "device-2": 3, "device-9": 100}
WEIGHTS = {"examples": [10, 11, 12, 13], "uniform": [1, 1, 1, 1], "sites": [7, 1, 3, 1]}


def plan_with(weights: str, **changes: object) -> Plan:
    base = plan(max_rounds=2, deadline_s=1e6)
    sites = SITES if weights == "sites" else {}
    aggregation = replace(base.aggregation, weights=weights, site_weights=sites, **changes)
    return replace(base, aggregation=aggregation)


def expected(weights: str) -> Float64s:
    """Return the parameters after two Rounds of ``SyntheticTrainer``, in plain numpy."""
    num_values = sum(int(np.prod(shape)) for shape in SHAPES.values())
    total = np.zeros(num_values)
    for number in (1, 2):
        seeds = [np.random.SeedSequence((7, partition, number)) for partition in range(NUM_DEVICES)]
        rows = [np.random.default_rng(seed).normal(0.0, 0.01, num_values).astype(np.float32) for seed in seeds]
        total += np.average(np.array(rows, np.float64), axis=0, weights=WEIGHTS[weights])
    return total


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_mean_has_the_weights_of_the_plan_also_after_a_restart(tmp_path: Path, weights: str) -> None:
    """``outcome_of`` recomputes each Version from the record."""
    run_plan = plan_with(weights)
    outcome = outcome_of(tmp_path / "one", run_plan, [CALM] * NUM_DEVICES)
    np.testing.assert_allclose(outcome.parameters, expected(weights), rtol=0, atol=1e-8)
    again = outcome_of(tmp_path / "two", run_plan, [CALM] * NUM_DEVICES, seed=5, stops_s=(20.0, 60.0))
    assert again.digests == outcome.digests


def test_masked_updates_of_equal_weight_have_the_sum_of_plain_ones(tmp_path: Path) -> None:
    """A device applies its weight under the masks, so ``uniform`` limits the examples to 1 there."""
    outcomes = []
    for protocol in ("plain", "secagg"):
        base = plan_of(protocol, 6, 6)
        run_plan = replace(base, aggregation=AggregationPlan(weights="uniform", max_examples=4096))
        assert run_plan.max_examples == {"plain": 4096, "secagg": 1}[protocol]
        outcomes.append(masked_outcome(run_plan, tmp_path / protocol))
    assert len(outcomes[0].versions) == 1 and outcomes[0].versions == outcomes[1].versions


def test_metrics_count_examples_whatever_the_weights(tmp_path: Path) -> None:
    """Four devices of ``members`` train on 10, 11, 12 and 13 examples."""
    for weights in WEIGHTS:
        outcome = outcome_of(tmp_path / weights, plan_with(weights), [CALM] * NUM_DEVICES)
        assert [version.total_examples for version in outcome.versions] == [46, 46]


@dataclass(frozen=True)
class Broken:
    """A Trainer whose change has one value that is not finite, in the tensor ``b``."""

    value: float
    runtime: str = "numpy"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        change = np.zeros_like(model.parameters)
        change[-2] = self.value
        return Change(values=change, counts={m.EXAMPLES: 10})


class Listening(Federation):
    """A federation that keeps the failures that its devices report."""

    failures: list[tuple[str, str]]

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        if report.failure:
            self.failures = [*getattr(self, "failures", []), (device, report.failure)]
        return await super().report(device, report)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["weighted_mean", "median"])
def test_an_update_that_is_not_finite_is_refused_by_its_tensor_and_the_round_goes_on(
    tmp_path: Path, value: float, rule: str
) -> None:
    run_plan = plan(max_rounds=1, quorum=3, rule=rule)
    trainers = [*(SyntheticTrainer(partition=index) for index in range(3)), Broken(value)]
    bundle = bundle_in(tmp_path)

    async def main() -> None:
        async with Listening(tmp_path, 0) as federation:
            await federation.start_run("run", run_plan, bundle, PUBLISHER)
            for index, trainer in enumerate(trainers):
                federation.join(Member(device=f"device-{index}", trainer=trainer), bundle)
            events = [entry.event async for entry in federation.watch("run")]
            newest = federation.state.runs.version("run")
            assert newest is not None and newest.number == 1
            values = load_parameters(federation.state.blobs, newest, bundle.manifest.table)
            assert np.isfinite(values).all() and values.any()
            assert [verdict.problem for verdict in verify_run(federation.state, "run")] == ["", ""]
        assert [event.num_accepted for event in events if isinstance(event, m.RoundClosed)] == [3]
        assert {device for device, _ in federation.failures} == {"device-3"}
        text = "training: update: tensor 'b': got NaN or infinity, expected finite values; the training diverged"
        assert federation.failures[0][1].startswith(text)

    run_virtual(main())


TEXT = 'name = "a"\nbundle = "b"\ncohort = { concurrency = 2 }\ntraining = { learning_rate = 0.1 }\n'


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ('weights = "sites"', "FN-1852"),
        ("site_weights = { a = 1 }", "FN-1852"),
        ('weights = "uniform"\nsite_weights = { a = 1 }', "FN-1852"),
        ('weights = "sites"\nsite_weights = { a = 1 }\nmax_examples = 1', "FN-1852"),
        ('weights = "equal"', "FN-0285"),
        ('weights = "sites"\nsite_weights = { a = 0 }', "FN-0285"),
        ('weights = "sites"\nsite_weights = { a = 1048577 }', "FN-0285"),
        ('weights = "sites"\nsite_weights = { "a b" = 1 }', "FN-0285"),
        ('weights = "sites"\nsite_weights = { a = 1.5 }', "FN-0285"),
    ],
)
def test_contradictory_weights_are_refused(keys: str, code: str) -> None:
    with pytest.raises(InvalidPlan, match="weights") as refused:
        parse_plan(f"{TEXT}[aggregation]\n{keys}\n", "plan")
    assert refused.value.code == code


def test_weights_by_site_are_refused_where_they_could_not_count() -> None:
    robust = plan_with("sites", rule="median")
    with pytest.raises(InvalidPlan, match="each update counts once") as refused:
        rule_of(robust)
    assert refused.value.code == "FN-1853"
    rule_of(replace(robust, aggregation=replace(robust.aggregation, weights="uniform", site_weights={})))
    masked = plan_of("secagg", 6, 6)
    by_site = AggregationPlan(weights="sites", site_weights={"a": 2})
    with pytest.raises(InvalidPlan, match="devices apply their weights under the masks") as refused:
        protocol_of(replace(masked, aggregation=by_site))
    assert refused.value.code == "FN-1853"

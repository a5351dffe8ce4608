"""The simulation engine ``vmap``: it trains a Round's clients together in torch, with the results of the graph."""

import gc
import itertools
import re
import runpy
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from house.tree import ROOT
from support.data import real_places
from support.errors import raises
from support.models import app_of, bundle_of, export_bundle, samples
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.files import DATA_VARIABLE
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.edge.export import Adam, App, Recipe, Sgd
from fanin.edge.export.vectorized.step import VectorSettings, VectorState, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.protos import messages as m
from fanin.protos.errors import Diverged, InvalidInput, UnsupportedModel
from fanin.protos.plans import MAX_TIMES
from fanin.simulation import Iid, load_data, partition, simulate
from fanin.simulation.arguments import check_settings
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.engines.choice import Workload, choose, seconds_of
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.workers import LocalTrainings, Trainings

LONG_WORKLOAD = Workload(num_epochs=100_000, together=10, batches=(4,) * 10)
PLAN_TEXT = """
name = "plan"
bundle = "bundle"
cohort = { concurrency = 3 }
training = { learning_rate = 0.1, epochs = 2 }
stop = { max_rounds = 4 }
"""
SIZES = (40, 3, 17, 9)
EPOCHS = 3
ROUNDS = 20


def clients_of(sizes: Sequence[int] = SIZES) -> Partition:
    x, y = samples(sum(sizes), seed=4)
    bounds = np.cumsum([0, *sizes])
    indices = tuple(np.arange(start, end) for start, end in pairwise(bounds))
    return Partition(examples=Examples(inputs={"x": x}, y=y), indices=indices)


def assignment(client: int, **changes: object) -> m.Assignment:
    example = example_assignment(bundle_of("cnn"))
    training = replace(example.training, epochs=EPOCHS, **changes)
    return replace(example, assignment_id=f"{client:032x}", training=training)


def model(name: str = "cnn") -> OpenedModel:
    bundle = bundle_of(name)
    return OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())


class CountingStep(VectorStep):
    """A step that records the number of its clients."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.numbers: list[int] = []

    def __call__(
        self, state: VectorState, batches: Sequence[PaddedBatch], settings: VectorSettings
    ) -> tuple[VectorState, np.ndarray]:
        self.numbers.append(len(batches))
        return super().__call__(state, batches, settings)


@pytest.fixture(scope="module")
def step() -> CountingStep:
    return CountingStep(app_of("cnn"))


def changes_of(trainings: Trainings, name: str) -> list[Change]:
    pending = [trainings.begin(client, model(name), assignment(client)) for client in range(len(SIZES))]
    # The trainings are collected in another order than they began.
    return [finish() for finish in reversed(pending)][::-1]


@pytest.mark.parametrize("name", ["cnn", "noisy"])
def test_each_client_has_the_change_of_the_graph(name: str) -> None:
    graphs = BundleGraphs(open_runtime("onnx"))
    sequential = changes_of(LocalTrainings(graphs, clients_of(), 0.2), name)
    vectorized = changes_of(VectorTrainings(VectorStep(app_of(name)), graphs, clients_of(), 0.2), name)
    for one, other in zip(sequential, vectorized, strict=True):
        assert one.num_steps == other.num_steps
        assert np.abs(one.values - other.values).max() < 1e-5 * np.abs(one.values).max() + 1e-6
        assert {**one.counts, m.TRAIN_LOSS: 0} == {**other.counts, m.TRAIN_LOSS: 0}
        assert other.counts[m.TRAIN_LOSS] == pytest.approx(one.counts[m.TRAIN_LOSS], rel=1e-4)


def test_only_clients_of_one_version_train_together(step: CountingStep) -> None:
    """A client of another Version starts from its own parameters, also if both Versions have one Bundle."""
    trainings = VectorTrainings(step, BundleGraphs(open_runtime("onnx")), clients_of((5, 5, 5)), 0.2)
    newer = replace(model(), parameters=model().parameters * np.float32(1.5))
    pending = [
        trainings.begin(client, each, assignment(client)) for client, each in enumerate((model(), newer, model()))
    ]
    step.numbers.clear()
    pending[1]()
    assert set(step.numbers) == {1}
    step.numbers.clear()
    pending[0]()
    assert set(step.numbers) == {2}


@pytest.mark.nightly
def test_more_clients_than_fit_train_in_groups(step: CountingStep) -> None:
    step.numbers.clear()
    sizes = (5,) * (step.max_clients + 1)
    trainings = VectorTrainings(step, BundleGraphs(open_runtime("onnx")), clients_of(sizes), 0.2)
    pending = [trainings.begin(client, model(), assignment(client)) for client in range(len(sizes))]
    changes = [each() for each in pending]
    assert set(step.numbers) == {step.max_clients, 1}
    assert len({each.values.tobytes() for each in changes}) == len(sizes)


def test_a_client_whose_examples_fail_does_not_disturb_the_others(step: CountingStep) -> None:
    graphs = BundleGraphs(open_runtime("onnx"))
    trainings = VectorTrainings(step, graphs, clients_of((*SIZES, 0)), 0.2)
    pending = [trainings.begin(client, model(), assignment(client)) for client in range(len(SIZES) + 1)]
    changes = [each() for each in pending[:-1]]
    assert all(np.isfinite(each.values).all() for each in changes)
    with pytest.raises((ValueError, InvalidInput)):
        pending[-1]()


def test_a_training_that_diverges_is_reported(step: CountingStep) -> None:
    graphs = BundleGraphs(open_runtime("onnx"))
    trainings = VectorTrainings(step, graphs, clients_of(), 0.2)
    training = trainings.begin(0, model(), assignment(0, learning_rate=1e30))
    text = "training: loss became nan after 2 steps, expected a finite one; lower the learning rate (1e+30)"
    with raises(Diverged, text):
        training()


def test_a_training_that_is_not_collected_is_not_run(step: CountingStep) -> None:
    step.numbers.clear()
    trainings = VectorTrainings(step, BundleGraphs(open_runtime("onnx")), clients_of(), 0.2)
    pending = [trainings.begin(client, model(), assignment(client)) for client in range(3)]
    del pending[1]
    gc.collect()
    pending[0]()
    assert max(step.numbers) == 2


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(clip_norm=0.5, proximal=True),
        Recipe(scaffold=True, optimizer=Sgd(momentum=0.0)),
    ],
    ids=["proximal", "scaffold"],
)
def test_the_extra_inputs_reach_each_client(recipe: Recipe) -> None:
    step = VectorStep(replace(app_of("mlp"), recipe=recipe))
    parameters = bundle_of("mlp").initial_parameters()
    rng = np.random.default_rng(0)
    controls = [rng.standard_normal(len(parameters)).astype(np.float32) for _ in range(2)]
    x, y = samples(8, seed=1)
    batch = PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(8, np.float32))

    def parameters_after(anchor: np.ndarray, weight: float, controls: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        settings = VectorSettings(
            learning_rates=[0.1] * len(controls),
            proximal_weight=weight,
            anchor=anchor,
            controls=controls,
            random_keys=[0] * len(controls),
        )
        state, _ = step(step.begin(parameters, 2), [batch, batch], settings)
        return step.parameters(state)

    baseline = parameters_after(parameters, 0.0, [None, None])
    if recipe.proximal:
        # The proximal pull is added before the gradient is clipped, so only its direction is known.
        result = parameters_after(parameters - 1.0, 1e6, [None, None])
        assert np.array_equal(result[0], result[1])
        assert (result[0] < parameters).mean() > 0.99
    else:
        for index, result in enumerate(parameters_after(parameters, 0.0, controls)):
            assert np.allclose(result, baseline[index] - 0.1 * controls[index], atol=1e-5)


class UnvectorizableModule(nn.Module):
    """A module with an operator that torch cannot vectorize."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x.flatten(1))
        (output,) = torch._foreach_add([logits], 1.0)
        return output


def test_auto_reports_why_it_chooses_the_graph_and_vmap_refuses() -> None:
    app: App = replace(app_of("mlp"), module=UnvectorizableModule())
    bundle, runtime = bundle_of("mlp"), open_runtime("onnx")
    with pytest.raises(UnsupportedModel, match="FN-0799"):
        choose(SimulationSettings(engine="vmap"), app, bundle, runtime, LONG_WORKLOAD)
    choice = choose(SimulationSettings(engine="auto"), app, bundle, runtime, LONG_WORKLOAD)
    assert choice.engine == "graph"
    assert choice.reason.startswith("engine graph, because vmap is not possible: App mlp: the train step cannot be ")
    assert "engine='graph'" not in choice.reason
    # The reason also states the cost of the fallback.
    assert re.search(r"; all rounds train in about [\d.e+]+ s by graph$", choice.reason)


def test_a_gpu_that_torch_does_not_find_is_refused_before_the_trace() -> None:
    with pytest.raises(InvalidInput, match="FN-1110"):
        choose(
            SimulationSettings(engine="vmap:cuda:99"),
            app_of("mlp"),
            bundle_of("mlp"),
            open_runtime("onnx"),
            LONG_WORKLOAD,
        )


def test_auto_chooses_an_engine_and_reports_its_measurements() -> None:
    choice = choose(
        SimulationSettings(engine="auto"), app_of("mlp"), bundle_of("mlp"), open_runtime("onnx"), LONG_WORKLOAD
    )
    assert (choice.step is None) == (choice.engine == "graph")
    assert f"engine {choice.engine}: all rounds train in about " in choice.reason
    assert " by vmap, whose trace took " in choice.reason


def test_auto_traces_no_module_for_a_short_simulation() -> None:
    workload = replace(LONG_WORKLOAD, num_epochs=1, batches=(1,) * 10)
    # Not even a module that vmap cannot run is traced.
    app: App = replace(app_of("mlp"), module=UnvectorizableModule())
    choice = choose(SimulationSettings(engine="auto"), app, bundle_of("mlp"), open_runtime("onnx"), workload)
    assert choice.engine == "graph" and choice.reason.startswith("engine graph: graph trains all rounds in ")
    assert "vmap begins with a trace" in choice.reason


def test_the_workload_of_a_plan_has_the_epochs_of_its_schedule_and_the_clients_that_begin_together() -> None:
    text = PLAN_TEXT + "\n[[schedule]]\nfrom_round = 3\nepochs = 5\n"
    plan = parse_plan(text, "plan").plan
    workload = Workload.of(plan, [20, 8, 9, 3], batch_size=8)
    assert workload == Workload(num_epochs=2 + 2 + 5 + 5, together=3, batches=(3, 1, 2, 1))
    buffered_plan = replace(
        plan, cohort=replace(plan.cohort, buffer=2, quorum=1), aggregation=replace(plan.aggregation, max_staleness=4)
    )
    assert Workload.of(buffered_plan, [20, 8, 9, 3], batch_size=8).together == 2
    # The Rounds of an endless Plan are not counted one by one.
    endless_plan = replace(plan, stop=replace(plan.stop, max_rounds=MAX_TIMES))
    assert Workload.of(endless_plan, [8], batch_size=8).num_epochs == 2 * 2 + 5 * (MAX_TIMES - 2)
    short_plan = replace(plan, stop=replace(plan.stop, max_rounds=2))
    assert Workload.of(short_plan, [8], batch_size=8).num_epochs == 2 * 2


def test_the_seconds_of_both_engines_follow_from_a_step() -> None:
    workload = Workload(num_epochs=10, together=4, batches=(1, 5, 2, 2))
    assert workload.graph_seconds(0.5) == 10 * (1 + 2 + 2 + 5) * 0.5
    # A step costs 3 s, and 1 s for each client. There are five joint steps and ten client steps.
    assert workload.vmap_seconds({1: 4.0, 4: 7.0}, 64) == pytest.approx(10 * (5 * 3 + 10 * 1))
    # In two groups, 1 with 2 and 2 with 5: seven steps.
    assert workload.vmap_seconds({1: 4.0, 2: 5.0}, 2) == pytest.approx(10 * ((2 + 5) * 3 + 10 * 1))
    assert replace(workload, together=2).graph_seconds(1.0) == 10 * 2 * 2.5
    assert workload.vmap_seconds({1: 4.0}, 1) == pytest.approx(10 * 10 * 4.0)


def test_a_rare_large_client_counts_in_the_rounds_that_it_is_in() -> None:
    even, uneven = (Workload(num_epochs=10, together=4, batches=(*(1,) * 39, last)) for last in (1, 1001))
    assert even.graph_seconds(0.5) == pytest.approx(10 * 4 * 0.5)
    assert uneven.graph_seconds(0.5) == pytest.approx(10 * 4 * 26 * 0.5)
    # Every tenth Round has 1000 steps of this client alone.
    assert even.vmap_seconds({1: 1.0, 4: 1.0}, 64) == pytest.approx(10)
    assert uneven.vmap_seconds({1: 1.0, 4: 1.0}, 64) == pytest.approx(10 * (1 + 1000 * 0.1))


def test_a_step_that_is_slow_now_and_then_costs_its_median() -> None:
    pauses = itertools.cycle((0.002, 0.004, 0.004))
    assert seconds_of(lambda: time.sleep(next(pauses))) >= 0.004


def test_an_unknown_engine_and_vmap_with_processes_are_refused() -> None:
    expected = "expected one of graph, vmap, vmap:cuda (or vmap:cuda:N, the GPU N), or auto"
    for engine in ("fast", "vmap:cpu", "vmap:cuda:", "graph:cuda", "", None):
        with raises(InvalidInput, f"simulate: engine: got {engine!r}, {expected}"):
            check_settings(SimulationSettings(engine=engine))
    with pytest.raises(InvalidInput, match="FN-1101"):
        check_settings(SimulationSettings(engine="vmap", processes=2))
    with pytest.raises(InvalidInput, match="FN-1101"):
        check_settings(SimulationSettings(engine="auto", seeds=(1, 2)))


def test_an_optimizer_that_counts_steps_receives_their_number() -> None:
    app: App = replace(app_of("mlp"), recipe=Recipe(optimizer=Adam()))
    bundle, step = export_bundle(app), VectorStep(app)
    x, y = samples(8, seed=1)
    batch, parameters = PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(8, np.float32)), bundle.initial_parameters()
    train_step = open_runtime("onnx").open_train(bundle)
    single_state, joint_state = train_step.begin(parameters), step.begin(parameters, 2)
    for _ in range(3):
        single_state, _ = train_step(single_state, batch, StepSettings(learning_rate=0.01))
        settings = VectorSettings(
            learning_rates=[0.01] * 2,
            proximal_weight=0.0,
            anchor=parameters,
            controls=[None] * 2,
            random_keys=[0, 1],
        )
        joint_state, _ = step(joint_state, [batch, batch], settings)
    for values in step.parameters(joint_state):
        assert np.abs(values - single_state.parameters).max() < 1e-4


@pytest.mark.nightly
def test_vmap_of_a_convolutional_network_is_within_half_a_point_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(real_places("fashion-mnist").data))
    data = load_data("fashion-mnist")
    images = torch.from_numpy(data.train.inputs["x"][:64])
    plan = {"training.learning_rate": 0.1, "training.epochs": 1, "evaluation.every": ROUNDS}
    clients = partition(data.train.take(np.arange(3000)), 50, Iid())
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "simulated" / "load.py"))
    accuracies = {}
    for engine in ("graph", "vmap"):
        app = App(name="cnn", module=benchmark["module"]("cnn"), calibration=images, batch_size=10, num_classes=10)
        settings = SimulationSettings(test=data.test, plan=plan, engine=engine, quiet=True)
        result = simulate(app, clients, cohort=20, rounds=ROUNDS, settings=settings)
        accuracies[result.engine] = result.rounds[-1].test_accuracy
    assert accuracies["graph"] > 0.6
    assert abs(accuracies["graph"] - accuracies["vmap"]) <= 0.005

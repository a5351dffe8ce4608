"""The passes of FedRep and Ditto on a device: which values move, what a kill leaves, and what a Plan may not name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.values import plan
from torch import nn

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.conditions import Interrupted, ShouldContinue
from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.trainings import TrainingStore
from fanin.clients.device.training.resuming import SavePolicy
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.work import WorkLimit
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.stages import stages_of
from fanin.edge.export import Adam, App, Recipe
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PERSONAL, SHARED, PaddedBatch, StepSettings
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.server.aggregation.methods.checks import check_personal
from fanin.server.runs.measuring import check_evaluation

NUM, EPOCHS, OWN_EPOCHS, BATCHES = 10, 3, 2, 3
TRAINING = m.Training(epochs=EPOCHS, personal_epochs=OWN_EPOCHS, learning_rate=0.05, seed=1)
DITTO = replace(TRAINING, ditto_weight=0.5)
ALWAYS = SavePolicy(save_s=0.0, max_share=np.inf)


def bundle_of(**recipe: object) -> Bundle:
    torch.manual_seed(1)
    # Adam counts its steps, and its moments move without a gradient.
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    app = App(
        name="passes",
        module=module,
        calibration=torch.randn(32, 6),
        batch_size=4,
        num_classes=3,
        recipe=Recipe(optimizer=Adam(), **recipe),  # type: ignore[arg-type]
    )
    return export_bundle(app)


@pytest.fixture(scope="module")
def bundles() -> Mapping[str, Bundle]:
    return {"fedrep": bundle_of(local=["2.*"]), "ditto": bundle_of(proximal=True)}


def trainer(**options: object) -> RuntimeTrainer:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((NUM, 6), np.float32), rng.integers(0, 3, NUM).astype(np.int32)
    store = MemoryStore(partition=0, train=Examples(inputs={"x": x}, y=y), validation=None)
    return RuntimeTrainer(open_runtime("onnx"), store, **options)  # type: ignore[arg-type]


def plan_of(training: m.Training, *names: str, **fields: object) -> Plan:
    statistics = tuple(m.Statistic(name=name, bound=m.MAX_COUNT) for name in names)
    return replace(plan(), training=training, statistics=statistics, **fields)  # type: ignore[arg-type]


def own_values(bundle: Bundle) -> Float32s:
    return bundle.initial_parameters() if bundle.manifest.local is None else bundle.initial_local()


def measuring_store() -> MemoryStore:
    rng = np.random.default_rng(1)
    parts = [
        Examples(inputs={"x": rng.standard_normal((num, 6), np.float32)}, y=rng.integers(0, 3, num).astype(np.int32))
        for num in (NUM, 4)
    ]
    return MemoryStore(partition=0, train=parts[0], validation=parts[1])


def measuring() -> RuntimeTrainer:
    return RuntimeTrainer(open_runtime("onnx"), measuring_store())


def training_of(method: str) -> m.Training:
    return DITTO if method == "ditto" else TRAINING


def train(
    bundle: Bundle, training: m.Training, should_continue: ShouldContinue | None = None, **fields: object
) -> Change:
    model = replace(example_model(bundle), **fields)  # type: ignore[arg-type]
    work = example_assignment(bundle, training)
    return trainer(policy=ALWAYS).train(model, work, should_continue or Countdown())


def test_a_step_of_a_group_leaves_the_other_values_as_they_are(bundles: Mapping[str, Bundle]) -> None:
    bundle = bundles["fedrep"]
    step, initial = open_runtime("onnx").open_train(bundle), bundle.completed(bundle.initial_parameters())
    x = np.random.default_rng(2).standard_normal((4, 6), np.float32)
    batch = PaddedBatch(inputs={"x": x}, y=np.array([0, 1, 2, 0], np.int32), mask=np.ones(4, np.float32))
    ends = {}
    for group in ("", SHARED, PERSONAL):
        state, _ = step(step.begin(initial), batch, StepSettings(learning_rate=0.5, group=group))
        ends[group] = bundle.manifest.split(state.parameters)
    shared, personal = bundle.manifest.split(initial)
    np.testing.assert_array_equal(ends[SHARED][0], ends[""][0])
    np.testing.assert_array_equal(ends[SHARED][1], personal)
    np.testing.assert_array_equal(ends[PERSONAL][1], ends[""][1])
    np.testing.assert_array_equal(ends[PERSONAL][0], shared)
    # Running statistics are among the shared values.
    assert (ends[""][0] != shared).sum() > 5 and (ends[""][1] != personal).any()


@pytest.mark.parametrize("method", ["fedrep", "ditto"])
def test_the_trainer_keeps_its_contract(bundles: Mapping[str, Bundle], method: str) -> None:
    bundle, calls = bundles[method], Countdown()
    work = example_assignment(bundle, training_of(method))
    change = check_trainer(trainer(), example_model(bundle), work)
    trainer().train(example_model(bundle), work, calls)
    # The Update counts the steps of the last pass.
    assert (calls.num_calls, change.num_steps) == ((EPOCHS + OWN_EPOCHS) * BATCHES, EPOCHS * BATCHES)


def test_ditto_sends_the_change_of_fedavg(bundles: Mapping[str, Bundle]) -> None:
    bundle = bundles["ditto"]
    ditto, fedavg = (train(bundle, each) for each in (DITTO, m.Training(epochs=EPOCHS, learning_rate=0.05, seed=1)))
    assert ditto.values.tobytes() == fedavg.values.tobytes() and ditto.counts == fedavg.counts
    assert fedavg.local is None and ditto.local is not None
    # The copy continues from its last values, which change nothing in the Update.
    later = train(bundle, DITTO, local=ditto.local)
    assert later.values.tobytes() == ditto.values.tobytes()
    assert later.local is not None and not np.array_equal(later.local, ditto.local)


def test_a_strong_pull_keeps_the_copy_near_the_version(bundles: Mapping[str, Bundle]) -> None:
    bundle = bundles["ditto"]
    version, far = bundle.initial_parameters(), bundle.initial_parameters() + np.float32(1.0)
    distances = []
    for weight in (1e-3, 100.0):
        local = train(bundle, replace(DITTO, personal_epochs=20, ditto_weight=weight), local=far).local
        assert local is not None
        weights = bundle.manifest.table.views(local - version)["0.weight"]
        distances.append(float(np.abs(weights).mean()))
    assert distances[1] < 0.5 * distances[0], distances


@pytest.mark.parametrize("method", ["fedrep", "ditto"])
def test_a_training_interrupted_before_any_step_resumes_with_the_same_bits(
    bundles: Mapping[str, Bundle], method: str, tmp_path: Path
) -> None:
    bundle, training = bundles[method], training_of(method)
    expected = train(bundle, training)
    assert expected.local is not None
    num_all = (EPOCHS + OWN_EPOCHS) * BATCHES
    for step in range(num_all):
        place = TrainingStore(tmp_path / str(step)).open(example_assignment(bundle, training))
        with pytest.raises(Interrupted):
            train(bundle, training, Countdown(step), saved=place)
        calls = Countdown()
        change = train(bundle, training, calls, saved=place)
        assert calls.num_calls == num_all - step, step
        assert change.values.tobytes() == expected.values.tobytes() and change.counts == expected.counts, step
        assert change.local is not None and change.local.tobytes() == expected.local.tobytes(), step


def test_a_device_does_the_same_share_of_both_passes(bundles: Mapping[str, Bundle]) -> None:
    bundle, calls = bundles["ditto"], Countdown()
    work = example_assignment(bundle, DITTO)
    change = trainer(work=WorkLimit(steps=3)).train(example_model(bundle), work, calls)
    assert (change.num_steps, calls.num_calls) == (3, 3 + 2)


def test_own_values_are_the_copy_or_the_personal_parameters(bundles: Mapping[str, Bundle]) -> None:
    bundle = bundles["ditto"]
    parameters = bundle.initial_parameters()
    model = OpenedModel(bundle=bundle, parameters=parameters, local=parameters + 1)
    np.testing.assert_array_equal(model.values(), parameters)
    np.testing.assert_array_equal(model.own_values(), parameters + 1)
    model = replace(example_model(bundles["fedrep"]), local=bundles["fedrep"].initial_local() + 1)
    np.testing.assert_array_equal(model.own_values(), model.values())


@pytest.mark.parametrize(
    ("training", "has_local", "has_proximal", "code"),
    [
        (TRAINING, False, True, "FN-1830"),
        (DITTO, True, True, "FN-1832"),
        (DITTO, False, False, "FN-1833"),
        (TRAINING, True, False, ""),
        (DITTO, False, True, ""),
    ],
)
def test_a_plan_whose_bundle_does_not_fit_is_refused(
    training: m.Training, has_local: bool, has_proximal: bool, code: str
) -> None:
    received = ""
    try:
        check_personal("run", plan_of(training), has_local=has_local, has_proximal=has_proximal)
    except InvalidPlan as exc:
        received = exc.code
    assert received == code


@pytest.mark.parametrize("name", ["personal.accuracy", "global.loss"])
@pytest.mark.parametrize(
    ("training", "has_local", "stages", "is_refused"),
    [
        (m.Training(epochs=1, learning_rate=0.1), False, (), True),
        (m.Training(epochs=1, learning_rate=0.1), True, (), False),
        (DITTO, False, (), False),
        (m.Training(epochs=1, learning_rate=0.1), True, (m.StageSpec(name="evaluate_only"),), True),
    ],
)
def test_statistics_of_two_models_need_a_model_of_the_device(
    name: str, training: m.Training, has_local: bool, stages: tuple[m.StageSpec, ...], is_refused: bool
) -> None:
    received = ""
    try:
        check_personal("run", plan_of(training, name, stages=stages), has_local=has_local, has_proximal=True)
    except InvalidPlan as exc:
        received = exc.code
    assert received == ("FN-1818" if is_refused else "")


def test_an_evaluation_without_training_has_no_epochs_of_its_own() -> None:
    stages = (m.StageSpec(name="evaluate_only"),)
    with pytest.raises(InvalidPlan, match=r"training\.personal_epochs") as refusal:
        check_evaluation("run", plan_of(TRAINING, stages=stages), stages_of(stages))
    assert refusal.value.code == "FN-1870"
    check_evaluation("run", plan_of(replace(TRAINING, personal_epochs=0), stages=stages), stages_of(stages))


@pytest.mark.parametrize("method", ["fedrep", "ditto"])
def test_a_device_measures_the_global_and_its_own_model(bundles: Mapping[str, Bundle], method: str) -> None:
    bundle, names = bundles[method], [f"{of}.{name}" for of in ("global", "personal") for name in ("accuracy", "loss")]
    work = example_assignment(bundle, training_of(method))
    work = replace(work, statistics=tuple(m.Statistic(name=name, bound=m.MAX_COUNT) for name in names))
    model = example_model(bundle)
    own = replace(model, local=own_values(bundle) * np.float32(-3.0))
    received = dict(measuring().train(own, work, Countdown()).counts)
    # Each model alone, as one without anything of its own.
    evaluate = open_runtime("onnx").open_evaluate(bundle)
    held_out = measuring_store().validation
    assert held_out is not None
    (batch,) = batches_in_order(held_out, bundle.manifest.batch_size, None)
    for prefix, values in (("global", model.values()), ("personal", own.own_values())):
        outcome = evaluate(values, batch)
        correct = int((outcome.predicted == batch.y)[batch.mask > 0].sum())
        assert received[f"{prefix}.accuracy"] == correct << 16
        assert received[f"{prefix}.loss"] == pytest.approx(outcome.loss_sum * 65536, abs=1)
    assert received["global.loss"] != received["personal.loss"]
    # What the Round trains is measured as before.
    trained = "personal" if method == "fedrep" else "global"
    assert received[m.EVAL_LOSS] == received[f"{trained}.loss"]
    # In its first Round, a device has no other model than the Version.
    first = dict(measuring().train(model, work, Countdown()).counts)
    assert first["personal.loss"] == first["global.loss"] == received["global.loss"]


def test_ditto_without_epochs_of_its_own_is_refused() -> None:
    text = 'bundle = "b"\ncohort = {concurrency = 2}\ntraining = {learning_rate = 0.1, ditto_weight = 0.1}\n'
    with pytest.raises(InvalidPlan) as refusal:
        parse_plan(text, "plan.toml", [])
    assert refusal.value.code == "FN-1831"

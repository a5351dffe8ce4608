"""Trainers: the findings of ``check_trainer``, and a training on a real runtime that stops after k batches."""

import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs, numpy_step
from support.outside import python_blocks
from support.values import PUBLISHER

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.conditions import Interrupted, ShouldContinue
from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer, difference
from fanin.clients.device.updates import Change
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Evaluate, MeasureRanges, Predict, TrainStep
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.simulation import SyntheticTrainer, synthetic_bundle

NUM_EVALUATED, NUM_TRAINED = 2, 6
"""Numbers of batches of 4: 2 for 7 validation examples, and 3 in each of 2 epochs over 10 training examples."""


@pytest.fixture
def linear(tmp_path: Path) -> Bundle:
    return assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER)


def store() -> MemoryStore:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((17, NUM_INPUTS)).astype(np.float32)
    y = rng.integers(0, NUM_CLASSES, 17).astype(np.int32)
    return MemoryStore(
        partition=0, train=Examples(inputs={"x": x[:10]}, y=y[:10]), validation=Examples(inputs={"x": x[10:]}, y=y[10:])
    )


@pytest.fixture
def scaffold_bundle(tmp_path: Path) -> Bundle:
    """The Bundle of a model whose train graph has the inputs ``control.<p>``."""
    return assemble(linear_graphs(scaffold=True), tmp_path / "controlled", PUBLISHER)


def test_control_is_added_to_the_gradient_of_every_step(scaffold_bundle: Bundle) -> None:
    """One batch holds all examples, so numpy computes the same steps in any order of the examples."""
    examples = Examples(inputs={"x": store().train.inputs["x"][:4]}, y=store().train.y[:4])
    one = MemoryStore(partition=0, train=examples, validation=store().validation)
    table, work = scaffold_bundle.manifest.table, example_assignment(scaffold_bundle)
    control = np.random.default_rng(2).normal(0.0, 0.3, table.num_values).astype(np.float32)
    model = replace(example_model(scaffold_bundle), inputs={"control": control})
    change = check_trainer(RuntimeTrainer(open_runtime("onnx"), one), model, work)
    before, controls = table.views(model.parameters), table.views(control)
    w, b = before["w"].astype(np.float64), before["b"].astype(np.float64)
    rate = work.training.learning_rate
    for _ in range(work.training.epochs):
        w, b, _ = numpy_step(w, b, examples.inputs["x"], examples.y, rate)
        w, b = w - rate * controls["w"], b - rate * controls["b"]
    expected = table.flatten({"w": w - before["w"], "b": b - before["b"]})
    np.testing.assert_allclose(change.values, expected, atol=1e-6)
    plain = RuntimeTrainer(open_runtime("onnx"), one).train(example_model(scaffold_bundle), work, Countdown())
    assert np.abs(change.values - plain.values).max() > 0.01


def test_the_training_loss_is_that_of_one_epoch_whatever_their_number(linear: Bundle) -> None:
    trainer = RuntimeTrainer(open_runtime("onnx"), store())
    one, three = (
        trainer.train(
            example_model(linear),
            # The steps are so small that the loss stays the same.
            example_assignment(linear, m.Training(epochs=epochs, learning_rate=1e-6, seed=1)),
            Countdown(),
        ).counts[m.TRAIN_LOSS]
        for epochs in (1, 3)
    )
    assert one > 0
    assert three == pytest.approx(one, rel=1e-3)


def test_inputs_that_a_train_graph_lacks_are_refused(linear: Bundle, scaffold_bundle: Bundle) -> None:
    zeros = np.zeros(linear.manifest.table.num_values, np.float32)
    trainer = RuntimeTrainer(open_runtime("onnx"), store())
    with raises(
        InvalidInput,
        "stages: got the input 'control', but the bundle's train graph has no inputs control.<p>; export the App with "
        "Recipe(scaffold=True)",
    ):
        trainer.train(
            replace(example_model(linear), inputs={"control": zeros}), example_assignment(linear), Countdown()
        )
    with raises(
        InvalidInput,
        "stages: got the inputs ['anchor', 'control'] for the train graph, expected at most 'control'; correct the "
        "stage",
    ):
        trainer.train(
            replace(example_model(scaffold_bundle), inputs={"anchor": zeros, "control": zeros}),
            example_assignment(scaffold_bundle),
            Countdown(),
        )


class CountingRuntime:
    """onnxruntime with counters of the opened Signatures and of the steps."""

    def __init__(self) -> None:
        self._inner = open_runtime("onnx")
        self.name, self.graph_format = self._inner.name, self._inner.graph_format
        self.counts: Counter[str] = Counter()

    def open_train(self, bundle: Bundle) -> TrainStep:
        self.counts["train"] += 1
        return self._inner.open_train(bundle)

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        self.counts["evaluate"] += 1
        return self._inner.open_evaluate(bundle)

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        self.counts["predict"] += 1
        return self._inner.open_predict(bundle, parameters, ranges)

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        return self._inner.open_ranges(bundle, parameters)


def test_a_training_over_a_runtime_keeps_the_contract(linear: Bundle) -> None:
    trainer = RuntimeTrainer(open_runtime("onnx"), store())
    change = check_trainer(trainer, example_model(linear), example_assignment(linear))
    assert change.num_steps == NUM_TRAINED
    assert np.abs(change.values).max() > 0.0


@pytest.mark.parametrize("num_batches", range(NUM_EVALUATED + NUM_TRAINED))
def test_a_training_stops_after_k_batches_and_is_bit_identical_afterwards(linear: Bundle, num_batches: int) -> None:
    trainer = RuntimeTrainer(open_runtime("onnx"), store())
    model, work = example_model(linear), example_assignment(linear)
    countdown = Countdown(num_batches)
    with pytest.raises(Interrupted):
        trainer.train(model, work, countdown)
    assert countdown.num_calls == num_batches + 1
    expected = RuntimeTrainer(open_runtime("onnx"), store()).train(model, work, Countdown())
    repetition = trainer.train(model, work, Countdown())
    assert (repetition.values.tobytes(), repetition.counts) == (expected.values.tobytes(), expected.counts)


def test_graphs_stay_open_between_rounds_until_the_bundle_changes(linear: Bundle, tmp_path: Path) -> None:
    runtime = CountingRuntime()
    trainer = RuntimeTrainer(runtime, store())  # type: ignore[arg-type]  # opens no other models
    work = example_assignment(linear)
    versions = [np.float32(0.1 * number) + linear.initial_parameters() for number in range(3)]
    for parameters in versions:
        model = OpenedModel(bundle=linear, parameters=parameters)
        change = trainer.train(model, work, Countdown())
        expected = RuntimeTrainer(open_runtime("onnx"), store()).train(model, work, Countdown())
        assert (change.values.tobytes(), change.counts) == (expected.values.tobytes(), expected.counts)
    # The slots of ``infer`` belong to a Version.
    assert runtime.counts == {"train": 1, "evaluate": 1, "predict": 3}
    other = assemble(replace(linear_graphs(), name="other"), tmp_path / "other", PUBLISHER)
    trainer.train(example_model(other), work, Countdown())
    assert runtime.counts == {"train": 2, "evaluate": 2, "predict": 4}


@dataclass
class Deaf:
    """A Trainer that breaks one rule of the contract."""

    rule: str
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"
    num_trainings: int = 0

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.num_trainings += 1
        if self.rule == "swallows":
            with suppress(Interrupted):
                should_continue()
        elif self.rule == "continues":
            try:
                should_continue()
            except Interrupted:
                should_continue()
        elif self.rule != "silent":
            should_continue()
        change = SyntheticTrainer(partition=0).train(model, assignment, lambda: True)
        match self.rule:
            case "shape":
                return replace(change, values=change.values[1:])
            case "diverged":
                return replace(change, values=change.values * np.float32(np.nan))
            case "counts":
                return replace(change, counts={})
            case "steps":
                return replace(change, num_steps=2)
            case "random":
                return replace(change, values=change.values + np.float32(self.num_trainings))
            case "base":
                np.add(model.parameters, change.values, out=model.parameters)
            case "parameters":
                return replace(change, values=change.values + model.parameters)
            case "nothing":
                return None  # type: ignore[return-value]  # the mistake of this case
            case "array":
                return change.values  # type: ignore[return-value]  # the mistake of this case
            case "list":
                return replace(change, values=change.values.tolist())  # type: ignore[arg-type]  # likewise
            case "fractions":
                return replace(change, counts={m.EXAMPLES: 20.0})  # type: ignore[dict-item]  # likewise
            case "backwards":
                return replace(change, num_steps=-1)
            case "raises":
                raise KeyError("pixels")
        return change


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("shape", r"values: got float32 \(5,\), expected float32 \(6,\)"),
        ("diverged", "cannot be encoded as an Update .*NaN"),
        ("counts", "expected 'examples' of at least 1"),
        ("silent", "should_continue: called 0 times"),
        ("steps", "should_continue: called 1 times in 2 steps"),
        ("base", "model.parameters: changed by the training"),
        ("random", "a repeated training: returned another change"),
        ("swallows", "did not leave train"),
        ("continues", "continued, expected the end"),
        ("parameters", "values: follow the parameters of the version, .* minus model.parameters"),
        ("nothing", "train: returned NoneType, expected a Change"),
        ("array", "train: returned ndarray, expected a Change"),
        ("list", "change: got list for values, expected an array"),
        ("fractions", "change: got 20.0 for the count 'examples', expected a whole number"),
        ("backwards", "change: got -1 for num_steps, expected a whole number of at least 0"),
        ("raises", "train: raised KeyError: 'pixels'; expected a Change"),
    ],
)
def test_a_trainer_that_breaks_a_rule_is_refused(tmp_path: Path, rule: str, message: str) -> None:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, {"a": (2, 3)})
    with pytest.raises(AssertionError, match=message):
        check_trainer(Deaf(rule), example_model(bundle), example_assignment(bundle))


class Anonymous:
    """A Trainer without a runtime and a format."""

    train = SyntheticTrainer(partition=0).train


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"graph_format": "onnx"}, "runtime: got None, expected a text: the library and its version"),
        ({"runtime": "", "graph_format": "onnx"}, "runtime: got '', expected a text: the library and its version"),
        ({"runtime": "numpy"}, "graph_format: got None, expected one of the bundle's formats: onnx"),
        (
            {"runtime": "numpy", "graph_format": "numpy"},
            "graph_format: got 'numpy', expected one of the bundle's formats: onnx",
        ),
    ],
)
def test_a_trainer_without_a_runtime_or_a_format_is_refused(
    tmp_path: Path, members: dict[str, str], message: str
) -> None:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, {"a": (2, 3)})
    trainer = type("Own", (Anonymous,), members)()
    with raises(AssertionError, message):
        check_trainer(trainer, example_model(bundle), example_assignment(bundle))


def test_a_step_that_contracts_is_a_change_and_its_end_is_none(tmp_path: Path) -> None:
    """Of a training that converges, the change depends on the parameters as much as their end does not."""
    bundle = synthetic_bundle(tmp_path, PUBLISHER, {"a": (2, 3)})

    @dataclass
    class Decay:
        is_change: bool
        runtime: str = "numpy"
        graph_format: str = "onnx"

        def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
            should_continue()
            after = np.float32(1.0 - 9.0 * assignment.training.learning_rate) * (model.parameters - 1) + 1
            values = after - model.parameters if self.is_change else after
            return Change(values=values, counts={m.EXAMPLES: 1})

    check_trainer(Decay(is_change=True), example_model(bundle), example_assignment(bundle))
    with pytest.raises(AssertionError, match="values: follow the parameters"):
        check_trainer(Decay(is_change=False), example_model(bundle), example_assignment(bundle))


def test_the_documented_trainer_runs_outside_the_package(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "howto" / "trainer.md").read_text()
    blocks = python_blocks(section)
    outputs = re.findall(r"^```text title=\"Output\"\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert all(len(code.splitlines()) < 40 for code in blocks)
    command = [sys.executable, "-c", "\n".join(blocks)]  # each block continues the one before it
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (completed.stdout, completed.stderr) == ("".join(outputs), "")


@given(seed=st.integers(0, 2**32 - 1), exponents=st.tuples(st.integers(-149, 120), st.integers(-149, 120)))
def test_a_difference_is_rounded_once(seed: int, exponents: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    after, before = (np.ldexp(rng.standard_normal(64), each).astype(np.float32) for each in exponents)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (after.astype(np.float64) - before).astype(np.float32)
        assert difference(after, before).tobytes() == expected.tobytes()

"""The exporter's check: a graph with a wrong gradient is refused, even if the gradient is tiny."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from support.models import Mlp, app_of, bundle_of, export_bundle
from support.mutants import verify_traced
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adam, App, Recipe, Sgd
from fanin.edge.export.app.losses import cross_entropy
from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.verification.comparison import Triple, check_loss, check_tensors
from fanin.edge.export.verification.eager import cases_of, eager_step
from fanin.edge.export.verification.verify import Forward, _check_int8, _check_step, _start, verify, verify_training
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import BatchEvaluation, Evaluate, NamedInputs, PaddedBatch, Runtime, TrainState
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

RECIPES = {"sgd": Recipe(optimizer=Sgd(momentum=0.0)), "momentum": Recipe(), "adam": Recipe(optimizer=Adam())}


class Still(Adam):
    """An Adam that updates its states and never changes the parameters."""

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the same value and the next states."""
        next_value, states = super().move(value, gradient, state, inputs)
        # Without the move the graph would have unused inputs.
        return value + 0.0 * next_value, states


class Steeper(Mlp):
    """The perceptron with the same outputs, but with the last weight's gradient times a factor."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        flat, first, relu, last = self
        weight = self.factor * last.weight + (1.0 - self.factor) * last.weight.detach()
        return nn.functional.linear(relu(first(flat(x))), weight, last.bias)


class Kinked(Mlp):
    """The perceptron plus a ReLU of rounding errors. Another ``side`` simulates another order of additions."""

    def __init__(self, share: float, distance: float = 1e-7) -> None:
        super().__init__()
        last = self[3].weight.detach()
        signs = 2.0 * (torch.rand(last.shape, generator=torch.Generator().manual_seed(1)) < 0.5) - 1.0
        self.share, self.distance = share, distance
        self.register_buffer("around", last.clone())
        self.register_buffer("signs", signs)
        self.side = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        weight = self[3].weight
        kinks = torch.relu(weight - self.around * (1.0 - self.distance * self.side * self.signs)).sum(1)
        return super().forward(x) + self.share * kinks


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with gradients of about 1e-9. At ordinary learning rates they vanish when added to a float32 parameter."""
    return 1e-8 * cross_entropy(outputs, targets)


@cache
def case(name: str) -> tuple[App, Bundle]:
    """Return the App with a Recipe, and its Bundle."""
    app = replace(app_of("mlp"), loss=small_loss, recipe=RECIPES[name])
    return app, export_bundle(app)


def check(name: str, factor: float) -> None:
    """Compare the exported graphs with eager torch whose gradient is multiplied by ``factor``."""
    app, bundle = case(name)
    prepared = prepare(app)
    eager = Steeper()
    eager.load_state_dict(prepared.eager.state_dict())
    eager.factor = factor
    verify(replace(prepared, eager=eager), bundle, open_runtime("onnx"), open_runtime("onnx", plain=True))


@pytest.mark.parametrize("name", in_ci(RECIPES, ("sgd",)))
def test_a_right_gradient_passes(name: str) -> None:
    check(name, 1.0)


@pytest.mark.parametrize("name", in_ci(RECIPES, ("sgd",)))
@pytest.mark.parametrize("factor", [1.5, 0.99, 0.0])
def test_a_wrong_gradient_is_refused_however_small(name: str, factor: float) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"train step 1: the next \S*3\.weight of module 3 \(Linear\).* differs from torch's"
    ):
        check(name, factor)


def test_a_graph_whose_gradient_is_zero_is_refused_at_a_small_loss() -> None:
    app = replace(app_of("mlp"), loss=small_loss, recipe=RECIPES["sgd"])
    flat = Steeper()
    flat.load_state_dict(app.module.state_dict())
    flat.factor = 0.0
    bundle = export_bundle(replace(app, module=flat))
    with pytest.raises(UnsupportedModel, match=r"train step 1: the next 3\.weight of module 3 \(Linear\)"):
        verify(prepare(app), bundle, open_runtime("onnx"), open_runtime("onnx", plain=True))


def test_an_adam_that_never_moves_is_refused() -> None:
    error = r"train step 1: the next 1\.bias of module 1 \(Linear\) .* differs from torch's"
    with pytest.raises(UnsupportedModel, match=error):
        export_bundle(replace(app_of("mlp"), recipe=Recipe(optimizer=Still())))


def kinked_case(share: float, distance: float = 1e-7) -> tuple[App, nn.Module]:
    """Return an App whose gradient depends on rounding, and its module with another rounding."""
    torch.manual_seed(0)
    module = Kinked(share, distance)
    other = copy.deepcopy(module)
    other.side = -1.0
    return replace(app_of("mlp"), module=module, recipe=RECIPES["sgd"]), other


@pytest.mark.parametrize("distance", [1e-7, 4e-7])
def test_a_gradient_that_depends_on_rounding_may_differ_as_in_torch_itself(distance: float) -> None:
    app, other = kinked_case(1e-3, distance)
    prepared, bundle = prepare(app), export_bundle(app)
    verify(replace(prepared, eager=other), bundle, open_runtime("onnx"), open_runtime("onnx", plain=True))


def test_even_a_gradient_that_depends_on_rounding_is_not_that_of_another_model() -> None:
    app, other = kinked_case(1.0)
    prepared, bundle = prepare(app), export_bundle(app)
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        verify(replace(prepared, eager=other), bundle, open_runtime("onnx"), open_runtime("onnx", plain=True))


@pytest.mark.nightly
def test_a_gradient_of_rounding_alone_passes() -> None:
    # The gradient of a bias before a batch norm is only rounding error, so there is nothing to compare.
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert export_bundle(replace(app_of("mlp"), module=module)).manifest.table.num_values > 0


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_a_wrong_loss_is_refused(loss: float) -> None:
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        check_loss(prepare(app_of("mlp")), "evaluation: loss", loss, (1.0, 1.0))


def test_values_that_are_no_numbers_are_refused() -> None:
    one = np.ones(2)
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        check_tensors(prepare(app_of("mlp")), "{}", {"x": Triple(actual=one * math.nan, expected=one, exact=one)}, list)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits * math.nan, "the int8 graph returned logits"),
        (lambda logits: -logits, "returns int8 logits that differ by"),
        (lambda logits: logits[:, :2], "the int8 graph returned logits"),
    ],
)
def test_wrong_int8_logits_are_refused(change: Callable[[Float32s], Float32s], message: str) -> None:
    prepared = prepare(app_of("mlp"))

    def logits(inputs: NamedInputs) -> Float32s:
        outputs: Float32s = prepared.eager(torch.from_numpy(inputs["x"])).detach().numpy()
        return outputs

    forwards = forwards_of(prepared)
    _check_int8(prepared, "runtime", (logits, logits), forwards)
    with pytest.raises(UnsupportedModel, match=message):
        _check_int8(prepared, "runtime", (lambda inputs: change(logits(inputs)), logits), forwards)


def forwards_of(prepared: Prepared) -> list[Forward]:
    return [(case.batch.inputs, tuple(case.twin.output.shape)) for case in cases_of(prepared)]


class Answers:
    """A runtime with a changed evaluation or preprocessing."""

    def __init__(self, runtime: Runtime, change: Callable[[BatchEvaluation], BatchEvaluation]) -> None:
        self._runtime, self._change = runtime, change

    def __getattr__(self, name: str) -> object:
        return getattr(self._runtime, name)

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        """Return the changed evaluation."""
        evaluate = self._runtime.open_evaluate(bundle)
        return lambda parameters, batch: self._change(evaluate(parameters, batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: replace(sums, loss_sum=2.0 * sums.loss_sum), "evaluation: loss of the exported graph differs"),
        (
            lambda sums: replace(sums, predicted=(sums.predicted + 1) % 4),
            "evaluation: predicted: . of 8 classes of the",
        ),
    ],
)
def test_a_wrong_evaluation_is_refused(change: Callable[[BatchEvaluation], BatchEvaluation], message: str) -> None:
    app, bundle = app_of("mlp"), bundle_of("mlp")
    runtime = open_runtime("onnx")
    with pytest.raises(UnsupportedModel, match=message):
        verify(prepare(app), bundle, Answers(runtime, change), runtime)


def test_an_evaluation_that_is_right_for_the_traced_batch_alone_is_refused() -> None:
    prepared, bundle, runtime = prepare(app_of("mlp")), bundle_of("mlp"), open_runtime("onnx")
    true_evaluation = runtime.open_evaluate(bundle)
    traced_x = next(cases_of(prepared)).batch.inputs["x"]

    def evaluate(parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
        sums = true_evaluation(parameters, batch)
        return sums if np.array_equal(batch.inputs["x"], traced_x) else replace(sums, loss_sum=2.0 * sums.loss_sum)

    error = "evaluation: loss for a batch that was not traced of the exported graph differs"
    with pytest.raises(UnsupportedModel, match=error):
        verify_training(prepared, bundle.manifest, runtime.open_train(bundle), evaluate, cases_of(prepared))


def test_int8_logits_that_are_right_for_the_traced_batch_alone_are_refused() -> None:
    prepared = prepare(app_of("mlp"))
    forwards = forwards_of(prepared)
    traced_x = forwards[0][0]["x"]

    def plain(inputs: NamedInputs) -> Float32s:
        logits: Float32s = prepared.eager(torch.from_numpy(inputs["x"])).detach().numpy()
        return logits

    def fused(inputs: NamedInputs) -> Float32s:
        x = inputs["x"]
        return plain(inputs) if np.array_equal(x, traced_x[: len(x)]) else -plain(inputs)

    with pytest.raises(UnsupportedModel, match="FN-0787"):
        _check_int8(prepared, "runtime", (fused, plain), forwards)


@pytest.mark.parametrize("term", ["proximal", "scaffold"])
def test_a_graph_without_a_term_of_the_recipe_is_refused(term: Literal["proximal", "scaffold"]) -> None:
    app = replace(app_of("mlp"), recipe=RECIPES["sgd"])
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        verify_traced(app, replace(app, recipe=replace(app.recipe, **{term: True})), ONNX)


class Halved(Sgd):
    """An error in a term: half of each setting."""

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return a step with half of each setting."""
        halves = {name: 0.5 * setting for name, setting in inputs.settings.items()}
        return Sgd.move(self, value, gradient, state, replace(inputs, settings=halves))


@pytest.mark.parametrize("name", ["momentum", "weight_decay"])
def test_a_wrong_term_of_a_setting_that_is_zero_is_refused(name: str) -> None:
    true, wrong = (
        replace(app_of("mlp"), recipe=Recipe(optimizer=kind(momentum=0.0, settable=(name,)))) for kind in (Sgd, Halved)
    )
    verify_traced(true, true, ONNX)
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        verify_traced(wrong, true, ONNX)


def test_wrong_running_statistics_are_refused() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    prepared = prepare(replace(app_of("mlp"), module=module, recipe=RECIPES["sgd"]))
    case, *_ = cases_of(prepared)
    start = _start(prepared, case, 0)
    parameters = eager_step(prepared, case.twin, start).parameters

    def check(factor: float) -> None:
        statistics = {name: factor * value.numpy() for name, value in case.twin.tracked.items()}
        next_state = TrainState(
            parameters=prepared.table.flatten({**parameters, **statistics}), optimizer=np.zeros(0, np.float32)
        )
        _check_step(prepared, {}, next_state, (case, start))

    check(1.0)
    with pytest.raises(UnsupportedModel, match=r"the next 2\.running_\S+ of module 2 \(BatchNorm1d\)"):
        check(1.01)


def test_a_small_tensor_may_differ_more_if_the_rounding_error_of_torch_is_unknown() -> None:
    def check(*, is_known: bool) -> None:
        rows = {"large": (1.0, 1.0), "small": (2e-6, 1e-6)}
        triples = {
            name: Triple(actual=np.array(actual), expected=np.array(value), exact=np.array(value) if is_known else None)
            for name, (actual, value) in rows.items()
        }
        check_tensors(prepare(app_of("mlp")), "{}", triples, list)

    check(is_known=False)
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        check(is_known=True)

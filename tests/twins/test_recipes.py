"""Recipes in an exported graph against eager torch: optimizers, BatchNorm, settings of a step, frozen weights.

The reference is in this file: autograd, ``torch.optim`` and torch's losses, without the padding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from support.models import BATCH_SIZE, NUM_CLASSES, Mlp, app_of, batches, export_bundle
from support.nightly import in_ci
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adagrad, Adam, Adapters, App, Recipe, RmsProp, Sgd, next_token, squared_error
from fanin.edge.export.module.prepare import MIN_FROZEN_VALUES, Prepared, prepare
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings, TrainState
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.tensors import Float32s

NUM_SAMPLES = 157
"""The samples of twenty batches of 8, the last of which has 5."""
TOLERANCE = 1e-5
NUM_TOKENS = 12
LENGTH = 6
RANK = 2


class BatchNormed(nn.Module):
    """BatchNorm on images and on features, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, dilation=2, padding=2),
            nn.BatchNorm2d(8, momentum=0.3).eval(),
            nn.ReLU(),
        )
        self.mix = nn.Linear(128, 16)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.tanh(self.norm(self.mix(self.body(x).flatten(1)))))


class Tokens(nn.Module):
    """An embedding, one block of causal attention, and the embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next tokens."""
        hidden = self.embed(x)
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        attention, _ = self.mix(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        return self.head(self.norm(hidden + attention))


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over each sample's positions with a token."""
    losses = functional.cross_entropy(logits.flatten(0, 1), y.long().flatten(), ignore_index=-1, reduction="none")
    return losses.reshape(y.shape).sum(dim=1) / (y >= 0).sum(dim=1).clamp(min=1)


def label_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy of each sample."""
    return functional.cross_entropy(logits, y.long(), reduction="none")


def value_loss(values: Tensor, y: Tensor) -> Tensor:
    """Return torch's squared error, averaged over each sample."""
    return functional.mse_loss(values, y, reduction="none").mean(dim=1)


@dataclass(frozen=True)
class Case:
    """A Recipe on a module, and torch's optimizer for it."""

    module: Callable[[], nn.Module] = Mlp
    recipe: Recipe = field(default_factory=Recipe)
    twin: Callable[[list[Tensor]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    rate: float = 0.05
    loss: Callable[[Tensor, Tensor], Tensor] = label_loss


CASES = {
    "nesterov": Case(
        recipe=Recipe(optimizer=Sgd(momentum=0.8, nesterov=True, weight_decay=0.01)),
        twin=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "adam": Case(
        recipe=Recipe(optimizer=Adam(weight_decay=0.01)),
        twin=lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01),
        rate=0.01,
    ),
    "adamw": Case(
        recipe=Recipe(optimizer=Adam(beta2=0.99, weight_decay=0.1, decoupled=True), clip_norm=0.5),
        twin=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
        rate=0.01,
    ),
    "rmsprop": Case(recipe=Recipe(optimizer=RmsProp()), twin=partial(torch.optim.RMSprop, lr=0.001), rate=0.001),
    "adagrad": Case(recipe=Recipe(optimizer=Adagrad()), twin=partial(torch.optim.Adagrad, lr=0.01), rate=0.01),
    "outside": Case(recipe=Recipe(proximal=True, clip_norm=0.8)),
    "scaffold": Case(
        recipe=Recipe(optimizer=Sgd(momentum=0.0), clip_norm=0.8, scaffold=True),
        twin=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    ),
    "batchnorm": Case(module=BatchNormed),
    "head": Case(module=BatchNormed, recipe=Recipe(trains="head")),
    "bias": Case(module=BatchNormed, recipe=Recipe(trains="bias")),
    "adapters": Case(module=BatchNormed, recipe=Recipe(trains=Adapters(rank=RANK, alpha=4.0))),
    "tokens": Case(module=Tokens, loss=token_loss),
    "values": Case(
        module=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)),
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
        twin=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        loss=value_loss,
    ),
}
FROZEN = ("head", "bias", "adapters")
DIVIDING = ("adam", "adamw", "rmsprop", "adagrad")


def app_for(name: str) -> App:
    """Return the case's App, always with the same initial parameters."""
    torch.manual_seed(11)
    case = CASES[name]
    app = replace(app_of("mlp"), name=name, module=case.module(), recipe=case.recipe)
    if case.loss is token_loss:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(NUM_TOKENS, (32, LENGTH), generator=generator, dtype=torch.int32)
        return replace(app, calibration=tokens, num_classes=NUM_TOKENS, loss=next_token)
    return replace(app, num_classes=0, loss=squared_error) if case.loss is value_loss else app


@cache
def bundle_for(name: str) -> Bundle:
    """Return the case's Bundle, exported once."""
    return export_bundle(app_for(name))


def batches_for(name: str) -> list[PaddedBatch]:
    """Return twenty batches for the case."""
    rng = np.random.default_rng(5)

    def adapt(batch: PaddedBatch) -> PaddedBatch:
        if CASES[name].loss is token_loss:
            x = rng.integers(0, NUM_TOKENS, (BATCH_SIZE, LENGTH + 1), np.int32)
            y = np.where(rng.random((BATCH_SIZE, LENGTH)) < 0.3, np.int32(-1), x[:, 1:])
            return replace(batch, inputs={"x": x[:, :-1].copy()}, y=y)
        if CASES[name].loss is value_loss:
            return replace(batch, y=rng.standard_normal((BATCH_SIZE, 3)).astype(np.float32))
        return batch

    return [adapt(batch) for batch in batches(NUM_SAMPLES, seed=7)]


def run_steps(name: str, settings: StepSettings | None = None) -> tuple[TrainState, list[float]]:
    """Run twenty steps of the exported graph. Return the state and the losses."""
    bundle = bundle_for(name)
    step = open_runtime("onnx").open_train(bundle)
    state, losses = step.begin(bundle.initial_parameters()), []
    for batch in batches_for(name):
        state, loss = step(state, batch, settings or StepSettings(learning_rate=CASES[name].rate))
        losses.append(loss)
    return state, losses


@dataclass
class EagerResult:
    """Results of eager torch after twenty steps, with the Bundle's names; ``norms`` are those before clipping."""

    values: dict[str, Float32s]
    states: dict[str, Float32s]
    losses: list[float]
    norms: list[float]


def eager(
    name: str, proximal: tuple[float, Mapping[str, Tensor]] | None = None, control: Mapping[str, Tensor] | None = None
) -> EagerResult:
    """Run the same twenty steps in torch, without the padding rows."""
    case, prepared = CASES[name], prepare(app_for(name))
    module = prepared.eager
    parameters = {key: value for key, value in module.named_parameters() if value.requires_grad}
    optimizer, losses, norms = case.twin(list(parameters.values())), [], []
    for batch in batches_for(name):
        num = int(batch.mask.sum())
        optimizer.zero_grad()
        loss = case.loss(module(torch.from_numpy(batch.inputs["x"][:num])), torch.from_numpy(batch.y[:num])).mean()
        losses.append(loss.item())
        if proximal is not None:
            weight, anchor = proximal
            loss = loss + 0.5 * weight * sum((parameters[key] - anchor[key]).square().sum() for key in parameters)
        loss.backward()
        if case.recipe.clip_norm:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), case.recipe.clip_norm)))
        for key, tensor in (control or {}).items():
            parameters[key].grad += tensor
        optimizer.step()
    buffers = dict(module.named_buffers())
    states = case.recipe.optimizer.states
    return EagerResult(
        values={key: (parameters.get(key, buffers.get(key))).detach().numpy() for key in prepared.parameters},
        states={
            state_port(kind, key): optimizer.state[value][torch_name].numpy()
            for kind, torch_name in states.items()
            for key, value in parameters.items()
        },
        losses=losses,
        norms=norms,
    )


def assert_alike(actual: Mapping[str, Float32s], expected: Mapping[str, Float32s], bound: float = TOLERANCE) -> None:
    """Check that the names are equal, and every value within ``bound * max(1, |value|)``."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = np.max(np.abs(actual[name] - value) / np.maximum(1.0, np.abs(value)), initial=0.0)
        assert error <= bound, f"{name}: {error:.1e}"


def parameters_of(name: str, state: TrainState) -> dict[str, Float32s]:
    return bundle_for(name).manifest.table.views(state.parameters)


def states_of(name: str, state: TrainState) -> dict[str, Float32s]:
    return optimizer_table(bundle_for(name).manifest).views(state.optimizer)


@pytest.mark.parametrize("name", in_ci((name for name in CASES if name not in DIVIDING), ("adapters",)))
def test_twenty_steps_end_where_eager_torch_ends(name: str) -> None:
    (state, losses), expected = run_steps(name), eager(name)
    assert_alike(parameters_of(name, state), expected.values)
    assert_alike(states_of(name, state), expected.states)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=1e-6)
    assert state.num_steps == 20
    assert np.abs(state.parameters - bundle_for(name).initial_parameters()).max() > 0.01


@pytest.mark.parametrize("name", in_ci(("outside", "adamw"), ("outside",)))
def test_some_gradients_are_clipped_and_some_are_not(name: str) -> None:
    norms = eager(name).norms
    assert max(norms) > CASES[name].recipe.clip_norm > min(norms)


@pytest.mark.parametrize("name", in_ci(DIVIDING, ("adam",)))
def test_an_optimizer_that_divides_has_torchs_losses_and_states(name: str) -> None:
    (state, losses), expected = run_steps(name), eager(name)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-4, atol=1e-6)
    actual = states_of(name, state)
    for kind in CASES[name].recipe.optimizer.states:
        names = [key for key in expected.states if key.startswith(f"{kind}.")]
        size = max(np.abs(expected.states[key]).max() for key in names)
        assert_alike(*({key: values[key] / size for key in names} for values in (actual, expected.states)), 1e-4)


def random_vectors(prepared: Prepared, seed: int, size: float) -> dict[str, Tensor]:
    """Return a random tensor for each trained parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {key: size * torch.randn(value.shape, generator=generator) for key, value in prepared.learned.items()}


def test_fedprox_pulls_towards_its_anchor() -> None:
    prepared = prepare(app_for("outside"))
    anchor = random_vectors(prepared, 1, 0.1)
    flat = prepared.table.flatten({key: value.numpy() for key, value in anchor.items()})
    state, losses = run_steps("outside", StepSettings(learning_rate=0.05, proximal_weight=0.7, anchor=flat))
    expected = eager("outside", proximal=(0.7, anchor))
    assert_alike(parameters_of("outside", state), expected.values)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=1e-6)
    free_state, _ = run_steps("outside")
    assert np.linalg.norm(state.parameters - flat) < 0.9 * np.linalg.norm(free_state.parameters - flat)


def test_the_default_anchor_is_the_start_of_the_step() -> None:
    free_state, _ = run_steps("outside")
    anchored_state, _ = run_steps("outside", StepSettings(learning_rate=0.05, proximal_weight=0.7))
    np.testing.assert_array_equal(free_state.parameters, anchored_state.parameters)


def test_scaffolds_control_is_added_to_the_clipped_gradient() -> None:
    control = random_vectors(prepare(app_for("scaffold")), 2, 0.1)
    table = bundle_for("scaffold").manifest.table
    flat = table.flatten({key: value.numpy() for key, value in control.items()})
    state, losses = run_steps("scaffold", StepSettings(learning_rate=0.05, control=flat))
    expected = eager("scaffold", control=control)
    assert_alike(parameters_of("scaffold", state), expected.values)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=1e-6)


def test_running_statistics_are_parameters_and_ignore_padding() -> None:
    bundle = bundle_for("batchnorm")
    statistics = {key for key in parameters_of("batchnorm", run_steps("batchnorm")[0]) if "running" in key}
    assert statistics == {f"{norm}.running_{kind}" for norm in ("body.1", "norm") for kind in ("mean", "var")}
    assert not any("running" in spec.name for spec in optimizer_table(bundle.manifest).specs)
    step = open_runtime("onnx").open_train(bundle)
    *_, short_batch = batches_for("batchnorm")
    inputs = {"x": np.where(short_batch.mask[:, None, None, None] > 0, short_batch.inputs["x"], np.float32(9.0))}
    noisy_batch = replace(short_batch, inputs=inputs)
    start, settings = step.begin(bundle.initial_parameters()), StepSettings(learning_rate=0.05)
    clean_state, noisy_state = (step(start, batch, settings)[0] for batch in (short_batch, noisy_batch))
    np.testing.assert_allclose(noisy_state.parameters, clean_state.parameters, rtol=0, atol=1e-6)
    # A batch of padding changes no value.
    state, loss = step(start, replace(short_batch, mask=np.zeros_like(short_batch.mask)), settings)
    assert loss == 0.0
    np.testing.assert_array_equal(state.parameters, start.parameters)


def initializers(name: str, signature: str) -> Iterator[TensorProto]:
    yield from onnx.load_from_string(bundle_for(name).graph(signature, "onnx")).graph.initializer


@pytest.mark.parametrize("signature", ["train", "evaluate"])
@pytest.mark.parametrize("name", in_ci(FROZEN, ("adapters",)))
def test_frozen_weights_are_int8_in_the_graph_and_nowhere_in_float(name: str, signature: str) -> None:
    frozen = prepare(app_for(name)).frozen
    assert frozen
    codes = [numpy_helper.to_array(row) for row in initializers(name, signature) if row.data_type == TensorProto.INT8]
    large_arrays = [array for array in codes if array.size >= MIN_FROZEN_VALUES]
    assert len(large_arrays) == len(frozen)
    for weight in frozen.values():
        assert any(
            array.shape == weight.codes.shape and (array == weight.codes.numpy()).all() for array in large_arrays
        )
    floats = [row for row in initializers(name, signature) if row.data_type != TensorProto.INT8]
    assert max(int(np.prod(row.dims)) for row in floats) < MIN_FROZEN_VALUES


def test_only_trained_parameters_are_traffic() -> None:
    sizes = {name: prepare(app_for(name)).table.num_values for name in (*FROZEN, "batchnorm")}
    convolutions = (RANK + 8 * RANK) - (RANK - 1) * 9 + (RANK * 8 + 8 * RANK)
    assert sizes == {
        "head": 16 * NUM_CLASSES + NUM_CLASSES,
        "bias": 8 + 8 + 8 + 16 + NUM_CLASSES,
        # The first convolution has one channel, and an adapter of rank 1.
        "adapters": convolutions + RANK * (128 + 16) + RANK * (16 + NUM_CLASSES),
        "batchnorm": sum(value.numel() for value in BatchNormed().parameters()) + 2 * 8 + 2 * 16,
    }
    for name in FROZEN:
        assert optimizer_table(bundle_for(name).manifest).num_values == sizes[name]


def test_positions_without_a_token_change_nothing() -> None:
    bundle = bundle_for("tokens")
    step, evaluate = open_runtime("onnx").open_train(bundle), open_runtime("onnx").open_evaluate(bundle)
    start, settings = step.begin(bundle.initial_parameters()), StepSettings(learning_rate=0.05)
    batch = batches_for("tokens")[0]
    silent_batch = replace(batch, y=np.full_like(batch.y, -1))
    state, loss = step(start, silent_batch, settings)
    assert loss == 0.0
    np.testing.assert_array_equal(state.parameters, start.parameters)
    assert evaluate(start.parameters, silent_batch).loss_sum == 0.0
    # With a target at the last position only, the step differs from that with targets at other positions too.
    last_targets = replace(silent_batch, y=np.where(np.arange(LENGTH) == LENGTH - 1, abs(batch.y), np.int32(-1)))
    all_targets = replace(batch, y=np.where(np.arange(LENGTH) == LENGTH - 1, abs(batch.y), batch.y))
    last_parameters, all_parameters = (
        step(start, targets, settings)[0].parameters for targets in (last_targets, all_targets)
    )
    assert not np.array_equal(last_parameters, all_parameters)
    assert evaluate(start.parameters, last_targets).predicted.shape == batch.y.shape


@pytest.mark.parametrize(
    "name", in_ci(("batchnorm", "adapters", "tokens", "values"), ("batchnorm", "adapters", "tokens"))
)
def test_evaluation_is_eager_torch_in_eval_mode(name: str) -> None:
    bundle, module = bundle_for(name), prepare(app_for(name)).eager.eval()
    evaluate = open_runtime("onnx").open_evaluate(bundle)
    for batch in batches_for(name)[-2:]:
        num = int(batch.mask.sum())
        with torch.no_grad():
            outputs = module(torch.from_numpy(batch.inputs["x"][:num]))
            losses = CASES[name].loss(outputs, torch.from_numpy(batch.y[:num]))
        evaluation = evaluate(bundle.initial_parameters(), batch)
        assert evaluation.loss_sum == pytest.approx(float(losses.sum()), rel=1e-5)
        if name == "values":
            np.testing.assert_allclose(evaluation.predicted[:num], outputs.numpy(), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(evaluation.predicted[:num], outputs.argmax(dim=-1).numpy())

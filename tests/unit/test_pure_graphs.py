"""A traced graph freezes values of its forward: random draws and counters that a step would change are refused."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, Loss, check_app, export, squared_error
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.refusals import Place, Untraceable
from fanin.edge.export.verification.cost import check_cost, constant_loss, untrained
from fanin.edge.export.verification.pure import check_samples
from fanin.edge.export.verification.ready import checked
from fanin.edge.runtimes.quality import Quality
from fanin.protos.errors import UnsupportedModel

KEY = SigningKey(bytes(32))
GENERATOR = np.random.default_rng(0)
NUM_CALLS = [0]
NUMBERS = itertools.count()

REFRESH = (
    "fanin export APP --out FOLDER --pretrain DATA, or let devices refresh the scales: "
    'int8.ranges = "devices" in the plan'
)


class Own(nn.Module):
    """A custom layer between two of torch's layers."""

    def __init__(self, function: "Callable[[Own, Tensor], Tensor]") -> None:
        super().__init__()
        self.function, self.num_calls, self.width = function, 0, 0
        self.generator, self.noise = random.Random(0), np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(self, x)


def counting(layer: Own, x: Tensor) -> Tensor:
    layer.num_calls += 1
    return x * layer.num_calls


def annealed(layer: Own, x: Tensor) -> Tensor:
    layer.num_calls += layer.training
    return x * (0.5 if layer.num_calls < 500 else 1.0)


def slightly_drawn(layer: Own, x: Tensor) -> Tensor:
    scale = 1e-6 * layer.generator.random()
    y = torch.relu(x)
    return x + scale * y


def shifted(layer: Own, x: Tensor) -> Tensor:
    layer.noise += 1e-9
    return x + float(layer.noise[0])


def cached(layer: Own, x: Tensor) -> Tensor:
    layer.width = x.shape[1]
    return x


def scaled_by(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


DOUBLED, HALVED = scaled_by(2.0), scaled_by(0.5)


def scaled_twice(layer: Own, x: Tensor) -> Tensor:
    """Both functions name a variable ``scale``, with another value each."""
    return HALVED(DOUBLED(x))


def jitter() -> float:
    return random.uniform(0.9, 1.1)


def drawn_elsewhere(layer: Own, x: Tensor) -> Tensor:
    scale = jitter() if layer.training else 1.0
    num = sum([1, 2, 3])
    return torch.relu(x) * scale * num


def counted_loss(logits: Tensor, y: Tensor) -> Tensor:
    NUM_CALLS[0] += 1
    return per_sample(logits, y) * (1.0 - 1e-6 * NUM_CALLS[0])


class CountedLoss:
    """A loss with a counter."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the losses of a batch."""
        self.num_calls += 1
        return per_sample(logits, y)


def noisy(layer: Own, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if layer.training else x


def app(function: Callable[[Own, Tensor], Tensor] = lambda _, x: x) -> App:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 6), Own(function), nn.Linear(6, 3))
    return App(name="pure", module=module, calibration=torch.rand(32, 10), batch_size=8, num_classes=3)


def per_sample(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def contrastive(logits: Tensor, y: Tensor) -> Tensor:
    return per_sample(logits @ logits.T, torch.arange(len(logits))) + 0.0 * y


def scaled(layer: Own, x: Tensor) -> Tensor:
    draw = random.random()
    return x * draw


def rarely(layer: Own, x: Tensor) -> Tensor:
    return x if random.random() < 2.0 else torch.relu(x)


def centered(layer: Own, x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x - mean


def centered_in_another_layout(layer: Own, x: Tensor) -> Tensor:
    halves = x.reshape(x.shape[0], 2, 3).transpose(0, 1).reshape(-1, 3)
    joined = halves.reshape(2, x.shape[0], 3).transpose(0, 1).reshape(-1, 6)
    return joined - x.mean()


def line_of(function: Callable[..., object], offset: int) -> str:
    return f"test_pure_graphs.py:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("function", "offset", "reason"),
    [
        (scaled, 1, "draws from Python's random, and the graph would keep"),
        (rarely, 1, "draws from Python's random"),
        (lambda _, x: x * np.random.rand(), 0, "draws from numpy.random"),
        (lambda _, x: x * GENERATOR.random(), 0, "draws from the variable GENERATOR"),
        (lambda _, x: x * next(NUMBERS), 0, "returns two results for one batch"),
        (counting, 1, "changes its attribute num_calls, and the graph would keep the first value for every step"),
        (annealed, 1, "changes its attribute num_calls"),
        (slightly_drawn, 1, "draws from its attribute generator"),
        (shifted, 1, "changes its attribute noise"),
        (centered, 1, "the output of a sample depends on the other samples of its batch, first in module 1 (Own)"),
    ],
    ids=["random", "branch", "numpy", "variable", "iterator", "counter", "rare", "generator", "array", "samples"],
)
def test_the_check_names_the_line_of_a_value_that_a_graph_would_keep(
    function: Callable[[Own, Tensor], Tensor], offset: int | None, reason: str
) -> None:
    (finding,) = check_app(app(function), ["onnx"])
    line = "" if offset is None else line_of(function, offset)
    assert (finding.module, finding.kind, finding.line, finding.graph_format) == ("1", "Own", line, "")
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("loss", "offset", "reason"),
    [
        (contrastive, 1, "the loss of a sample depends on the other samples of its batch, first at"),
        (lambda logits, y: per_sample(logits, y) * random.random(), 0, "draws from Python's random"),
        (counted_loss, 1, "changes the variable NUM_CALLS, and the graph would keep the first value"),
        (lambda logits, y: per_sample(logits, y).mean(), 0, "returned (), expected (8,): one loss for each sample"),
        (lambda logits, y: 1.0, 0, "returned float, expected (8,): one loss for each sample"),
    ],
    ids=["contrastive", "random", "counter", "mean", "number"],
)
def test_the_check_names_the_line_of_a_wrong_loss(
    loss: Callable[[Tensor, Tensor], Tensor], offset: int, reason: str
) -> None:
    (finding,) = check_app(replace(app(), loss=loss), ["onnx"])
    assert (finding.module, finding.line) == ("", line_of(loss, offset))
    assert reason in finding.reason


def test_the_check_names_the_line_of_a_function_that_draws() -> None:
    (finding,) = check_app(app(drawn_elsewhere), ["onnx"])
    assert (finding.module, finding.line) == ("1", line_of(jitter, 1))


def test_a_loss_with_a_counter_is_refused_with_the_remedy() -> None:
    (finding,) = check_app(replace(app(), loss=CountedLoss()), ["onnx"])
    assert finding.line == line_of(CountedLoss.__call__, 2)
    assert "changes its attribute num_calls" in finding.reason
    assert "warmup_steps" in finding.advice


def test_an_attribute_that_keeps_its_value_in_further_passes_is_no_hindrance() -> None:
    prepared = checked(app(cached), ["onnx"])
    assert isinstance(prepared.module[1], Own) and prepared.module[1].width == 6
    checked(app(scaled_twice), ["onnx"])


def test_another_layout_of_the_samples_is_not_at_fault() -> None:
    module, x = Own(centered_in_another_layout), torch.rand(8, 6)
    with pytest.raises(Untraceable) as excinfo:
        check_samples("the output", module, lambda rows: module(x[rows]), len(x))
    assert excinfo.value.place == Place(kind="Own", line=line_of(centered_in_another_layout, 3))


def test_an_export_fails_with_the_error_of_the_check_before_a_conversion(tmp_path: Path) -> None:
    impure = app(counting)
    (finding,) = check_app(impure, ["onnx"])
    with pytest.raises(UnsupportedModel) as excinfo:
        export(impure, tmp_path / "bundle", KEY, ["onnx"])
    assert str(excinfo.value) == f"{finding.reason}; {finding.advice}"
    assert not (tmp_path / "bundle").exists()


def test_an_error_of_the_tracer_says_more_than_a_value_that_a_graph_would_keep() -> None:
    (finding,) = check_app(app(lambda _, x: x - x.mean(0) if x.mean() > 0 else x), ["onnx"])
    assert "reads the value of a tensor, by bool()" in finding.reason


def test_the_check_refuses_targets_of_another_shape() -> None:
    x = torch.rand(4, 10)
    with pytest.raises(UnsupportedModel, match="FN-0734"):
        check_app(replace(app(), validation=(x, torch.zeros(4, 1, dtype=torch.int32))), ["onnx"])


def test_a_forgotten_number_of_classes_is_named(tmp_path: Path) -> None:
    forgetful = replace(app(), num_classes=0, loss=lambda logits, y: F.nll_loss(logits, y, reduction="none"))
    with pytest.raises(UnsupportedModel, match="FN-0778"):
        export(forgetful, tmp_path / "bundle", KEY, ["onnx"])


def test_a_wrong_number_of_classes_is_named_if_there_are_as_many_outputs_as_traced_samples() -> None:
    (finding,) = check_app(replace(app(), module=nn.Linear(10, 2)), ["onnx"])
    assert finding.reason.endswith("returned (2, 2), expected logits of shape (batch, 3)")
    assert finding.advice.startswith("set num_classes=2 in the App, or give the last layer 3 outputs; if these are")


def test_a_loss_that_fails_at_positions_without_a_label_names_ignore_index() -> None:
    def per_position(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.movedim(-1, 1), y, reduction="none").mean(1)

    sequences = replace(app(), module=nn.Linear(10, 3), calibration=torch.rand(32, 4, 10), loss=per_position)
    (finding,) = check_app(sequences, ["onnx"])
    assert "the loss fails at test_pure_graphs.py" in finding.reason
    assert "write ignore_index=-1 in F.cross_entropy" in finding.advice


def test_draws_of_torch_and_checks_of_its_distributions_are_no_hindrance(tmp_path: Path) -> None:
    def likelihood(output: Tensor, y: Tensor) -> Tensor:
        scale = F.softplus(output[:, 1]) + 0.1
        return -Normal(output[:, 0], scale).log_prob(output[:, 2]) + per_sample(output, y)

    # torch.compile turns the checks off for the rest of its process.
    torch.distributions.Distribution.set_default_validate_args(True)
    exported = export(replace(app(noisy), loss=likelihood), tmp_path / "bundle", KEY, ["onnx"])
    draws, unmeasured = exported.notes
    assert draws == "a device draws 192 bytes of random numbers for each train step"
    assert unmeasured.startswith("the cost of int8 is not measured; in onnx, int8 and float agree on ")
    assert exported.advice.endswith(REFRESH)
    assert torch.distributions.Distribution._validate_args


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("num_classes", [3, 0], ids=["classes", "values"])
def test_the_note_on_a_module_that_learnt_nothing_has_the_cost_of_int8(
    num_classes: int, is_trained: bool, tmp_path: Path
) -> None:
    trained = app() if num_classes else replace(app(), num_classes=0, loss=squared_error)
    x = trained.inputs["x"]
    with torch.no_grad():
        output = trained.module(x)
    y = (output if is_trained else output.flip(0)) if not num_classes else torch.arange(32) % 3
    y = output.argmax(1) if is_trained and num_classes else y
    exported = export(replace(trained, validation=(x, y)), tmp_path / "bundle", KEY, ["onnx"])
    quality = exported.measured["onnx"]
    cost = (
        f"{quality.drop_points:.2f} points of accuracy" if num_classes else f"{quality.rise_percent:.2f} % of the squ"
    )
    notes = [note for note in exported.notes if "it seems not to be trained; int8 now costs " + cost in note]
    assert len(notes) == (0 if is_trained else 1), exported.notes
    assert exported.advice.endswith(REFRESH) is not is_trained


def test_values_of_another_loss_are_compared_with_the_loss_of_a_constant() -> None:
    plain = app()
    values = replace(plain, num_classes=0, loss=likelihood, validation=(plain.inputs["x"], torch.ones(32, 3)))
    quality = Quality(num_examples=32, loss_sum=32.0, squares_float=10.0, squares_int8=10.0, squares_wanted=1.0)
    assert untrained(values, {"onnx": quality}, {}) == []
    assert untrained(values, {"onnx": replace(quality, loss_sum_constant=32.1)}, {}) == []
    measured = replace(quality, loss_sum_constant=31.0, loss_sum_int8=32.32)
    (note,) = untrained(values, {"onnx": measured}, {})
    assert note.startswith(
        "the module has a mean loss of 1.0000, and one output for all examples has 0.9688: it seems not to be trained; "
        "int8 now costs 0.0100 of the mean loss in onnx"
    )


def likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of logits whose targets are 0 and 1."""
    return F.binary_cross_entropy_with_logits(logits, y, reduction="none").sum(1)


def shares(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of shares: a step of a minimization may leave their range."""
    return F.binary_cross_entropy(output, y, reduction="none").sum(1)


def counts(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of logarithms of rates for counts."""
    return F.poisson_nll_loss(output, y.float(), reduction="none").sum(1)


@pytest.mark.parametrize("loss", [likelihood, shares, counts, squared_error])
def test_an_output_without_knowledge_is_not_better_than_a_constant(loss: Loss) -> None:
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(256, 3, generator=generator) < 0.3).float()
    untrained = torch.rand(256, 3, generator=generator) / 2 + 0.25
    trained = {likelihood: 8.0 * y - 4.0, counts: 4.0 * y - 3.5}.get(loss, 0.9 * y + 0.05)
    for output, is_better in ((untrained, False), (trained, True)):
        constant = constant_loss(loss, output.split(100), y.split(100))
        assert constant is not None
        assert (float(loss(output, y).sum()) < constant) is is_better


def test_a_loss_that_fails_for_a_constant_has_no_comparison() -> None:
    def failing(output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("no constant")

    for loss in (failing, lambda output, y: output.sum(1) * torch.nan, lambda output, y: torch.rand(len(y))):
        assert constant_loss(loss, [torch.ones(4, 2)], [torch.ones(4, 2)]) is None


def test_an_int8_that_costs_too_much_of_an_untrained_module_names_the_training() -> None:
    plain = app()
    values = replace(plain, num_classes=0, loss=squared_error, validation=(plain.inputs["x"], torch.rand(32, 3)))
    quality = Quality(num_examples=32, loss_sum=1.0, squares_float=10.0, squares_int8=20.0, squares_wanted=10.0)
    message = r"100\.00 % above float's .*; the module has a squared error of 10 .* to be trained; .* --pretrain DATA"
    with pytest.raises(UnsupportedModel, match=message):
        check_cost(prepare(values), "onnx", quality, None)


def test_a_module_in_evaluation_mode_is_noted(tmp_path: Path) -> None:
    plain = app()
    module = nn.Sequential(plain.module, nn.Dropout(0.5)).eval()
    exported = export(replace(plain, module=module), tmp_path / "bundle", KEY, ["onnx"])
    assert exported.notes[0] == (
        "the module is in evaluation mode, and its layers Dropout stay so while devices train; call .train() on it to "
        "change that"
    )

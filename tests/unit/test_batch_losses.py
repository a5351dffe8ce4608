"""A loss of a whole batch: the form that an App accepts, and what is refused with the words to write instead."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batch_losses import (
    BATCH_SIZE,
    CASES,
    Output,
    batch_loss_app,
    batch_loss_bundle,
    batches_of_views,
    masked_clip,
    masked_mean,
    masked_simclr,
    masked_vicreg,
    simclr,
    views_of,
)
from support.models import export_bundle
from torch import Tensor, nn
from torch.nn import functional

from fanin.clients.data.batching import batches_in_order
from fanin.datacenter.training.pretraining import Pretraining, pretrain
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, BatchLoss, Lengths, Recipe, Sgd, check_app
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.vectorized.runtime import TorchRuntime
from fanin.edge.export.verification.ready import checked
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.protos.errors import UnsupportedModel
from fanin.simulation import Partition, SimulationSettings, simulate

Masked = Callable[[Output, Tensor, Tensor], Tensor]


def app_of(loss: Masked) -> App:
    return replace(batch_loss_app("simclr"), loss=BatchLoss(loss))


@pytest.mark.parametrize("name", CASES)
def test_a_masked_form_of_real_rows_is_the_loss_of_its_package(name: str) -> None:
    case, data = CASES[name], views_of(BATCH_SIZE)
    with torch.no_grad():
        parts = batch_loss_app(name).module(*map(torch.from_numpy, data.inputs.values()))
    output, y = dict(zip("012", parts, strict=True)), torch.from_numpy(data.y.astype(np.int64))
    torch.testing.assert_close(case.masked(output, y, torch.ones(BATCH_SIZE)), case.plain(output, y))
    checked(batch_loss_app(name), ["onnx"])


def by_length(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    return (mask * functional.cross_entropy(output["0"], y, reduction="none")).sum() / len(y)


def without_mask(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    return simclr(output, y)


def leaking_gradient(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """The right value, and a gradient in all samples."""
    return masked_simclr(output, y, mask) + (output["0"] - output["0"].detach()).sum()


def padded_negatives(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """The mask of the anchors alone: padded samples are negatives of the real ones."""
    scores = output["0"] @ output["1"].T
    losses = functional.cross_entropy(scores, torch.arange(len(mask)), reduction="none")
    return (mask * losses).sum() / mask.sum()


def nearest_of_all(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    nearest = (output["0"] @ output["1"].T).amax(1)
    return (mask * nearest).sum() / mask.sum()


def anchored(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """The first sample of the batch is the anchor, whether it is real or not."""
    distances = (output["0"] - output["0"][:1]).square().sum(1)
    return (mask * distances).sum() / mask.sum()


def faint(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """A padded sample has a small share in an output with small gradients, beside another one with large ones."""
    return masked_simclr({"0": 1e-2 * output["0"], "1": 1e-2 * output["0"]}, y, mask) + output["1"].sum(1).mean() * 1e-3


LEAKING = (by_length, without_mask, leaking_gradient, padded_negatives, nearest_of_all, anchored, faint)


@pytest.mark.parametrize("loss", LEAKING)
def test_a_loss_that_counts_masked_samples_is_refused_with_its_line(loss: Masked) -> None:
    (finding,) = check_app(app_of(loss), ["onnx"])
    assert (finding.kind, finding.line) == ("loss", f"test_batch_losses.py:{loss.__code__.co_firstlineno}")
    assert "depends on the" in finding.reason
    assert "mask.sum()" in finding.advice
    with pytest.raises(UnsupportedModel, match="FN-0782"):
        checked(app_of(loss), ["onnx"])


def undefined_for_one(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    centred = mask[:, None] * (output["0"] - (mask[:, None] * output["0"]).sum(0) / mask.sum())
    return masked_mean(output, y, mask) + (centred.square().sum(0) / (mask.sum() - 1)).sum()


def root_of_nothing(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """The value for one sample is 0.0, and the gradient NaN."""
    centred = mask[:, None] * (output["0"] - (mask[:, None] * output["0"]).sum(0) / mask.sum())
    return centred.square().sum(0).sqrt().sum()


@pytest.mark.parametrize(("loss", "part"), [(undefined_for_one, "value"), (root_of_nothing, "gradient")])
def test_a_loss_that_one_sample_makes_undefined_is_refused(loss: Masked, part: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"its {part} is not finite for a batch with 1 real sample"):
        checked(app_of(loss), ["onnx"])


def test_a_loss_that_hides_padding_by_minus_infinity_is_refused_with_its_line() -> None:
    def hidden(output: Output, y: Tensor, mask: Tensor) -> Tensor:
        scores = (output["0"] @ output["1"].T).masked_fill(mask == 0, float("-inf"))
        return (mask * functional.cross_entropy(scores, torch.arange(len(mask)), reduction="none")).sum() / mask.sum()

    (finding,) = check_app(app_of(hidden), ["onnx"])
    assert (finding.kind, finding.line) == ("loss", f"test_batch_losses.py:{hidden.__code__.co_firstlineno}")
    assert "not by -inf" in finding.advice


def test_a_loss_of_each_sample_is_no_loss_of_the_batch() -> None:
    def of_samples(output: Output, y: Tensor, mask: Tensor) -> Tensor:
        return functional.cross_entropy(output["0"], y, reduction="none")

    with pytest.raises(UnsupportedModel, match=r"returned \(8,\), expected \(\): one number for the batch"):
        checked(app_of(of_samples), ["onnx"])


@pytest.mark.parametrize("function", [3, nn.CrossEntropyLoss, nn.CrossEntropyLoss(), lambda output, y: output])
def test_a_function_without_a_mask_is_refused(function: Masked) -> None:
    with pytest.raises(UnsupportedModel, match=r"expected a function of \(output, y, mask\)"):
        BatchLoss(function)


class ClipLoss(nn.Module):
    """A loss that is a module, as in open_clip."""

    def __init__(self, *, learns: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0), requires_grad=learns)

    def forward(self, output: Output, y: Tensor, mask: Tensor) -> Tensor:
        return self.factor * masked_clip(output, y, mask)


def test_a_module_and_a_partial_function_are_losses_of_a_batch() -> None:
    def scaled(output: Output, y: Tensor, mask: Tensor, factor: float) -> Tensor:
        return factor * masked_clip(output, y, mask)

    for loss in (ClipLoss(), partial(scaled, factor=2.0)):
        checked(app_of(loss), ["onnx"])
    with pytest.raises(UnsupportedModel, match="FN-0719"):
        app_of(ClipLoss(learns=True))


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (lambda output, y: functional.cross_entropy(output["0"], y), "FN-0778"),
        (simclr, "FN-0778"),
        (lambda output, y: functional.cross_entropy(output["0"] @ output["1"].T, y, reduction="none"), "FN-0780"),
    ],
    ids=["mean", "contrastive", "contrastive of each sample"],
)
def test_a_loss_that_must_be_declared_is_refused_with_both_ways(
    loss: Callable[[Output, Tensor], Tensor], code: str
) -> None:
    app = replace(batch_loss_app("mean"), loss=loss)
    with pytest.raises(UnsupportedModel, match=code) as excinfo:
        checked(app, ["onnx"])
    assert "loss=BatchLoss(function)" in str(excinfo.value)
    assert code == "FN-0780" or "reduction='none'" in str(excinfo.value)


class Compared(nn.Module):
    """A module whose forward compares the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.encoder(a) @ self.encoder(b).T


def test_scores_of_pairs_in_the_forward_are_refused_with_the_place_for_them() -> None:
    app = replace(
        batch_loss_app("mean"), module=Compared(), output="", loss=BatchLoss(lambda output, y, mask: output.mean())
    )
    with pytest.raises(UnsupportedModel, match=r"Compare samples in loss=BatchLoss\(function\)"):
        checked(app, ["onnx"])


def test_a_loss_that_draws_is_refused_as_a_draw() -> None:
    def noisy(output: Output, y: Tensor, mask: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(output["0"])
        return masked_clip({**output, "0": output["0"] + noise}, y, mask)

    with pytest.raises(UnsupportedModel, match="FN-0773"):
        checked(app_of(noisy), ["onnx"])


def test_personal_parameters_and_the_proximal_term_belong_to_the_loss_of_a_batch() -> None:
    recipe = Recipe(optimizer=Sgd(momentum=0.0), local=["log_scale"], proximal=True)
    bundle = export_bundle(replace(batch_loss_app("clip"), recipe=recipe))
    assert [spec.name for spec in bundle.manifest.local.table.specs] == ["log_scale"]  # type: ignore[union-attr]


def test_an_evaluation_depends_on_the_batches_of_the_examples() -> None:
    bundle, runtime = batch_loss_bundle("simclr", ("onnx",)), open_runtime("onnx")
    module, data, initial = batch_loss_app("simclr").module, views_of(12), bundle.initial_parameters()
    quality = measure(runtime, bundle, VersionValues(parameters=initial), batches_in_order(data, BATCH_SIZE))
    expected = 0.0
    for rows in (slice(8), slice(8, 12)):
        with torch.no_grad():
            parts = module(*(torch.from_numpy(each[rows]) for each in data.inputs.values()))
        num = len(data.y[rows])
        expected += num * simclr(dict(zip("012", parts, strict=True)), torch.zeros(num)).item()
    assert quality.loss_sum == pytest.approx(expected, rel=1e-5)


def test_the_export_measures_the_loss_and_a_float_file_is_checked_with_it() -> None:
    def spread(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return masked_vicreg({"0": output, "1": output + 0.1}, y, mask)

    data = views_of(64, seed=2)
    app = App(
        name="spread",
        module=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)),
        calibration=data.inputs["a"],
        batch_size=BATCH_SIZE,
        loss=BatchLoss(spread),
        targets=data.y,
        validation=(data.inputs["b"], data.y),
    )
    bundle = export_bundle(app)
    assert float_models(app, bundle, bundle.initial_parameters(), "onnx").keys() == {"infer"}


def clients_of(num: int) -> Partition:
    examples = views_of(sum(5 + 4 * client for client in range(num)), seed=4)
    starts = np.cumsum([0, *(5 + 4 * client for client in range(num))])
    return Partition(examples=examples, indices=[np.arange(*pair) for pair in itertools.pairwise(starts)])


def test_all_engines_train_the_clients_of_a_contrastive_federation_alike() -> None:
    results = [
        simulate(
            batch_loss_app("simclr"),
            clients_of(4),
            cohort=4,
            rounds=2,
            settings=SimulationSettings(
                engine=engine,
                plan={"training.learning_rate": 0.05, "training.epochs": 2, "codec.name": "fixed32"},
                quiet=True,
            ),
        )
        for engine in ("graph", "vmap")
    ]
    assert [result.engine for result in results] == ["graph", "vmap"]
    parameters = [result.parameters for result in results]
    np.testing.assert_allclose(*parameters, rtol=0, atol=1e-5)
    losses = [[row.train_loss for row in result.rounds[1:]] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_pretraining_minimizes_the_loss_of_a_batch(tmp_path: Path) -> None:
    lines: list[str] = []
    pretrain(batch_loss_app("clip"), views_of(40), Pretraining(epochs=8, learning_rate=0.05), lines.append)
    first, last = (float(line.rpartition(" ")[2]) for line in (lines[0], lines[-1]))
    assert last < 0.9 * first


def test_a_step_of_one_sample_of_a_contrastive_loss_moves_nothing() -> None:
    bundle = batch_loss_bundle("infonce", ("onnx",))
    step, (batch,) = open_runtime("onnx").open_train(bundle), [*batches_in_order(views_of(1), BATCH_SIZE)]
    initial = bundle.initial_parameters()
    state, loss = step(step.begin(initial), batch, StepSettings(learning_rate=1.0))
    assert loss == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(state.parameters, initial, rtol=0, atol=1e-6)


class Words(nn.Module):
    """An embedding of each sequence, without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        seen = (ids != 0).unsqueeze(-1).float()
        pooled: Tensor = (self.table(ids) * seen).sum(1) / seen.sum(1).clamp(min=1.0)
        return self.head(pooled)


def test_rows_of_several_lengths_are_compared_with_those_of_their_own() -> None:
    rng = np.random.default_rng(0)
    ids = np.where(np.arange(6) < rng.integers(1, 7, (32, 1)), rng.integers(1, 20, (32, 6)), 0).astype(np.int32)
    torch.manual_seed(0)
    app = App(
        name="words",
        module=Words(),
        calibration={"ids": ids},
        batch_size=4,
        loss=BatchLoss(lambda output, y, mask: masked_vicreg({"0": output, "1": 0.9 * output}, y, mask)),
        targets=np.zeros((32, 1), np.float32),
        lengths=Lengths(sizes=(3, 6), axes={"ids": 1}),
    )
    assert not checked(app, ["onnx"]).notes
    bundle = export_bundle(app)
    assert {"train", "train@3"} <= bundle.manifest.signatures.keys()


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_batches_have_a_loss_of_a_batch(size: int) -> None:
    bundle = export_bundle(replace(batch_loss_app("supervised"), batch_size=size))
    assert bundle.manifest.batch_size == size


def test_torch_trains_it_alone_as_the_graph_does(tmp_path: Path) -> None:
    app, bundle = batch_loss_app("clip"), batch_loss_bundle("clip", ("onnx",))
    alone = TorchRuntime(app)
    torch_bundle = alone.write(tmp_path / "bundle", SigningKey.generate())
    initial, settings = bundle.initial_parameters(), StepSettings(learning_rate=0.1)
    for batch in batches_of_views():
        pairs = ((open_runtime("onnx"), bundle), (alone, torch_bundle))
        steps = [(runtime.open_train(each), runtime.open_evaluate(each)) for runtime, each in pairs]
        (graph, loss), (torchs, torch_loss) = (step(step.begin(initial), batch, settings) for step, _ in steps)
        np.testing.assert_allclose(graph.parameters, torchs.parameters, rtol=0, atol=1e-6)
        assert loss == pytest.approx(torch_loss, rel=1e-5, abs=1e-6)
        sums = [evaluate(initial, batch).loss_sum for _, evaluate in steps]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5, abs=1e-6)

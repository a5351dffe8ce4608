"""Adapters of attention's projections: torch's attention with the summed weights predicts and learns the same."""

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adapters, App, Recipe, Sgd, cross_entropy
from fanin.edge.export.module.adapters import AdaptedAttention
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.verification.cost import calibration_batches
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings

SIZE, HEADS, LENGTH, BATCH_SIZE, NUM_CLASSES, STEPS, RATE = 8, 2, 5, 4, 3, 20, 0.1
TOLERANCE = 1e-5


def adapted_attention(**options: object) -> AdaptedAttention:
    """Return attention with nonzero adapters."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(SIZE, HEADS, **options)
    attention = AdaptedAttention(layer, Adapters(rank=2, alpha=3.0))
    with torch.no_grad():
        for value in attention.parameters():
            value.normal_(0.0, 0.4)
    return attention.eval()


def merged_attention(module: AdaptedAttention, **options: object) -> nn.MultiheadAttention:
    """Return torch's attention, with each weight and its adapter summed."""
    attention = nn.MultiheadAttention(SIZE, HEADS, **options).eval()
    attention.load_state_dict(module.frozen.state_dict())
    parts = [1.5 * part.up.weight @ part.down.weight for part in (module.query, module.key, module.value)]
    with torch.no_grad():
        if attention.in_proj_weight is not None:
            attention.in_proj_weight += torch.cat(parts)
        else:
            for weight, part in zip(
                (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight), parts, strict=True
            ):
                weight += part
        attention.out_proj.weight += 1.5 * module.out.up.weight @ module.out.down.weight
    return attention


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CASES = {
    "batch first": ({"batch_first": True}, {}),
    "length first": ({}, {}),
    "without biases": ({"batch_first": True, "bias": False}, {"need_weights": False}),
    "other widths": ({"batch_first": True, "kdim": 6, "vdim": 7}, {}),
    "causal": ({"batch_first": True}, {"attn_mask": CAUSAL, "need_weights": False}),
    "causal and told so": ({"batch_first": True}, {"attn_mask": CAUSAL, "need_weights": False, "is_causal": True}),
    "a mask a head": ({"batch_first": True}, {"attn_mask": CAUSAL.expand(3 * HEADS, LENGTH, LENGTH)}),
    "floats as a mask": ({"batch_first": True}, {"attn_mask": torch.randn(LENGTH, LENGTH)}),
    "padding": ({"batch_first": True}, {"key_padding_mask": PADDING}),
    "both": ({"batch_first": True}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "average_attn_weights": False}),
}


def inputs(options: dict[str, object]) -> list[Tensor]:
    """Return different random tensors for query, key and value."""
    rng = torch.Generator().manual_seed(1)
    widths = (SIZE, options.get("kdim", SIZE), options.get("vdim", SIZE))
    tensors = [torch.randn(3, LENGTH, width, generator=rng) for width in widths]
    return tensors if options.get("batch_first") else [part.transpose(0, 1) for part in tensors]


@pytest.mark.parametrize("name", CASES)
def test_the_outputs_are_those_of_torchs_own_attention(name: str) -> None:
    options, arguments = CASES[name]
    attention = adapted_attention(**options)
    outputs, expected = (
        module(*inputs(options), **arguments) for module in (attention, merged_attention(attention, **options))
    )
    torch.testing.assert_close(outputs[0], expected[0], rtol=0, atol=1e-5)
    assert (outputs[1] is None) == (expected[1] is None)
    if outputs[1] is not None:
        torch.testing.assert_close(outputs[1], expected[1], rtol=0, atol=1e-5)


def test_one_sample_without_a_batch_and_arguments_by_their_place() -> None:
    attention = adapted_attention()
    x = torch.randn(LENGTH, SIZE)
    outputs, expected = (module(x, x, x, None, True, CAUSAL) for module in (attention, merged_attention(attention)))
    for part, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("need_weights", in_ci([False, True], [True]))
def test_the_weights_are_dropped_while_it_trains_as_in_torchs_own_attention(need_weights: bool) -> None:
    options = {"batch_first": True, "dropout": 0.5}
    attention = adapted_attention(**options)
    x = torch.randn(1, LENGTH, SIZE)

    def means(module: nn.Module) -> Tensor:
        """The mean output of many passes, and of the weights of the last one the share that is dropped."""
        with torch.no_grad():
            torch.manual_seed(0)
            passes = [module(x, x, x, need_weights=need_weights, average_attn_weights=False) for _ in range(3000)]
        assert not torch.equal(passes[0][0], passes[1][0])
        if need_weights:
            assert 0.3 < float((passes[-1][1] == 0).float().mean()) < 0.7
        return torch.stack([output for output, _ in passes]).mean(0)

    ours, expected = means(attention.train()), means(merged_attention(attention, **options).train())
    torch.testing.assert_close(ours, expected, rtol=0, atol=0.1)
    attention.eval()
    assert torch.equal(*(attention(x, x, x, need_weights=need_weights)[0] for _ in range(2)))


def test_torchs_encoder_layer_does_not_bypass_the_adapters() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 16, dropout=0.0, batch_first=True).eval()
    module = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))
    app = App(
        name="encoder",
        module=module,
        calibration=torch.randn(8, LENGTH, SIZE),
        batch_size=BATCH_SIZE,
        num_classes=3,
        recipe=Recipe(trains=Adapters(rank=2)),
    )
    eager = prepare(app).eager.eval()
    x = app.inputs["x"]
    with torch.no_grad():
        before = eager(x)
        eager[0].layers[0].self_attn.out.up.weight[0] += 1.0
        assert not torch.allclose(eager(x), before, atol=1e-3)


class AttentionModel(nn.Module):
    """Causal attention with a residual, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.head = nn.Linear(SIZE, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        mixed, _ = self.mix(x, x, x, attn_mask=CAUSAL, need_weights=False)
        return self.head((x + mixed).mean(1))


@cache
def app() -> App:
    """The App ``Attending``, which trains adapters."""
    torch.manual_seed(0)
    return App(
        name="attending",
        module=AttentionModel(),
        calibration=torch.randn(16, LENGTH, SIZE),
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        loss=cross_entropy,
        recipe=Recipe(optimizer=Sgd(momentum=0.9), trains=Adapters(rank=2)),
    )


@cache
def bundle() -> Bundle:
    """The App's Bundle in both formats."""
    return export_bundle(app(), ("onnx", "tflite"))


@pytest.mark.nightly
@pytest.mark.parametrize("runtime", ["onnx", "litert"])
def test_twenty_steps_end_where_torch_ends_with_the_same_adapters(runtime: str) -> None:
    prepared = prepare(app())
    step = open_runtime(runtime).open_train(bundle())
    state = step.begin(bundle().initial_parameters())
    module = prepared.eager
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    assert {"mix.query.up.weight", "mix.out.down.weight", "head.up.weight"} <= set(parameters)
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=0.9)
    rng = np.random.default_rng(0)
    first = next(calibration_batches(prepared))
    for _ in range(STEPS):
        x = rng.standard_normal((BATCH_SIZE, LENGTH, SIZE)).astype(np.float32)
        y = rng.integers(0, NUM_CLASSES, BATCH_SIZE).astype(np.int32)
        state, loss = step(state, replace(first, inputs={"x": x}, y=y), StepSettings(learning_rate=RATE))
        optimizer.zero_grad()
        expected = cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y).long()).mean()
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    initial_values = bundle().manifest.table.views(bundle().initial_parameters())
    for name, value in bundle().manifest.table.views(state.parameters).items():
        np.testing.assert_allclose(value, parameters[name].detach().numpy(), rtol=0, atol=TOLERANCE)
        assert np.abs(value - initial_values[name]).max() > 10 * TOLERANCE, name


@pytest.mark.nightly
def test_the_frozen_projections_are_int8_products_in_the_infer_graph() -> None:
    model = onnx.load_from_string(bundle().graph("infer", "onnx"))
    codes = {int(np.prod(value.dims)) for value in model.graph.initializer if value.data_type == onnx.TensorProto.INT8}
    assert {3 * SIZE * SIZE, SIZE * SIZE} <= codes

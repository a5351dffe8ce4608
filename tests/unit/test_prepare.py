"""``edge.export.prepare``: trained parameters, parameters that are frozen to int8, and the messages about both."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.models import app_of
from torch import Tensor, nn

from fanin.edge.bundles.quantize import weight_codes, weight_scales
from fanin.edge.export import Adapters, App, Recipe, Sgd
from fanin.edge.export.app.optimizers.recipe import Trains
from fanin.edge.export.module.adapters import AdaptedConv2d, AdaptedLinear
from fanin.edge.export.module.places import call_with
from fanin.edge.export.module.prepare import MIN_FROZEN_VALUES, Prepared, prepare
from fanin.protos.errors import UnsupportedModel

WIDE = 16


def prepared_of(module: nn.Module, trains: Trains = "full") -> Prepared:
    """Prepare the module as an App on 8x8 images."""
    return prepare(replace(app_of("mlp"), module=module, recipe=Recipe(trains=trains)))


def plain(*layers: nn.Module) -> nn.Module:
    """Return the layers between a first and a last layer of width ``WIDE``."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), *layers, nn.Linear(WIDE, 4))


def rounded(weight: Tensor, axis: int = 0) -> Tensor:
    """Return the weight, rounded to its int8 codes."""
    values = weight.detach().numpy()
    scales = weight_scales(values, axis)
    column = scales.reshape([-1 if dim == axis else 1 for dim in range(values.ndim)])
    return torch.from_numpy(weight_codes(values, axis, scales).astype(np.float32) * column)


def test_full_is_all_that_requires_a_gradient_and_the_app_stays_as_it_is() -> None:
    module = plain(nn.ReLU())
    module[1].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    prepared = prepared_of(module)
    assert list(prepared.learned) == list(prepared.parameters) == ["1.bias", "3.bias", "3.weight"]
    assert not prepared.frozen
    assert not prepared.tracked
    assert [spec.name for spec in prepared.table.specs] == list(prepared.parameters)
    torch.testing.assert_close(prepared.eager[1].weight, before["1.weight"], rtol=0, atol=0)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_head_is_the_last_layer() -> None:
    module = plain(nn.Linear(WIDE, WIDE))
    prepared = prepared_of(module, "head")
    assert list(prepared.learned) == ["3.bias", "3.weight"]
    assert set(prepared.frozen) == {"1.weight", "2.weight"}
    assert torch.equal(prepared.eager[3].weight, module[3].weight)
    note = f"head: module 3 (Linear {module[3].in_features} -> {module[3].out_features}), the last layer registered, "
    assert prepared.notes == (f"{note}is all that learns",)


def test_the_head_of_a_module_that_is_one_layer_is_all_of_it() -> None:
    app = App(name="one", module=nn.Linear(8, 4), calibration=torch.randn(4, 8), batch_size=2, num_classes=4)
    assert list(prepare(replace(app, recipe=Recipe(trains="head"))).learned) == ["bias", "weight"]


def test_a_head_that_shares_its_weight_has_the_name_of_the_first_layer() -> None:
    module = nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 32, bias=False))
    module[3].weight = module[0].weight
    tokens = torch.arange(4, dtype=torch.int32).reshape(4, 1)
    app = App(name="tied", module=module, calibration=tokens, batch_size=2, num_classes=32)
    assert list(prepare(replace(app, recipe=Recipe(trains="head"))).learned) == ["0.weight"]


def test_biases_have_that_name_in_recurrent_layers_and_attention_too() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8), nn.MultiheadAttention(8, 2), nn.LayerNorm(8))
    assert set(prepared_of(module, "bias").learned) == {
        *("0.bias", "1.bias_ih_l0", "1.bias_hh_l0", "2.in_proj_bias", "2.out_proj.bias", "3.bias")
    }


def test_frozen_weights_are_rounded_as_slots_are() -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 4))
    prepared = prepared_of(module, "head")
    assert {name: frozen.axis for name, frozen in prepared.frozen.items()} == {"0.weight": 0, "1.weight": 1}
    for name, frozen in prepared.frozen.items():
        layer = module[int(name[0])]
        scales = weight_scales(layer.weight.detach().numpy(), frozen.axis)
        np.testing.assert_array_equal(frozen.scales.numpy(), scales)
        np.testing.assert_array_equal(
            frozen.codes.numpy(), weight_codes(layer.weight.detach().numpy(), frozen.axis, scales)
        )
        assert frozen.codes.dtype == torch.int8
        for twin in (prepared.eager, prepared.module):
            assert torch.equal(twin.get_parameter(name), rounded(layer.weight, frozen.axis))


@given(
    weight=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 6)),
        elements=st.floats(-1e4, 1e4, width=32).map(lambda value: 0.0 if abs(value) < 1e-6 else value),
    ),
    axis=st.integers(0, 1),
)
def test_rounding_again_changes_no_bit(weight: np.ndarray, axis: int) -> None:
    once = rounded(torch.from_numpy(weight), axis)
    assert torch.equal(rounded(once, axis), once)
    first, second = (weight_scales(values, axis) for values in (weight, once.numpy()))
    np.testing.assert_array_equal(weight_codes(weight, axis, first), weight_codes(once.numpy(), axis, second))


def test_small_and_flat_parameters_stay_float() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), nn.Linear(WIDE, 2), nn.LayerNorm(2), nn.Linear(2, 4))
    assert module[2].weight.numel() < MIN_FROZEN_VALUES
    assert set(prepared_of(module, "head").frozen) == {"1.weight"}


def test_a_weight_of_two_layers_is_one_constant() -> None:
    module = plain(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    module[3].weight = module[2].weight
    prepared = prepared_of(module, "head")
    assert set(prepared.frozen) == {"1.weight", "2.weight"}
    for twin in (prepared.eager, prepared.module):
        assert twin[3].weight is twin[2].weight
    # Both layers receive one value, and the module keeps its own values.
    double = {"2.weight": 2.0 * prepared.module[2].weight.detach()}
    x = torch.randn(3, 1, 8, 8)
    expected = call_with(prepared.module, double, (x,))
    assert not torch.equal(prepared.module(x), expected)
    with torch.no_grad():
        prepared.module[2].weight.mul_(2.0)
    torch.testing.assert_close(prepared.module(x), expected)


def test_a_layer_with_two_places_keeps_its_values() -> None:
    layer, x = nn.Linear(WIDE, WIDE), torch.randn(3, WIDE)
    before = layer.weight
    twice = nn.Sequential(layer, nn.Sequential(layer))
    output = call_with(twice, {"0.weight": torch.eye(WIDE), "0.bias": torch.ones(WIDE)}, (x,))
    torch.testing.assert_close(output, x + 2.0)
    assert layer.weight is before


ADAPTED = {
    "same": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "valid": lambda: nn.Conv2d(8, 8, 3),
    "strided": lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1),
    "dilated": lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "wide": lambda: nn.Conv2d(8, 8, (5, 1), stride=(1, 2), padding=(0, 3)),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1),
    "pointwise": lambda: nn.Conv2d(8, 8, 1, stride=2),
    "named": lambda: nn.Conv2d(8, 8, 3, padding="same", dilation=2),
    "unpadded": lambda: nn.Conv2d(8, 8, 3, padding="valid"),
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_convolutions_adapter_sees_the_middle_of_each_window(kind: str) -> None:
    torch.manual_seed(0)
    layer = ADAPTED[kind]()
    adapted = AdaptedConv2d(layer, Adapters(rank=2, alpha=3.0), "0")
    x = torch.randn(2, 8, 9, 10)
    torch.testing.assert_close(adapted(x), layer(x))
    with torch.no_grad():
        adapted.up.weight.normal_()
    # The adapter is a convolution of the layer's form. Its kernel is zero except in the middle.
    merged = nn.Conv2d(
        *(8, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation), bias=False
    )
    product = torch.einsum("or,ri->oi", adapted.up.weight[..., 0, 0], adapted.down.weight[..., 0, 0])
    with torch.no_grad():
        merged.weight.zero_()
        merged.weight[..., layer.kernel_size[0] // 2, layer.kernel_size[1] // 2] = 1.5 * product
    torch.testing.assert_close(adapted(x) - layer(x), merged(x), rtol=1e-4, atol=1e-5)


def test_a_linear_layers_adapter_is_a_product_of_low_rank() -> None:
    layer = nn.Linear(6, 5)
    adapted = AdaptedLinear(layer, Adapters(rank=2, alpha=1.0))
    x = torch.randn(3, 6)
    assert torch.equal(adapted(x), layer(x))
    with torch.no_grad():
        adapted.up.weight.normal_()
    expected = layer(x) + 0.5 * x @ (adapted.up.weight @ adapted.down.weight).T
    torch.testing.assert_close(adapted(x), expected)
    # Reading the layer's weight returns the sum of the weight and the adapter.
    torch.testing.assert_close(nn.functional.linear(x, adapted.weight, adapted.bias), expected)


def test_only_adapters_learn_and_the_first_version_has_the_same_outputs() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, WIDE),
        nn.Linear(WIDE, 4),
    )
    prepared = prepared_of(module, Adapters(rank=3))
    shapes = {name: tuple(value.shape) for name, value in prepared.learned.items()}
    assert shapes == {
        # The rank is at most the layer's own.
        "0.down.weight": (1, 1, 1, 1),
        "0.up.weight": (8, 1, 1, 1),
        "4.down.weight": (3, 512),
        "4.up.weight": (WIDE, 3),
        "5.down.weight": (3, WIDE),
        "5.up.weight": (4, 3),
    }
    assert set(prepared.frozen) == {"0.frozen.weight", "4.frozen.weight", "5.frozen.weight"}
    frozen = prepared_of(module, "bias").eager
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(prepared.eager.eval()(x), frozen.eval()(x))
    repeat = prepared_of(module, Adapters(rank=3)).learned
    assert all(torch.equal(value, repeat[name]) for name, value in prepared.learned.items())


def test_adapters_cover_attention_and_leave_a_shared_layer_shared() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
            self.first = nn.Linear(8, 8)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            x = self.again(self.first(x.flatten(1).reshape(-1, 8, 8)))
            return self.mix(x, x, x, need_weights=False)[0].mean(1)

    prepared = prepared_of(Mixed(), Adapters(rank=2))
    projections = [f"mix.{name}.{leaf}.weight" for name in ("key", "out", "query", "value") for leaf in ("down", "up")]
    assert list(prepared.learned) == ["first.down.weight", "first.up.weight", *projections]
    assert prepared.eager.again is prepared.eager.first
    assert prepared.eager(torch.randn(2, 1, 8, 8)).shape == (2, 8)
    assert {"mix.frozen.in_proj_weight", "mix.frozen.out_proj.weight"} <= set(prepared.frozen)


def test_attention_with_more_than_projections_is_left_alone() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        module = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, **options))
        assert list(prepared_of(module, Adapters(rank=2)).learned) == ["0.down.weight", "0.up.weight"]


def test_a_frozen_backbone_keeps_its_statistics_and_is_noted() -> None:
    module = plain(nn.BatchNorm1d(WIDE), nn.BatchNorm1d(WIDE).eval())
    full, head = prepared_of(module), prepared_of(module, "head")
    assert list(full.tracked) == ["2.running_mean", "2.running_var"]
    assert set(full.parameters) == {*full.learned, *full.tracked}
    assert full.eager[2].training
    assert not full.notes
    assert not head.tracked
    assert not head.eager[2].training
    (_, note) = head.notes
    assert note == "module 2 (BatchNorm1d) keeps its running statistics: they are only updated with trains 'full'"


def test_each_parameter_has_its_factor_of_the_learning_rate() -> None:
    app = replace(app_of("mlp"), recipe=Recipe(rates={"1.*": 0.5, "3.bias": 2}))
    assert prepare(app).rates == {"1.bias": 0.5, "1.weight": 0.5, "3.bias": 2.0, "3.weight": 1.0}


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (
            {"head.*": 2.0},
            r"rates: the pattern 'head.*' matches no parameter that learns, expected .* of .'1.bias', '1.w",
        ),
        (
            {"1.*": 2.0, "*.bias": 3.0},
            r"the patterns '1.*' and '\*.bias' match the parameter 1.bias, expected one; make",
        ),
        (
            {"1.*": 0.0},
            r"recipe: rates: got 0.0 for '1.*', expected a positive number; freeze a parameter by requires_g",
        ),
        ({"1.*": "2"}, r"recipe: rates: got '2' for '1.*', expected a positive number"),
    ],
)
def test_wrong_factors_of_the_learning_rate_are_refused(rates: dict[str, float], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        prepare(replace(app_of("mlp"), recipe=Recipe(rates=rates)))


def test_scaffold_needs_one_learning_rate() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0751"):
        Recipe(optimizer=Sgd(momentum=0.0), scaffold=True, rates={"1.*": 2.0})


def lazy() -> nn.Module:
    """Return a lazy layer that has not seen an input."""
    return nn.Sequential(nn.LazyLinear(4))


def with_parameter(value: Tensor) -> nn.Module:
    module = plain()
    module.get_submodule("1").register_parameter("extra", nn.Parameter(value, requires_grad=False))
    return module


def with_nan() -> nn.Module:
    """Return layers with a NaN weight, as after a divergence."""
    module = plain()
    with torch.no_grad():
        module[1].weight[0, 0] = torch.nan
    return module


class OfBuffers(nn.Module):
    """A layer whose weight is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 64))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4)."""
        return nn.functional.linear(x.flatten(1), self.get_buffer("weight"))


@pytest.mark.parametrize(
    ("make", "trains", "message"),
    [
        (
            lambda: plain().double(),
            "full",
            r"parameter 1.weight is torch.float64, expected torch.float32; call module.f",
        ),
        (
            lambda: with_parameter(torch.ones(3, dtype=torch.complex64)),
            "full",
            r"parameter 1.extra is torch.complex64, expected torch.float32; keep a complex number as two real ones",
        ),
        (
            lambda: with_parameter(torch.ones(3, dtype=torch.int64)),
            "full",
            r"parameter 1.extra is torch.int64, expected torch.float32; .* whole numbers in a buffer",
        ),
        (lambda: plain().to("meta"), "full", r"parameter 1.weight is on meta, expected cpu; load its values"),
        (with_nan, "full", "parameter 1.weight holds NaN or infinity, expected finite values"),
        (lazy, "full", "parameter 0.weight has no shape yet, expected one; call the module once on an example"),
        (
            lambda: plain().requires_grad_(False),
            "full",
            r"no parameter requires a gradient \(trains: 'full'\), expected",
        ),
        (
            lambda: plain().requires_grad_(False),
            "head",
            r"no parameter requires a gradient \(trains: 'head'\), expected",
        ),
        (lambda: nn.Sequential(nn.Linear(64, 4, bias=False)), "bias", r"no parameter requires .*\(trains: 'bias'\)"),
        (OfBuffers, "full", r"module has no parameters \(its buffers: weight\), expected at least one to train; add a"),
        (nn.Flatten, "bias", r"the module has no parameters \(its buffers: none\), expected at least one"),
        (
            lambda: nn.Linear(64, 4),
            Adapters(rank=2),
            "adapters: got a module without linear layers, 2-D conv.* inside",
        ),
        (lambda: nn.Sequential(nn.LayerNorm(8)), Adapters(rank=2), "let 'head' or 'bias' train instead"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, (3, 2))),
            Adapters(rank=2),
            r"adapters: module 1 \(Conv2d\) has kernel size \(3, 2\), expected an odd one, whose windows have a middle",
        ),
    ],
)
def test_a_module_that_cannot_be_prepared_is_refused(
    make: Callable[[], nn.Module], trains: Trains, message: str
) -> None:
    module = make()
    with pytest.raises(UnsupportedModel, match=message):
        prepared_of(module, trains)


def test_an_even_kernel_with_padding_on_one_side_more_is_fine() -> None:
    layer = nn.Conv2d(4, 4, 2, padding="same")
    x = torch.randn(1, 4, 5, 5)
    with warnings.catch_warnings():
        # Once a process, torch warns that this padding needs a copy.
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")
        torch.testing.assert_close(AdaptedConv2d(layer, Adapters(rank=2), "0")(x), layer(x))

"""fanin's backward decompositions, compared with torch's kernels in float64."""

import inspect
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.convolutions import Convolution, convolutions
from torch import Tensor

from fanin.edge.export.app.decompositions import PLAIN_NAMES
from fanin.edge.export.graph.decompositions.convolution.bands import bands_of
from fanin.edge.export.graph.decompositions.convolution.form import ConvForm
from fanin.edge.export.graph.decompositions.convolution.layouts import BlockLayout, Images
from fanin.edge.export.graph.decompositions.convolution.products import MAX_GATHERED, Convolutions
from fanin.edge.export.graph.decompositions.norms import group_norm, group_norm_backward
from fanin.edge.export.graph.decompositions.pooling.max_backward import max_pool2d_backward
from fanin.edge.export.graph.decompositions.resampling import table
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE, Forms

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("forms", [ONNX, TFLITE], ids=lambda forms: forms.graph_format)
def test_a_form_has_the_arguments_of_its_operator(forms: Forms) -> None:
    num_forms, variadic = 0, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for operator, form in {**forms.for_training(), **forms.for_inference()}.items():
        function = form.func if isinstance(form, partial) else form
        if not str(getattr(function, "__module__", type(function).__module__)).startswith("fanin"):
            continue
        rows = inspect.signature(form).parameters.values()
        assert not [row for row in rows if row.kind in variadic], operator
        parameters = [PLAIN_NAMES.get(row.name, row.name) for row in rows if row.kind is not row.KEYWORD_ONLY]
        schema = operator._schema.arguments
        expected = [PLAIN_NAMES.get(argument.name, argument.name) for argument in schema if not argument.kwarg_only]
        # One form computes the 1-D and the 2-D operator, so it may have more arguments than the 1-D operator.
        assert parameters[: len(expected)] == expected, operator
        keywords = {row.name for row in rows if row.kind is row.KEYWORD_ONLY}
        assert keywords >= {argument.name for argument in schema if argument.kwarg_only}, operator
        num_forms += 1
    assert num_forms > 20


@given(case=convolutions())
def test_gradients_of_a_convolution(case: Convolution) -> None:
    x, weight, *form = case
    y = aten.convolution(x, weight, None, *form)
    dy = torch.randn_like(y)
    arguments = (dy, x, weight, [y.shape[1]], *form, [True, True, True])
    gradients = Convolutions(Images()).backward(*arguments)
    for gradient, expected in zip(gradients, aten.convolution_backward(*arguments), strict=True):
        torch.testing.assert_close(gradient, expected, **CLOSE)


@given(case=convolutions())
def test_a_convolution_in_another_form_has_the_same_result(case: Convolution) -> None:
    x, weight, *form = case
    bias = torch.randn(weight.shape[1] * form[-1] if form[3] else len(weight), dtype=torch.float64)
    result = Convolutions(Images()).forward(x, weight, bias, *form)
    if result is not NotImplemented:
        torch.testing.assert_close(result, aten.convolution(x, weight, bias, *form), **CLOSE)


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0.0)


def negative(x: Tensor) -> Tensor:
    return -x


@given(size=st.tuples(st.integers(3, 13), st.integers(3, 12)), stride=st.integers(1, 2), num_outputs=st.integers(1, 4))
def test_a_product_uses_the_layout_of_a_depthwise_convolution(
    size: tuple[int, int], stride: int, num_outputs: int
) -> None:
    depthwise = ([stride, stride], [1, 1], [1, 1], False, [0, 0], 3)
    pointwise = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    kernel, weight = (
        torch.randn(3, 1, 3, 3, dtype=torch.float64),
        torch.randn(num_outputs, 3, 1, 1, dtype=torch.float64),
    )
    images = Images()
    forms = Convolutions(images)
    hidden = images.positionwise(relu)(forms.forward(x, kernel, None, *depthwise))
    reference = torch.relu(aten.convolution(x, kernel, None, *depthwise))
    torch.testing.assert_close(hidden, reference, **CLOSE)
    y = forms.forward(hidden, weight, torch.ones(num_outputs), *pointwise)
    if images.layout(hidden) is None:  # rows of uneven length: the padding would not stay zero
        assert y is NotImplemented
        return
    torch.testing.assert_close(
        y, aten.convolution(reference, weight, torch.ones(num_outputs).double(), *pointwise), **CLOSE
    )
    dy = images.positionwise(negative)(y)
    arguments = ([num_outputs], *pointwise, [True, True, True])
    expected = aten.convolution_backward(-y, reference, weight, *arguments)
    for gradient, expected_gradient in zip(forms.backward(dy, hidden, weight, *arguments), expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, **CLOSE)


def test_a_large_image_is_gathered_in_parts() -> None:
    x, weight = torch.randn(1, 8, 256, 256), torch.randn(2, 8, 3, 3)
    assert x.numel() * 9 > MAX_GATHERED
    form = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    arguments = (torch.randn(1, 2, 256, 256), x, weight, None, *form, [False, True, False])
    gradient = Convolutions(Images()).backward(*arguments)[1]
    torch.testing.assert_close(gradient, aten.convolution_backward(*arguments)[1], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("channels", "size", "has_bands"), [(64, (25, 5), True), (8, (48, 48), False), (1, (5, 5), False)]
)
def test_narrow_depthwise_convolutions_are_computed_as_bands(
    channels: int, size: tuple[int, int], has_bands: bool
) -> None:
    form = ConvForm(stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=channels)
    assert (bands_of(form, (2, channels, *size), (channels, 1, 3, 3)) is not None) == has_bands


@given(height=st.integers(1, 7), width=st.integers(1, 3), num=st.integers(1, 4), step=st.integers(1, 4))
def test_a_layout_restores_its_image(height: int, width: int, num: int, step: int) -> None:
    layout = BlockLayout(size=(height, width), num=max(num, -(-height // step)), step=step)
    image = torch.randn(2, 3, height, width)
    values = layout.values(image)
    assert values.shape == (3, step * width, layout.num * 2)
    torch.testing.assert_close(layout.images(values), image, rtol=0, atol=0)


def test_an_image_is_known_until_it_is_written_to() -> None:
    layout, images = BlockLayout(size=(4, 2), num=2, step=2), Images()
    values = torch.randn(3, 4, 2 * 5)
    image = images.image(values, layout)
    assert images.layout(image) == layout
    assert images.values(image, layout) is values
    image += 1.0
    assert images.layout(image) is None
    torch.testing.assert_close(images.values(image, layout), layout.values(image), rtol=0, atol=0)


@given(
    groups=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 9)),
    affine=st.sampled_from(["both", "weight", "none"]),
)
def test_group_norm_and_its_gradients(groups: int, sizes: tuple[int, int, int], affine: str) -> None:
    samples, group_size, positions = sizes
    channels = groups * group_size
    x = torch.randn(samples, channels, positions, 1, dtype=torch.float64) + 3.0
    weight = torch.randn(channels, dtype=torch.float64) if affine != "none" else None
    bias = torch.randn(channels, dtype=torch.float64) if affine == "both" else None
    form = (samples, channels, positions, groups)
    expected = aten.native_group_norm(x, weight, bias, *form, 1e-5)
    for actual, reference in zip(group_norm(x, weight, bias, *form, 1e-5), expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)
    dy, flags = torch.randn_like(x), [True, weight is not None, bias is not None]
    arguments = (dy, x, *expected[1:], weight, *form, flags)
    gradients, reference = group_norm_backward(*arguments), aten.native_group_norm_backward(*arguments)
    for actual, expected_gradient, flag in zip(gradients, reference, flags, strict=True):
        assert (actual is not None) == flag
        if flag:
            torch.testing.assert_close(actual, expected_gradient, rtol=1e-8, atol=1e-8)


@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.one_of(st.just(()), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    pad=st.integers(0, 1),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    levels=st.integers(1, 50),
    ceil_mode=st.booleans(),
)
def test_gradient_of_a_max_pool_goes_to_the_first_maximum(
    kernel: tuple[int, int], stride: tuple[int, ...], pad: int, dilation: tuple[int, int], levels: int, ceil_mode: bool
) -> None:
    # Few distinct values give many ties.
    x = torch.randint(0, levels, (2, 3, 7, 6)).to(torch.float64)
    form = (list(kernel), list(stride), [min(pad, taps // 2) for taps in kernel], list(dilation), ceil_mode)
    y, indices = aten.max_pool2d_with_indices(x, *form)
    dy = torch.randn_like(y)
    expected = aten.max_pool2d_with_indices_backward(dy, x, *form, indices)
    torch.testing.assert_close(max_pool2d_backward(dy, x, *form, indices), expected, **CLOSE)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 15)), min_size=1, max_size=2),
    is_exact=st.booleans(),
    scale=st.sampled_from([None, 0.3, 1.0, 1.7, 2.0, 3.0]),
)
def test_gradient_of_nearest_upsampling(sizes: list[tuple[int, int]], is_exact: bool, scale: float | None) -> None:
    name = f"{'_' if is_exact else ''}upsample_nearest{'_exact' if is_exact else ''}{len(sizes)}d_backward"
    operator = getattr(aten, name).default
    input_size = [size for size, _ in sizes]
    output_size = [num if scale is None else max(1, int(size * scale)) for size, num in sizes]
    dy = torch.randn(2, 3, *output_size, dtype=torch.float64)
    arguments = (dy, output_size, [2, 3, *input_size], *(scale for _ in sizes))
    torch.testing.assert_close(table()[operator](*arguments), operator(*arguments), **CLOSE)


@given(sides=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=2))
def test_gradient_of_padding_with_the_edge(sides: list[tuple[int, int, int]]) -> None:
    operator = getattr(aten, f"replication_pad{len(sides)}d_backward").default
    x = torch.randn(2, 3, *(size for size, _, _ in sides), dtype=torch.float64)
    padding = [side for _, *pair in reversed(sides) for side in pair]
    dy = torch.randn(2, 3, *(size + first + last for size, first, last in sides), dtype=torch.float64)
    torch.testing.assert_close(table()[operator](dy, x, padding), operator(dy, x, padding), **CLOSE)

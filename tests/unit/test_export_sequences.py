"""Decompositions of attention and other transformer operators, compared with torch's kernels in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fanin.edge.export.graph.attention import PlainAttention
from fanin.edge.export.graph.decompositions.sequences import table

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
FORMS = table()
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def randoms(seed: int, *shapes: list[int]) -> list[Tensor]:
    """Return a random tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [3.0 * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@given(shape=SIZES, seed=st.integers(0, 1000))
def test_gelu_and_its_gradient(shape: list[int], seed: int) -> None:
    x, dy = randoms(seed, shape, shape)
    torch.testing.assert_close(FORMS[aten.gelu.default](x), aten.gelu(x), **CLOSE)
    torch.testing.assert_close(FORMS[aten.gelu_backward.default](dy, x), aten.gelu_backward(dy, x), **CLOSE)


def test_the_gradient_of_gelu_at_zero_is_a_half() -> None:
    ones = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(FORMS[aten.gelu_backward.default](ones, 0.0 * ones), 0.5 * ones, **CLOSE)


def test_gelu_by_tanh_is_left_to_torch() -> None:
    x, dy = randoms(1, [7], [7])
    assert FORMS[aten.gelu.default](x, approximate="tanh") is NotImplemented
    gradient = FORMS[aten.gelu_backward.default](dy, x, approximate="tanh")
    torch.testing.assert_close(gradient, aten.gelu_backward(dy, x, approximate="tanh"), **CLOSE)


@given(shape=SIZES, data=st.data(), seed=st.integers(0, 1000))
def test_the_gradient_of_softmax(shape: list[int], data: st.DataObject, seed: int) -> None:
    x, dy = randoms(seed, shape, shape)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    arguments = (dy, x.softmax(dim), dim, x.dtype)
    gradient = FORMS[aten._softmax_backward_data.default](*arguments)
    torch.testing.assert_close(gradient, aten._softmax_backward_data(*arguments), **CLOSE)


@given(
    rows=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    affine=st.sampled_from([(False, False), (True, False), (True, True)]),
    mask=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_the_gradients_of_layer_norm(
    rows: list[int], shape: list[int], affine: tuple[bool, bool], mask: tuple[bool, bool, bool], seed: int
) -> None:
    x, dy, weight, bias = randoms(seed, [*rows, *shape], [*rows, *shape], shape, shape)
    affine_weight, affine_bias = weight if affine[0] else None, bias if affine[1] else None
    _, mean, spread = aten.native_layer_norm(x, shape, affine_weight, affine_bias, 1e-5)
    flags = [mask[0], mask[1] and affine[0], mask[2] and affine[1]]
    arguments = (dy, x, shape, mean, spread, affine_weight, affine_bias, flags)
    gradients = FORMS[aten.native_layer_norm_backward.default](*arguments)
    for actual, expected, flag in zip(gradients, aten.native_layer_norm_backward(*arguments), flags, strict=True):
        assert (actual is not None) == flag
        if flag:
            torch.testing.assert_close(actual, expected, **CLOSE)


@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    padding=st.sampled_from([-1, 2]),
    by_frequency=st.booleans(),
)
def test_the_gradient_of_an_embedding(tokens: list[int], padding: int, by_frequency: bool) -> None:
    indices = torch.tensor(tokens, dtype=torch.int32).reshape(1, -1)
    (dy,) = randoms(len(tokens), [1, len(tokens), 3])
    gradient = FORMS[aten.embedding_dense_backward.default](dy, indices, 5, padding, by_frequency)
    expected = aten.embedding_dense_backward(dy, indices.long(), 5, padding, by_frequency)
    torch.testing.assert_close(gradient, expected, **CLOSE)


def attention_results(query: Tensor, key: Tensor, value: Tensor, **options: object) -> list[Tensor]:
    """Return the attention's output, and the gradients of a weighted sum of it for query, key and value."""
    leaves = [part.clone().requires_grad_() for part in (query, key, value)]
    output = scaled_dot_product_attention(*leaves, **options)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


@settings(max_examples=40)
@given(
    batch_shape=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_attention_and_its_gradients(
    batch_shape: list[int], sizes: tuple[int, int, int, int], is_causal: bool, scale: float | None
) -> None:
    length, positions, width, features = sizes
    query, key, value = randoms(
        0, [*batch_shape, length, width], [*batch_shape, positions, width], [*batch_shape, positions, features]
    )
    expected = attention_results(query, key, value, is_causal=is_causal, scale=scale)
    with PlainAttention():
        results = attention_results(query, key, value, is_causal=is_causal, scale=scale)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)


def test_heads_that_share_keys() -> None:
    query, key, value = randoms(0, [2, 6, 4, 3], [2, 2, 4, 3], [2, 2, 4, 3])
    expected = attention_results(query, key, value, enable_gqa=True, is_causal=True)
    with PlainAttention():
        results = attention_results(query, key, value, enable_gqa=True, is_causal=True)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)


def test_one_key_for_all_heads() -> None:
    query, key, value = randoms(0, [2, 3, 4, 5], [1, 1, 4, 5], [3, 4, 2])
    expected = attention_results(query, key, value)
    with PlainAttention():
        results = attention_results(query, key, value)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)


class CallCounter(TorchFunctionMode):
    """Counts the calls that reach torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: object, _: object, args: object = (), kwargs: object = None) -> object:
        assert callable(func) and isinstance(args, tuple) and isinstance(kwargs, dict | None)
        self.num += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({}, 0),
        ({"is_causal": True}, 0),
        ({"attn_mask": torch.zeros(2, 2, dtype=torch.bool)}, 1),
        ({"dropout_p": 0.5}, 1),
    ],
    ids=["all", "causal", "mask", "dropout"],
)
def test_attention_with_a_mask_or_dropout_is_left_to_torch(options: dict[str, object], num: int) -> None:
    query, key, value = (tensor.float() for tensor in randoms(0, [1, 2, 3], [1, 2, 3], [1, 2, 3]))
    with CallCounter() as counter, PlainAttention():
        output = scaled_dot_product_attention(query, key, value, **options)
    assert counter.num == num
    # A fully masked row is 0 in torch's decomposition.
    assert torch.isfinite(output).all()

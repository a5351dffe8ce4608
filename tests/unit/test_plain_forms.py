"""Plain forms of functions and of gradients: values and gradients equal torch's, in float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fanin.edge.export.graph.decompositions import ordering, resampling, selection
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE, Forms
from fanin.edge.export.module.plain.functions import PlainFunctions

aten = torch.ops.aten
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
Function = Callable[[Tensor], Tensor]
GRID = torch.rand(2, 4, 5, 2, dtype=torch.float64) * 2.6 - 1.3
OTHER = torch.randn(2, 4, 3, dtype=torch.float64)

LABELS = torch.tensor([[1, 1, 2], [3, 1, 0]])
"""Targets of ``ctc_loss``: equal labels after each other, and padding."""


def ctc(x: Tensor, **named: object) -> Tensor:
    """Return the losses of alignments of values (T, 2, C). The second sample and its target are shorter."""
    return F.ctc_loss(x.log_softmax(2), LABELS, torch.tensor([len(x), min(len(x), 4)]), torch.tensor([3, 2]), **named)


PLAIN: dict[str, tuple[tuple[int, ...], Function]] = {
    "prod": ((3, 7, 2), lambda x: x.prod(1)),
    "prod of 1": ((3, 1), lambda x: torch.prod(input=x, dim=-1, keepdim=True)),
    "prod of all": ((3, 5), torch.prod),
    "cumprod": ((3, 7, 2), lambda x: x.cumprod(-2)),
    "erfc": ((30,), lambda x: x.erfc() + torch.special.erfc(2.0 * x)),
    "cdist": ((2, 5, 3), lambda x: torch.cdist(x, OTHER)),
    "cdist to itself": ((2, 5, 3), lambda x: torch.cdist(x, x)),
    "cdist of absolute values": ((2, 5, 3), lambda x: torch.cdist(x, OTHER, p=1.0)),
    "matrix_exp": ((2, 4, 4), lambda x: torch.matrix_exp(3.0 * (x - x.mT)) + torch.linalg.matrix_exp(x)),
    "ctc_loss": ((6, 2, 4), partial(ctc, reduction="none")),
    "ctc_loss: mean, another blank": ((6, 2, 5), partial(ctc, blank=4)),
    "ctc_loss: sum": ((5, 2, 4), partial(ctc, reduction="sum")),
    "ctc_loss without an alignment": ((3, 2, 4), lambda x: ctc(x[:, :1].expand(-1, 2, -1), zero_infinity=True)),
    "ctc_loss of sharp probabilities": ((40, 2, 4), lambda x: ctc(20.0 * x, reduction="none")),
    "ctc_loss without labels": (
        (5, 2, 4),
        lambda x: F.ctc_loss(x.log_softmax(2), LABELS, torch.tensor([5, 3]), torch.tensor([0, 1]), reduction="none"),
    ),
    "bilinear": ((6, 2, 4), lambda x: F.bilinear(x, x[..., :3], OTHER[:, :, :3].reshape(2, 4, 3))),
    "bilinear with a bias": ((6, 4), lambda x: F.bilinear(x, x[..., :3], OTHER, OTHER[:, 0, 0])),
    "bilinear by keywords": ((6, 4), lambda x: torch.bilinear(input1=x, input2=x[..., :3], weight=OTHER)),
    "softshrink": ((30,), lambda x: F.softshrink(x, 0.3)),
    "hardshrink": ((30,), lambda x: F.hardshrink(x, lambd=0.3)),
    "circular pad": ((2, 3, 4, 5), lambda x: F.pad(x, (1, 2, 0, 4), mode="circular")),
    "circular pad of a signal": ((2, 3, 4), lambda x: F.pad(x, (4, 0), "circular")),
    "unfold": ((2, 3, 6, 5), lambda x: F.unfold(x, (2, 3), padding=1, stride=(2, 1))),
    "unfold with gaps": ((2, 3, 6, 5), lambda x: F.unfold(x, 2, dilation=2)),
    "fold": ((2, 12, 8), lambda x: F.fold(x, (4, 8), 2, stride=2)),
    "fold with a rest": ((2, 12, 4), lambda x: F.fold(x, (5, 6), 2, dilation=(1, 2), padding=(0, 1), stride=(2, 3))),
    "avg_pool3d": ((2, 3, 5, 6, 4), lambda x: F.avg_pool3d(x, (2, 3, 2), stride=(1, 2, 2), padding=(1, 1, 0))),
    "max_pool3d": ((2, 3, 5, 6, 4), lambda x: F.max_pool3d(x, 2, stride=(1, 2, 2), padding=1, dilation=(2, 1, 1))),
    "max_pool3d of a cut size": ((2, 3, 5, 5, 5), lambda x: F.max_pool3d(x, 2, ceil_mode=True)),
    "local_response_norm": ((2, 5, 4), lambda x: F.local_response_norm(x, 3, alpha=0.3, beta=0.6, k=1.5)),
    "local_response_norm of 2": ((2, 5, 4, 3), lambda x: F.local_response_norm(x, 2, alpha=0.3)),
    "grid_sample": ((2, 3, 6, 5), lambda x: F.grid_sample(x, GRID, align_corners=False)),
    "grid_sample at the border": (
        (2, 3, 6, 5),
        lambda x: F.grid_sample(x, GRID, padding_mode="border", align_corners=True),
    ),
    "grid_sample: nearest": ((2, 3, 6, 5), lambda x: F.grid_sample(x, GRID, mode="nearest", align_corners=True)),
    "a grid that is computed": (
        (2, 4, 5, 2),
        lambda x: F.grid_sample(torch.sin(OTHER).reshape(2, 1, 4, 3), x, align_corners=False),
    ),
    "a grid at the border": (
        (2, 4, 5, 2),
        lambda x: F.grid_sample(torch.sin(OTHER).reshape(2, 1, 4, 3), x, padding_mode="border", align_corners=False),
    ),
}
TO_TORCH: dict[str, tuple[tuple[int, ...], Function]] = {
    "prod of a number": ((), lambda x: x.prod(0)),
    "prod of integers": ((3, 4), lambda x: (10 * x).to(torch.int64).prod(1)),
    "prod into a tensor": ((3, 4), lambda x: torch.prod(x, dim=1, out=x.detach()[:, 0].clone())),
    "cdist of other powers": ((2, 5, 3), lambda x: torch.cdist(x, OTHER, p=3.0)),
    "ctc_loss of joined targets": (
        (6, 2, 4),
        lambda x: F.ctc_loss(x.log_softmax(2), LABELS.flatten()[:5], (6, 6), (3, 2), reduction="none"),
    ),
    "constant pad": ((2, 3, 4, 5), lambda x: F.pad(x, (1, 2, 0, 4), value=0.5)),
    "fold of one sample": ((12, 8), lambda x: F.fold(x, (4, 8), 2, stride=2)),
    "avg_pool3d of a cut size": ((2, 3, 5, 5, 5), lambda x: F.avg_pool3d(x, 2, ceil_mode=True)),
    "grid_sample: reflection": (
        (2, 3, 6, 5),
        lambda x: F.grid_sample(x, GRID, padding_mode="reflection", align_corners=True),
    ),
}


def value_and_gradient(function: Function, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=torch.float64).reshape(y.shape)
    return (y, *(torch.autograd.grad((y * weights).sum(), x) if y.requires_grad else ()))


def operators(function: Function, x: Tensor) -> list[str]:
    return [str(node.target) for node in make_fx(function)(x).graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_form_is_torchs_function(name: str) -> None:
    torch.manual_seed(0)
    size, function = PLAIN[name]
    x = torch.randn(size, dtype=torch.float64)
    expected, own = value_and_gradient(function, x), operators(function, x)
    with PlainFunctions():
        actual = value_and_gradient(function, x)
        plain = operators(function, x)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert plain != own, "expected another form than torch's"


def test_a_step_of_an_alignment_has_few_operators_with_its_gradient() -> None:
    def gradient(x: Tensor) -> Tensor:
        return value_and_gradient(partial(ctc, reduction="none"), x)[1]

    with PlainFunctions():
        short, long = (operators(gradient, torch.randn(num, 2, 4, dtype=torch.float64)) for num in (10, 20))
    assert len(long) - len(short) <= 10 * 20
    assert not any("slice_backward" in name or "select_backward" in name for name in long)


@pytest.mark.parametrize("name", TO_TORCH)
def test_other_arguments_are_left_to_torch(name: str) -> None:
    torch.manual_seed(0)
    size, function = TO_TORCH[name]
    x = torch.randn(size, dtype=torch.float64)
    own = operators(function, x)
    with PlainFunctions():
        assert operators(function, x) == own


def test_a_product_has_a_gradient_where_a_factor_is_zero() -> None:
    x = torch.tensor([[2.0, 0.0, 3.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    expected = value_and_gradient(lambda x: x.prod(1), x)
    with PlainFunctions():
        torch.testing.assert_close(value_and_gradient(lambda x: x.prod(1), x), expected, **CLOSE)


SMOOTH = [
    ("linear", (2, 3, 5), {"size": 8, "align_corners": True}),
    ("linear", (2, 3, 5), {"scale_factor": 0.7, "align_corners": False}),
    ("bilinear", (2, 3, 4, 5), {"scale_factor": (2.0, 1.7), "align_corners": False}),
    ("bilinear", (2, 3, 4, 5), {"size": (1, 9), "align_corners": True}),
    ("bilinear", (2, 3, 4, 1), {"size": (3, 3), "align_corners": False}),
    ("bicubic", (2, 3, 4, 5), {"scale_factor": 1.7, "align_corners": False}),
    ("bicubic", (2, 3, 4, 5), {"size": (9, 2), "align_corners": True}),
]


@pytest.mark.parametrize(("mode", "size", "arguments"), SMOOTH)
def test_the_gradient_of_smooth_upsampling_equals_torch(
    mode: str, size: tuple[int, ...], arguments: dict[str, object]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    y = F.interpolate(x, mode=mode, **arguments)  # type: ignore[arg-type]  # of one of several calls
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    scale = arguments.get("scale_factor")
    scales = scale if isinstance(scale, tuple) else (scale,) * (len(size) - 2)
    form = resampling.cubic_backward if mode == "bicubic" else resampling.linear_backward
    actual = form(dy, list(y.shape[2:]), list(size), bool(arguments["align_corners"]), *scales)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(("offset", "dim1", "dim2"), [(0, 0, 1), (1, 2, 0), (-2, 1, 2), (0, -1, 0)])
def test_the_gradient_of_a_diagonal_equals_torch(offset: int, dim1: int, dim2: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    dy = torch.randn_like(x.diagonal(offset, dim1, dim2))
    expected = aten.diagonal_backward(dy, x.shape, offset, dim1, dim2)
    torch.testing.assert_close(selection.diagonal_backward(dy, x.shape, offset, dim1, dim2), expected, **CLOSE)


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 2, 1), (1, 3, 2), (-1, 2, 3)])
def test_the_gradient_of_windows_equals_torch(dim: int, size: int, step: int) -> None:
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    dy = torch.randn_like(x.unfold(dim, size, step))
    expected = aten.unfold_backward(dy, x.shape, dim, size, step)
    torch.testing.assert_close(selection.unfold_backward(dy, x.shape, dim, size, step), expected, **CLOSE)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_are_added_at_an_index_as_in_torch(dim: int) -> None:
    x, src = torch.randn(3, 6, 5, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64)
    index = torch.randint(0, x.shape[dim], (3, 6, 5)).narrow(dim, 0, 2)
    actual = ordering.scatter_add(x, dim, index, src)
    torch.testing.assert_close(actual, aten.scatter_add(x, dim, index, src), **CLOSE)
    other = partial(ordering.scatter_add, x, dim, index[:2, :2, :2], src)
    assert other() is NotImplemented
    positions, rows = torch.randint(0, x.shape[dim], (2,)), src.narrow(dim, 0, 2)
    actual = ordering.index_add(x, dim, positions, rows, alpha=0.5)
    torch.testing.assert_close(actual, aten.index_add(x, dim, positions, rows, alpha=0.5), **CLOSE)


def test_values_are_put_at_an_index_as_in_torch() -> None:
    x, src = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    index = torch.rand(3, 6).argsort(1)[:, :4]
    torch.testing.assert_close(ordering.scatter(x, 1, index, src), aten.scatter(x, 1, index, src), **CLOSE)
    twice, same = torch.tensor([[2, 2, 5]] * 3), torch.full((3, 3), 0.7, dtype=torch.float64)
    torch.testing.assert_close(ordering.scatter(x, 1, twice, same), aten.scatter(x, 1, twice, same), **CLOSE)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("descending", [False, True])
def test_an_order_equals_torch(dim: int, descending: bool) -> None:
    # torch's stable sort keeps the order of equal values.
    x = torch.randint(0, 4, (6, 3, 5)).double()
    expected = torch.sort(x, stable=True, dim=dim, descending=descending)
    torch.testing.assert_close(ordering.sort(x, dim, descending), tuple(expected), **CLOSE)
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(ordering.topk(x, 3, dim, descending), tuple(x.topk(3, dim, descending)), **CLOSE)


@pytest.mark.parametrize("descending", [False, True])
def test_an_order_of_infinite_values_equals_torch(descending: bool) -> None:
    x = torch.tensor([[1.0, -torch.inf, 3.0, 2.0, torch.inf]])
    expected = torch.sort(x, stable=True, descending=descending)
    torch.testing.assert_close(ordering.sort(x, -1, descending), tuple(expected), **CLOSE)
    torch.testing.assert_close(ordering.topk(x, 3, -1, descending), tuple(x.topk(3, -1, descending)), **CLOSE)


def test_infinite_values_are_scattered_as_in_torch() -> None:
    x, index = torch.zeros(2, 4), torch.tensor([[1, 3], [0, 2]])
    src = torch.tensor([[-torch.inf, 2.0], [torch.inf, 1.0]])
    torch.testing.assert_close(ordering.scatter(x, 1, index, src), aten.scatter(x, 1, index, src), **CLOSE)
    torch.testing.assert_close(ordering.scatter_add(x, 1, index, src), aten.scatter_add(x, 1, index, src), **CLOSE)


@pytest.mark.parametrize("dim", [0, -1])
def test_log_sums_of_beginnings_far_below_the_maximum_equal_torch(dim: int) -> None:
    x = 1000.0 * torch.randn(6, 3, 5, dtype=torch.float64)
    x[:2, 1], x[..., 2:] = -torch.inf, x[..., 2:] + 5000.0
    torch.testing.assert_close(ordering.logcumsumexp(x, dim), x.logcumsumexp(dim), **CLOSE)


@pytest.mark.parametrize("forms", [ONNX, TFLITE], ids=lambda forms: forms.graph_format)
def test_both_formats_and_both_kinds_of_graphs_have_the_form_of_log_sums(forms: Forms) -> None:
    for table in (forms.for_training(), forms.for_inference()):
        assert table[aten.logcumsumexp.default] is ordering.logcumsumexp


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("scale", [2.0, 1.7, 0.6, None])
def test_upsampling_of_one_channel_equals_torch(scale: float | None, shift: float) -> None:
    x, mode = torch.randn(2, 1, 4, 5, dtype=torch.float64), "nearest-exact" if shift else "nearest"
    size = None if scale else (7, 3)
    expected = F.interpolate(x, size=size, scale_factor=scale, mode=mode)
    factors = [scale, scale] if scale else None
    torch.testing.assert_close(resampling.upsample_by_factors(x, size, factors, shift=shift), expected, **CLOSE)
    assert resampling.upsample_by_factors(x.expand(2, 2, 4, 5), size, factors, shift=shift) is NotImplemented

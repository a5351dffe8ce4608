"""``einsum`` of three and more tensors: the plain form, compared with torch's."""

from collections.abc import Sequence

import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.module.plain.functions import PlainFunctions


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bi,ij,jk->bk", [(3, 4), (4, 5), (5, 2)]),
        ("bi, ij, jk", [(3, 4), (4, 5), (5, 2)]),
        ("bij,ir,jr,rk->bk", [(3, 4, 5), (4, 2), (5, 2), (2, 6)]),
        ("bii,ij,bj->bi", [(3, 4, 4), (4, 5), (3, 5)]),
        ("...i,ij,...j->...", [(2, 3, 4), (4, 5), (3, 5)]),
        ("...i,ij,...j", [(2, 3, 4), (4, 5), (3, 5)]),
        ("i,j,k", [(2,), (3,), (4,)]),
        ("b...,b,b->...", [(2, 3, 4), (2,), (1,)]),
    ],
)
def test_the_plain_form_of_a_contraction_equals_torch(equation: str, shapes: Sequence[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = torch.einsum(equation, *tensors)
    with PlainFunctions():
        torch.testing.assert_close(torch.einsum(equation, *tensors), expected)
        torch.testing.assert_close(torch.einsum(equation, tensors), expected)


def test_a_contraction_with_lists_of_labels_equals_torch() -> None:
    first, second, third = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 4), (4, 5), (5, 3)))
    calls = [
        (first, [..., 1], second, [1, 2], third, [2, 3], [..., 3]),
        (first, [0, 1, 2], second, [2, 3], third, [3, 4]),
    ]
    for call in calls:
        expected = torch.einsum(*call)
        with PlainFunctions():
            torch.testing.assert_close(torch.einsum(*call), expected)


def test_a_wrong_contraction_has_torchs_own_error() -> None:
    tensors = [torch.ones(2, 3), torch.ones(4, 5), torch.ones(5, 2)]
    with PlainFunctions(), pytest.raises(RuntimeError, match=r"broadcast|size"):
        torch.einsum("bi,ij,jk->bk", *tensors)
    with PlainFunctions(), pytest.raises((RuntimeError, ValueError), match="operands"):
        torch.einsum("bi,ij->bj", *tensors)


class Chained(nn.Module):
    """A Tucker decomposition: three weights in one contraction."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"rows": (6, 5), "columns": (7, 5), "head": (5, 4)}
        self.weights = nn.ParameterDict({name: 0.3 * torch.randn(shape) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, head = (self.weights[name] for name in ("rows", "columns", "head"))
        return torch.einsum("bij,ir,jr,rk->bk", x, rows, columns, head)


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_model_with_a_contraction_of_four_tensors_is_exported(graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(name="chained", module=Chained(), calibration=torch.randn(16, 6, 7), batch_size=4, num_classes=4)
    export_bundle(app, [graph_format])

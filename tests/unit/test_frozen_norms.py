"""A frozen norm after a convolution: the convolution alone gives the same values and gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fanin.edge.export.modules.frozen_norms import FoldedNorms

CONVOLUTION, NORM = "ConvolutionBackward0", "NativeBatchNormBackward0"
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def normed(dims: int = 2, *, bias: bool = True, affine: bool = True, groups: int = 1) -> nn.Sequential:
    """Return a convolution and a frozen norm, in float64."""
    kind, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)
    made = nn.Sequential(kind(4, 4, 3, padding=1, bias=bias, groups=groups), norm(4, affine=affine).eval()).double()
    with torch.no_grad():
        made[1].running_mean.normal_()
        made[1].running_var.uniform_(0.5, 2.0)
        for parameter in made[1].parameters():
            parameter.normal_()
    return made


def folded(module: nn.Module, x: Tensor) -> Tensor:
    """Return the module's output while norms are folded."""
    with FoldedNorms():
        found: Tensor = module(x)
    return found


@given(
    dims=st.integers(1, 2),
    bias=st.booleans(),
    affine=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_the_convolution_says_what_the_norm_said(dims: int, bias: bool, affine: bool, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    module = normed(dims, bias=bias, affine=affine, groups=groups)
    x = torch.randn(2, 4, *(5 for _ in range(dims)), dtype=torch.float64, requires_grad=True)
    towards = [x, *module.parameters()]
    expected, got = module(x), folded(module, x)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert (expected.grad_fn.name(), got.grad_fn.name()) == (NORM, CONVOLUTION)
    for found, exact in zip(
        torch.autograd.grad(got, towards, dy), torch.autograd.grad(expected, towards, dy), strict=True
    ):
        torch.testing.assert_close(found, exact, **CLOSE)


class Added(nn.Module):
    """An in-place addition to the convolution's output, before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = normed()

    def forward(self, x: Tensor) -> Tensor:
        """Normalized."""
        y = self.convolution(x)
        y += 1.0
        found: Tensor = self.norm(y)
        return found


def with_frozen_weight() -> nn.Module:
    """Return a trained norm after a frozen weight."""
    module = normed()
    module[0].weight.requires_grad_(False)
    return module


def after_an_activation() -> nn.Module:
    """Return a norm without a convolution before it."""
    return nn.Sequential(nn.ReLU(), normed()[1])


@pytest.mark.parametrize("make", [Added, with_frozen_weight, after_an_activation])
def test_what_is_no_convolution_that_learns_keeps_its_norm(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    got = folded(module, x)
    assert got.grad_fn.name() == NORM
    torch.testing.assert_close(got, module(x), **CLOSE)


def test_a_norm_that_trains_stays() -> None:
    module = normed().train()
    assert folded(module, torch.randn(2, 4, 5, 5, dtype=torch.float64)).grad_fn.name() == NORM

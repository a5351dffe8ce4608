"""A frozen norm after a convolution: the convolution alone gives the same values and gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fanin.edge.export.module.frozen_norms import FoldedNorms

CONVOLUTION, NORM = "ConvolutionBackward0", "NativeBatchNormBackward0"
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def conv_and_norm(dims: int = 2, *, bias: bool = True, affine: bool = True, groups: int = 1) -> nn.Sequential:
    """Return a convolution and a frozen norm, in float64."""
    kind, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)
    layers = nn.Sequential(kind(4, 4, 3, padding=1, bias=bias, groups=groups), norm(4, affine=affine).eval()).double()
    with torch.no_grad():
        layers[1].running_mean.normal_()
        layers[1].running_var.uniform_(0.5, 2.0)
        for parameter in layers[1].parameters():
            parameter.normal_()
    return layers


def folded_output(module: nn.Module, x: Tensor) -> Tensor:
    """Return the module's output while norms are folded."""
    with FoldedNorms():
        output: Tensor = module(x)
    return output


@given(
    dims=st.integers(1, 2),
    bias=st.booleans(),
    affine=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_a_folded_norm_has_the_values_and_gradients_of_the_norm(
    dims: int, bias: bool, affine: bool, groups: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module = conv_and_norm(dims, bias=bias, affine=affine, groups=groups)
    x = torch.randn(2, 4, *(5 for _ in range(dims)), dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    expected, actual = module(x), folded_output(module, x)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert (expected.grad_fn.name(), actual.grad_fn.name()) == (NORM, CONVOLUTION)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(actual, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient, **CLOSE)


class Added(nn.Module):
    """An in-place addition to the convolution's output, before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = conv_and_norm()

    def forward(self, x: Tensor) -> Tensor:
        """Normalized."""
        y = self.convolution(x)
        y += 1.0
        output: Tensor = self.norm(y)
        return output


def with_frozen_weight() -> nn.Module:
    """Return a trained norm after a frozen weight."""
    module = conv_and_norm()
    module[0].weight.requires_grad_(False)
    return module


def after_an_activation() -> nn.Module:
    """Return a norm without a convolution before it."""
    return nn.Sequential(nn.ReLU(), conv_and_norm()[1])


@pytest.mark.parametrize("make", [Added, with_frozen_weight, after_an_activation])
def test_a_norm_without_a_trained_convolution_is_not_folded(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    output = folded_output(module, x)
    assert output.grad_fn.name() == NORM
    torch.testing.assert_close(output, module(x), **CLOSE)


def test_a_norm_that_trains_stays() -> None:
    module = conv_and_norm().train()
    assert folded_output(module, torch.randn(2, 4, 5, 5, dtype=torch.float64)).grad_fn.name() == NORM

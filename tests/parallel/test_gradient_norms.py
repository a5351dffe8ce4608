"""The norm of gradients in half precision has the digits and the range of float32: it decides how much is clipped."""

import pytest
import torch
from torch import nn

from fanin.datacenter.parallel.steps.gradients import total_norm

CPU = torch.device("cpu")


def parameters(dtype: torch.dtype, scale: float) -> list[nn.Parameter]:
    """Return parameters of several sizes with random gradients."""
    generator = torch.Generator().manual_seed(0)
    values = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 40, 500, 7)]
    for value in values:
        value.grad = (scale * torch.randn(value.shape, generator=generator)).to(dtype)
    return values


def double_norm(values: list[nn.Parameter]) -> float:
    """Return the norm, computed in float64."""
    return float(torch.cat([value.grad.double() for value in values if value.grad is not None]).norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_norm_has_the_digits_of_float32(dtype: torch.dtype) -> None:
    values = parameters(dtype, 1.0)
    norm = total_norm(values, None, CPU)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert float(norm) == pytest.approx(double_norm(values), rel=1e-6)


def test_a_norm_beyond_float16_is_finite() -> None:
    values = parameters(torch.float16, 1e4)
    assert double_norm(values) > torch.finfo(torch.float16).max
    assert float(total_norm(values, None, CPU)) == pytest.approx(double_norm(values), rel=1e-6)


def test_gradients_of_several_types_have_one_norm() -> None:
    values = parameters(torch.bfloat16, 1.0) + parameters(torch.float32, 2.0)
    assert float(total_norm(values, None, CPU)) == pytest.approx(double_norm(values), rel=1e-6)


def test_parameters_without_a_gradient_count_as_zero() -> None:
    assert float(total_norm([nn.Parameter(torch.zeros(3))], None, CPU)) == 0.0

"""The loss of an App in half precision is computed in float32: a sum of losses needs more digits than outputs have."""

import pytest
import torch

from fanin.datacenter.parallel.objective import padded_objective
from fanin.edge.export import cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_losses_has_the_digits_of_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(512, 30, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 30, (512,), generator=generator)
    total = padded_objective(cross_entropy).loss_sum(outputs, targets)
    expected = torch.nn.functional.cross_entropy(outputs.double(), targets, reduction="sum")
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward()
    assert outputs.grad is not None and outputs.grad.dtype == dtype


def test_a_sum_beyond_float16_is_finite() -> None:
    outputs = torch.full((300, 2), -300.0, dtype=torch.float16)
    outputs[:, 0] = 300.0
    total = padded_objective(cross_entropy).loss_sum(outputs, torch.ones(300, dtype=torch.int64))
    assert float(total) == pytest.approx(300 * 600.0)


def test_float64_stays() -> None:
    outputs = torch.randn(4, 3, dtype=torch.float64)
    assert padded_objective(cross_entropy).loss_sum(outputs, torch.zeros(4, dtype=torch.int64)).dtype == torch.float64

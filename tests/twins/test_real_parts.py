"""Graphs without complex values compute what torch computes with them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.graph.decompositions.programs.parts import NoRealForm, with_real_numbers

WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the gradient of a loss of signals that pass through a trained layer."""
    return lambda x: torch.func.grad(lambda weight: loss(x @ weight))(WEIGHT)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x)),
    "fft over the batch": lambda x: torch.view_as_real(torch.fft.fft(torch.fft.fft(x), dim=0)),
    "ifft": lambda x: torch.view_as_real(torch.fft.ifft(torch.fft.fft(x) * 2, norm="ortho")),
    "gradient of the sizes of rfft": gradient(lambda x: torch.fft.rfft(x).abs().sum()),
    "gradient of the real part of fft": gradient(lambda x: torch.fft.fft(x).real.square().sum()),
    "gradient at a size of 0": gradient(lambda x: torch.fft.rfft(x * 0).abs().sum()),
    "where": lambda x: torch.view_as_real(torch.where(x > 0, torch.fft.fft(x), torch.fft.ifft(torch.fft.fft(x)))),
    "a slice of others": lambda x: torch.view_as_real(
        torch.slice_scatter(torch.fft.fft(x), torch.fft.fft(x)[:, :4] * 3, 1, 0, 4)
    ),
    "numbers": lambda x: torch.view_as_real(torch.fft.fft(x) * torch.full((16,), 2 + 3j)),
}


@pytest.mark.parametrize("name", CASES)
def test_real_parts_equal_complex_values(name: str) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    graph_module = make_fx(CASES[name], decomposition_table=core_aten_decompositions())(x)
    real = with_real_numbers(graph_module, (x,))
    values = [node.meta.get("val") for node in real.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    (result,) = real(x)
    torch.testing.assert_close(result, CASES[name](x), rtol=1e-5, atol=1e-4)


def test_an_operator_that_makes_complex_values_without_a_form_is_refused() -> None:
    x = torch.ones(4, 16)
    graph_module = make_fx(lambda x: torch.fft.fft(x).real + x.to(torch.complex64).real)(x)
    with pytest.raises(NoRealForm, match="_to_copy"):
        with_real_numbers(graph_module, (x,))

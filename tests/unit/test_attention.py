"""``edge.export.tracing.attention``: torch's scaled dot-product attention, expressed as plain matrix products."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.functional import scaled_dot_product_attention

from fanin.edge.export.graph.attention import plain_attention, with_plain_attention

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def projections(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (..., L, E), keys (..., S, E) and values (..., S, V), in float64."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    length, source, width, out = (draw(st.integers(1, 5)) for _ in range(4))
    shapes = (*leading, length, width), (*leading, source, width), (*leading, source, out)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return query, key, value


@given(
    given=projections(),
    scale=st.none() | st.floats(0.1, 2.0),
    kind=st.sampled_from(["none", "causal", "bool", "float"]),
)
def test_plain_attention_equals_torch(given: tuple[Tensor, Tensor, Tensor], scale: float | None, kind: str) -> None:
    query, key, value = given
    mask = None
    if kind == "bool":
        mask = torch.rand(query.size(-2), key.size(-2)) > 0.4
        mask[:, 0] = True
    elif kind == "float":
        mask = torch.randn(query.size(-2), key.size(-2), dtype=torch.float64)
        mask[:, 1:][torch.rand(query.size(-2), key.size(-2) - 1) > 0.6] = -math.inf
    expected = scaled_dot_product_attention(query, key, value, mask, 0.0, kind == "causal", scale=scale)
    torch.testing.assert_close(
        plain_attention(query, key, value, mask, 0.0, kind == "causal", scale=scale), expected, **CLOSE
    )


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_keys_may_be_shared_by_groups_of_queries(num_groups: int) -> None:
    query = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    key, value = torch.randn(2, 2, num_groups, 3, 5, dtype=torch.float64)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(plain_attention(query, key, value, is_causal=True, enable_gqa=True), expected, **CLOSE)


def test_a_fully_masked_row_is_finite() -> None:
    query, key, value = torch.randn(3, 2, 4)
    for mask in (torch.zeros(2, 2, dtype=torch.bool), torch.full((2, 2), -math.inf)):
        assert plain_attention(query, key, value, mask).isfinite().all()


class Mix(nn.Module):
    """torch's attention layer, which calls the attention function internally."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        output, _ = self.mix(x, x, x, attn_mask=mask, need_weights=False)
        return output


class DirectCall(nn.Module):
    """A direct call of the attention function, on three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        return scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("module", [Mix(), DirectCall()], ids=["layer", "function"])
def test_the_operator_is_removed_from_a_program(module: nn.Module) -> None:
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        program = export(module, (x,), dynamic_shapes=({0: Dim("batch")},))
    assert any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    plain_program = with_plain_attention(program)
    assert not any("scaled_dot_product" in str(node.target) for node in plain_program.graph.nodes)
    larger_batch = torch.randn(5, 3, 8)
    torch.testing.assert_close(plain_program.module()(larger_batch), module(larger_batch))


def test_a_program_without_attention_is_unchanged() -> None:
    program = export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    assert with_plain_attention(program) is program

"""``edge.export.losses``: equal to torch's losses without a reduction, and targets of -1 are ignored."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fanin.edge.export import cross_entropy, next_token, squared_error

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SEEDS = st.integers(0, 1000)


@given(seed=SEEDS, num=st.integers(1, 6), classes=st.integers(2, 9), spread=st.sampled_from([1.0, 100.0]))
def test_cross_entropy_equals_torch(seed: int, num: int, classes: int, spread: float) -> None:
    torch.manual_seed(seed)
    logits = (spread * torch.randn(num, classes, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(classes, (num,))
    actual, expected = cross_entropy(logits, labels), nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(actual, expected, **CLOSE)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(loss.sum(), logits) for loss in (actual, expected))
    torch.testing.assert_close(gradient, expected_gradient, **CLOSE)


@given(seed=SEEDS, num=st.integers(1, 4), places=st.integers(1, 6), classes=st.integers(2, 5))
def test_next_token_is_the_mean_over_the_places_that_have_one(seed: int, num: int, places: int, classes: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(num, places, classes, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(-1, classes, (num, places))
    losses = next_token(logits, tokens)
    assert losses.shape == (num,)
    for sample in range(num):
        has_token = tokens[sample] >= 0
        if has_token.any():
            expected = nn.functional.cross_entropy(logits[sample][has_token], tokens[sample][has_token])
            torch.testing.assert_close(losses[sample], expected, **CLOSE)
        else:
            assert losses[sample] == 0.0
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[tokens < 0].any()


@given(seed=SEEDS, shape=st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_squared_error_equals_torch(seed: int, shape: list[int]) -> None:
    torch.manual_seed(seed)
    values, targets = torch.randn(2, *shape, dtype=torch.float64)
    expected = nn.functional.mse_loss(values, targets, reduction="none").reshape(len(values), -1).mean(dim=1)
    torch.testing.assert_close(squared_error(values, targets), expected, **CLOSE)


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"squared error: got values \(4, 1\) and y \(4,\), expected the same"):
        squared_error(torch.zeros(4, 1), torch.zeros(4))

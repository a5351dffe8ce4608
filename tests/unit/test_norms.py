"""``edge.export.modules.norms``: trained BatchNorm equals torch's on the samples without padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fanin.edge.export.module.norms import STATISTICS, TrackedNorms, running_statistics, track_norms
from fanin.protos.errors import UnsupportedModel

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random_norm(spatial: tuple[int, ...], momentum: float, affine: bool) -> nn.BatchNorm1d | nn.BatchNorm2d:
    """Return a norm of three channels with nontrivial statistics, in float64."""
    kind = nn.BatchNorm2d if len(spatial) == 2 else nn.BatchNorm1d
    norm = kind(3, momentum=momentum, affine=affine, dtype=torch.float64)
    with torch.no_grad():
        norm.running_mean.uniform_(-1.0, 1.0)
        norm.running_var.uniform_(0.5, 2.0)
        for parameter in norm.parameters():
            parameter.uniform_(-1.0, 1.0)
    return norm


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    """Draw (a norm, x (B, 3, ...), the number of samples that are not padding)."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    spatial = draw(st.sampled_from([(), (4,), (2, 3)]))
    norm = random_norm(spatial, draw(st.floats(0.01, 1.0)), draw(st.booleans()))
    x = 3.0 * torch.randn(draw(st.integers(2, 6)), 3, *spatial, dtype=torch.float64) + 1.0
    num = draw(st.integers(1 if spatial else 2, len(x)))
    return norm, x, num


def run_norm(norm: nn.Module, x: Tensor, mask: Tensor, *, uses: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the output of a norm that is tracked for x, its next statistics)."""
    track_norms(norm, "App a")
    with TrackedNorms(running_statistics(norm), mask) as norms:
        for _ in range(uses):
            x = norm(x)
    return x, norms.following


def statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(norm, name) for name in STATISTICS}


@given(case=cases())
def test_it_is_torchs_on_the_samples_that_count(case: tuple[nn.Module, Tensor, int]) -> None:
    norm, x, num = case
    mask = (torch.arange(len(x)) < num).double()
    unpadded = x[:num].clone().requires_grad_()
    padded = torch.cat([x[:num], 1e3 * torch.randn_like(x[num:])]).requires_grad_()
    actual, next_statistics = run_norm(norm, padded, mask)
    expected = norm(unpadded)
    torch.testing.assert_close(actual[:num], expected, **CLOSE)
    torch.testing.assert_close(next_statistics, statistics(norm), **CLOSE)
    # The gradient of padding is not compared: the loss masks it.
    pull = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((actual[:num] * pull).sum(), padded)
    (expected_gradient,) = torch.autograd.grad((expected * pull).sum(), unpadded)
    torch.testing.assert_close(gradient[:num], expected_gradient, rtol=1e-8, atol=1e-8)
    assert not gradient[num:].any()


@given(case=cases())
def test_in_evaluation_it_is_torchs_too(case: tuple[nn.Module, Tensor, int]) -> None:
    norm, x, _ = case
    tracked = running_statistics(norm)
    norm.eval()
    with TrackedNorms(tracked, torch.ones(1)):
        actual = norm(x)
    torch.testing.assert_close(actual, norm(x), **CLOSE)


@pytest.mark.parametrize("num", [0, 1])
def test_a_batch_that_has_no_variance_moves_no_statistic(num: int) -> None:
    norm = random_norm((), 0.1, affine=True)
    x = torch.randn(4, 3, dtype=torch.float64)
    output, next_statistics = run_norm(norm, x, (torch.arange(4) < num).double())
    assert output.isfinite().all()
    for name, value in statistics(norm).items():
        assert torch.equal(next_statistics[name], value)


@pytest.mark.parametrize("spatial", [(), (1, 1)])
def test_a_single_value_is_normalized_by_the_running_statistics(spatial: tuple[int, ...]) -> None:
    norm = random_norm(spatial, 0.1, affine=True)
    x = torch.randn(4, 3, *spatial, dtype=torch.float64, requires_grad=True)
    output, next_statistics = run_norm(norm, x, torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(next_statistics, statistics(norm), **CLOSE)
    expected = norm.eval()(x[1:2])
    torch.testing.assert_close(output[1:2], expected, **CLOSE)
    slopes = [torch.autograd.grad(each.square().sum(), (x, *norm.parameters())) for each in (output[1:2], expected)]
    torch.testing.assert_close(*slopes, **CLOSE)


def test_of_several_values_one_sample_is_enough() -> None:
    norm = random_norm((5,), 0.1, affine=True)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    _, next_statistics = run_norm(norm, x, torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    norm(x[:1])
    torch.testing.assert_close(next_statistics, statistics(norm), **CLOSE)


def test_a_layer_that_is_used_twice_moves_twice() -> None:
    norm = random_norm((), 0.3, affine=True)
    x = torch.randn(5, 3, dtype=torch.float64)
    actual, next_statistics = run_norm(norm, x, torch.ones(5, dtype=torch.float64), uses=2)
    torch.testing.assert_close(actual, norm(norm(x)), **CLOSE)
    torch.testing.assert_close(next_statistics, statistics(norm), **CLOSE)


def test_a_pass_changes_no_buffer_and_an_unused_layer_reports_nothing() -> None:
    norm = random_norm((), 0.1, affine=True)
    before = {name: value.clone() for name, value in statistics(norm).items()}
    assert run_norm(norm, torch.zeros(2, 3, dtype=torch.float64), torch.ones(2), uses=0)[1] == {}
    assert run_norm(norm, torch.randn(2, 3, dtype=torch.float64), torch.ones(2))[1].keys() == set(STATISTICS)
    assert all(torch.equal(value, before[name]) for name, value in statistics(norm).items())


def test_only_norms_that_train_are_tracked_and_a_shared_one_stays_one() -> None:
    shared, frozen = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    module = nn.Sequential(shared, nn.Sequential(frozen, shared), nn.LayerNorm(3))
    assert running_statistics(module).keys() == {"0.running_mean", "0.running_var"}
    module.eval()
    assert running_statistics(module) == {}


class Activated(nn.BatchNorm1d):
    """A norm of a package, with a forward of its own that ends in an activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, ...) normalized and activated."""
        return torch.tanh(super().forward(x))


def test_a_norm_keeps_a_forward_of_its_own() -> None:
    norm, x = Activated(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    actual, _ = run_norm(norm, x, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(actual, norm(x), **CLOSE)


@pytest.mark.parametrize("is_positions_first", [False, True])
def test_rows_of_the_positions_of_a_sample_count_as_the_sample(is_positions_first: bool) -> None:
    norm, tokens = random_norm((), 0.1, affine=True), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    rows = (tokens.transpose(0, 1) if is_positions_first else tokens).flatten(0, 1)
    with TrackedNorms(running_statistics(norm), mask, [""] if is_positions_first else []) as norms:
        actual = norm(rows).unflatten(0, (5, 4) if is_positions_first else (4, 5))
    expected = norm(tokens[mask > 0].flatten(0, 1)).unflatten(0, (3, 5))
    torch.testing.assert_close((actual.transpose(0, 1) if is_positions_first else actual)[mask > 0], expected, **CLOSE)
    torch.testing.assert_close(norms.following, statistics(norm), **CLOSE)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(3, momentum=None)), r"App a: module 0 \(BatchNorm1d\) has momentum=None, .*=0.1"),
        (nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), "has no running statistics, .*stats=True, or"),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), r"module itself \(BatchNorm1d\) has no running stat"),
    ],
    ids=["no momentum", "no statistics", "no statistics in evaluation"],
)
def test_a_norm_that_cannot_be_tracked_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        track_norms(module, "App a")


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    with pytest.raises(
        ValueError, match=r"norm: got one value for each channel \(1, 3\), expected more; use a larger batch"
    ):
        run_norm(random_norm((), 0.1, affine=True), torch.randn(1, 3, dtype=torch.float64), torch.ones(1))


def test_rows_of_no_sample_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"norm: got 5 rows \(5, 3\) for a batch of 4 samples, expected as many for each"
    ):
        run_norm(random_norm((), 0.1, affine=True), torch.randn(5, 3, dtype=torch.float64), torch.ones(4))


def test_a_variance_that_a_grid_rounds_below_zero_counts_as_zero() -> None:
    norm = random_norm((4,), 0.1, affine=False)
    tracked = running_statistics(norm)
    tracked["running_var"][0] = -1e-3
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    with TrackedNorms(tracked, torch.ones(3)):
        assert norm.eval()(x).isfinite().all()
    assert (run_norm(norm.train(), x, torch.ones(3, dtype=torch.float64))[1]["running_var"] >= 0.0).all()

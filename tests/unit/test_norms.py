"""``edge.export.modules.norms``: trained BatchNorm equals torch's on the samples without padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fanin.edge.export.module.norms import STATISTICS, TrackedNorm, track_norms, tracked_norms
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
    """Return (the output of a tracked norm for x, its next statistics)."""
    tracked = TrackedNorm(norm)
    tracked.begin(mask)
    for _ in range(uses):
        x = tracked(x)
    return x, tracked.finish()


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
    norm.eval()
    torch.testing.assert_close(TrackedNorm(norm)(x), norm(x), **CLOSE)


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


def test_a_pass_leaves_nothing_behind_and_an_unused_layer_reports_nothing() -> None:
    tracked = TrackedNorm(random_norm((), 0.1, affine=True))
    tracked.begin(torch.ones(2))
    assert tracked.finish() == {}
    tracked.begin(torch.ones(2, dtype=torch.float64))
    tracked(torch.randn(2, 3, dtype=torch.float64))
    assert tracked.finish().keys() == set(STATISTICS)
    assert tracked.finish() == {}


def test_only_norms_that_train_are_replaced_and_a_shared_one_stays_one() -> None:
    shared, frozen = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    module = nn.Sequential(shared, nn.Sequential(frozen, shared), nn.LayerNorm(3))
    track_norms(module, "App a")
    assert isinstance(module[0], TrackedNorm)
    assert module[1][1] is module[0]
    assert module[1][0] is frozen
    assert [name for name, _ in tracked_norms(module)] == ["0"]
    assert dict(module.named_parameters()).keys() == {
        "0.weight",
        "0.bias",
        "1.0.weight",
        "1.0.bias",
        "2.weight",
        "2.bias",
    }
    assert module[0].weight is shared.weight
    assert module[0].running_mean is shared.running_mean
    module.eval()
    assert list(tracked_norms(module)) == []


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(3), "App a: the module itself is a BatchNorm1d, expected layers around it"),
        (nn.Sequential(nn.BatchNorm1d(3, momentum=None)), r"App a: module 0 \(BatchNorm1d\) has .* momentum=None"),
        (nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), "has track_running_stats=False"),
        (nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False).eval()), "has track_running_stats=False"),
    ],
    ids=["root", "no momentum", "no statistics", "no statistics in evaluation"],
)
def test_a_norm_that_cannot_be_tracked_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        track_norms(module, "App a")


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    with pytest.raises(
        ValueError, match=r"norm: got one value for each channel \(1, 3\), expected more; use a larger batch"
    ):
        run_norm(random_norm((), 0.1, affine=True), torch.randn(1, 3, dtype=torch.float64), torch.ones(1))


def test_a_variance_that_a_grid_rounds_below_zero_counts_as_zero() -> None:
    (tracked,) = (TrackedNorm(random_norm((4,), 0.1, False)),)
    tracked.running_var[0] = -1e-3
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    assert tracked.eval()(x).isfinite().all()
    tracked.train().begin(torch.ones(3, dtype=torch.float64))
    tracked(x)
    assert (tracked.finish()["running_var"] >= 0.0).all()

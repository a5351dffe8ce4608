"""Random operators of torch with recorded values, and the random draws that an export refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.errors import raises
from support.models import NUM_CLASSES, app_of
from torch import Tensor, nn

from fanin.edge.export.module.draws import FORMS, RandomDraw, fixed_draws, recorded, refused
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.verification.ready import check_kept
from fanin.edge.runtimes.randomness import RandomKind, RandomPort, random_port
from fanin.protos.errors import UnsupportedModel

UNIFORM = torch.tensor([0.0, 0.25, 0.5, 0.875])
NORMAL = torch.tensor([-2.0, 0.0, 0.5, 1.0])
CHANCE = torch.tensor([0.5, 0.25, 0.75, 1.0])
ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (lambda: torch.rand(4), "uniform", UNIFORM),
        (lambda: torch.rand_like(ZEROS), "uniform", UNIFORM),
        (lambda: torch.empty(4).uniform_(-1.0, 3.0), "uniform", UNIFORM * 4.0 - 1.0),
        (lambda: torch.randn(4, dtype=torch.float64), "normal", NORMAL.double()),
        (lambda: torch.randn_like(ZEROS), "normal", NORMAL),
        (lambda: torch.empty(4).normal_(1.0, 2.0), "normal", NORMAL * 2.0 + 1.0),
        (lambda: torch.normal(CHANCE, 2.0), "normal", NORMAL * 2.0 + CHANCE),
        (lambda: torch.normal(1.0, CHANCE), "normal", NORMAL * CHANCE + 1.0),
        (lambda: torch.normal(ZEROS, CHANCE), "normal", NORMAL * CHANCE),
        (lambda: torch.distributions.Normal(ZEROS, CHANCE).rsample(), "normal", NORMAL * CHANCE),
        (lambda: torch.bernoulli(CHANCE), "uniform", torch.tensor([1.0, 0.0, 1.0, 1.0])),
        (lambda: torch.bernoulli(ZEROS, 0.5), "uniform", torch.tensor([1.0, 1.0, 0.0, 0.0])),
        (lambda: torch.empty(4).bernoulli_(0.3), "uniform", torch.tensor([1.0, 1.0, 0.0, 0.0])),
        (lambda: torch.empty(4).bernoulli_(CHANCE), "uniform", torch.tensor([1.0, 0.0, 1.0, 1.0])),
        (lambda: torch.empty(4).exponential_(2.0), "uniform", -torch.log(1.0 - UNIFORM) / 2.0),
        (lambda: nn.functional.dropout(CHANCE, 0.4), "uniform", CHANCE * torch.tensor([1.0, 1.0, 1.0, 0.0]) / 0.6),
        (lambda: torch.native_dropout(CHANCE, 0.4, True)[0], "uniform", CHANCE * torch.tensor([1.0, 1, 1, 0]) / 0.6),
    ],
)
def test_a_random_operator_returns_recorded_values(
    call: Callable[[], Tensor], kind: RandomKind, expected: Tensor
) -> None:
    ports: list[RandomPort] = []
    with recorded(ports):
        call()
    assert ports == [random_port(kind, 0, (4,))]
    with fixed_draws(ports, [UNIFORM if kind == "uniform" else NORMAL]):
        result = call()
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def test_draws_must_equal_those_of_an_earlier_pass() -> None:
    ports = [random_port("uniform", 0, (4,))]
    message = "normal values (4,), expected uniform values (4,) as in an earlier pass"
    with raises(RandomDraw, message), fixed_draws(ports, [UNIFORM]):
        torch.randn(4)
    message = "uniform values (2,), expected no further draw as in an earlier pass"
    with raises(RandomDraw, message), fixed_draws(ports, [UNIFORM]):
        torch.cat([torch.rand(4), torch.rand(2)])


class DrawingModule(nn.Module):
    """Adds the result of ``draw`` to the input in training mode."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.head = draw, nn.Linear(64, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        flat = x.flatten(1)
        return self.head(flat + self.draw(flat) if self.training else flat)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda flat: torch.randint(0, 2, flat.shape).float(), "draws aten.randint, expected dropout, or uniform or"),
        (
            lambda flat: flat[:, torch.randperm(64)],
            "draws aten.randperm, expected dropout, or uniform or normal values",
        ),
        (
            lambda flat: torch.randn(500, 1000, 10).mean() + torch.rand_like(flat),
            "draws normal values (500, 1000, 10), the largest draw of 20002048 bytes of random numbers in a step, exp",
        ),
    ],
    ids=["integers", "order", "size"],
)
def test_other_draws_are_refused(draw: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(UnsupportedModel) as excinfo:
        check_kept(prepare(replace(app_of("mlp"), module=DrawingModule(draw))))
    line = draw.__code__.co_firstlineno
    assert f"module itself (DrawingModule) at test_draws.py:{line} {message}" in str(excinfo.value)


def test_preparing_leaves_torchs_generator_unchanged() -> None:
    app = app_of("noisy")
    torch.manual_seed(1)
    ports = check_kept(prepare(app))
    first = torch.rand(1)
    assert [port.name for port in ports] == ["uniform.0", "uniform.1", "normal.2"]
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), first)


def test_float64_draws_the_mask_of_float32() -> None:
    # 0.9 in float32 is below 0.9 in float64.
    chance = torch.tensor([0.9], dtype=torch.float64)
    port = random_port("uniform", 0, (1,))
    with fixed_draws([port], [chance.float()]):
        assert torch.bernoulli(chance).item() == 0.0
    with fixed_draws([port], [torch.zeros(1)]):
        assert torch.rand_like(chance).dtype == torch.float64


def test_an_attention_that_drops_weights_in_evaluation_is_refused() -> None:
    query, attention = torch.ones(1, 1, 2, 2), torch.ops.aten.scaled_dot_product_attention.default
    with refused(), raises(RandomDraw, "the dropout of an attention in evaluation mode, expected none"):
        FORMS[attention](lambda kind, shape: ZEROS, query, query, query, None, 0.5)

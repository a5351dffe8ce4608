"""A pipeline runs the modules that a layout names: an App whose forward computes more is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fanin.datacenter.jobs.initial import _check_chain
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.layout import Layout, ModelSizes
from fanin.edge.export import App
from fanin.protos.errors import InvalidInput


class Net(nn.Module):
    """Blocks between two layers, with dropout and an activation that the layout may name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.act(x))


class Functional(Net):
    """The activation as a function."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        return self.last(torch.tanh(self.blocks[2](self.blocks[1](self.blocks[0](self.first(x))))))


class Reversed(Net):
    """The blocks in another order."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        return self.last(self.act(self.blocks[0](self.blocks[1](self.blocks[2](self.first(x))))))


class Failing(Net):
    """A forward with an error, which the training names."""

    def forward(self, x: Tensor) -> Tensor:
        """Raise."""
        raise KeyError("oops")


def check(module: nn.Module, outputs: tuple[str, ...]) -> None:
    sizes = ModelSizes(num_layers=3, num_heads=1, num_kv_heads=1, feed_forward=8)
    layout = Layout(sizes=sizes, inputs=("first",), layers="blocks", outputs=outputs, plan={})
    app = App(name="own", module=module, calibration=torch.randn(8, 4), batch_size=4, num_classes=3)
    _check_chain(app, TrainableModel(module=module, layout=layout))
    assert module.training


@pytest.mark.parametrize("make", [Net, Failing])
def test_a_chain_that_the_layout_names_whole_is_accepted(make: Callable[[], nn.Module]) -> None:
    check(make(), ("act", "last"))


@pytest.mark.parametrize(("make", "outputs"), [(Net, ("last",)), (Functional, ("last",)), (Reversed, ("act", "last"))])
def test_a_forward_that_computes_more_than_its_chain_is_refused(
    make: Callable[[], nn.Module], outputs: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput, match=r"differ by .* from the forward of App own, .*; name every module of the"):
        check(make(), outputs)

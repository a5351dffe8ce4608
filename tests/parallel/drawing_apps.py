"""Apps that draw random numbers in training, over rows of 8 x 16."""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.datacenter.models.seeding import seeded
from fanin.edge.export.app.app import App

HEADS = 4


class Attention(nn.Module):
    """Attention over the rows that drops weights, by torch's function or by its parts."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.drop, self.fused = nn.Dropout(0.2), fused

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        query, key, value = (
            part(x).unflatten(-1, (-1, 16 // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.fused:
            chance = self.drop.p if self.training else 0.0
            heads = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance)
        else:
            # The examples and heads share a dimension.
            weights = self.drop((query @ key.transpose(-1, -2)).softmax(-1).flatten(0, 1))
            heads = (weights @ value.flatten(0, 1)).unflatten(0, query.shape[:2])
        output: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return output


class Perceptron(nn.Module):
    """Drops values that tp splits, and values that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        return functional.dropout(self.down(self.drop(torch.relu(self.up(x)))), 0.2, self.training)


class Block(nn.Module):
    """Attention and a perceptron, which is left out for some examples."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.attention, self.perceptron, self.norm = Attention(fused=fused), Perceptron(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        x = x + self.attention(self.norm(x))
        y = self.perceptron(x)
        if self.training:
            y = y * torch.bernoulli(torch.full((len(x), 1, 1), 0.8, dtype=x.dtype))
        return x + functional.alpha_dropout(y, 0.1, self.training)


class Embedding(nn.Linear):
    """Adds noise."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        x = super().forward(x)
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Head(nn.Module):
    """Draws one number for all examples, and drops channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4)."""
        if self.training and torch.rand([]) < 0.5:
            x = 1.5 * x
        logits: Tensor = self.linear(functional.dropout1d(x, 0.2, self.training).flatten(1))
        return logits


class Net(nn.Module):
    """A module before two layers, and one after them."""

    def __init__(self, embed: nn.Module, layer: Callable[[], nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = embed, nn.ModuleList(layer() for _ in range(2)), head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4)."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def noisy_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits with noise."""
    return functional.cross_entropy(logits + 0.01 * torch.randn_like(logits), targets, reduction="none")


def _app(net: Callable[[], nn.Module]) -> App:
    with seeded(3):
        return App(name="draws", module=net(), calibration=torch.randn(8, 8, 16), batch_size=8, num_classes=4)


def fused() -> App:
    """Return an App with all kinds of draws, also in its loss."""
    return replace(_app(lambda: Net(Embedding(16, 16), lambda: Block(fused=True), Head())), loss=noisy_loss)


def plain() -> App:
    """Return an App with all kinds of draws, with attention by its parts."""
    return _app(lambda: Net(Embedding(16, 16), lambda: Block(fused=False), Head()))


def unseeded() -> App:
    """Return an App whose parameters follow torch's generator as it is."""
    net = Net(Embedding(16, 16), lambda: Block(fused=False), Head())
    return App(name="draws", module=net, calibration=torch.ones(8, 8, 16), batch_size=8, num_classes=4)


class Drawing(nn.Module):
    """A linear layer times a number that a function draws in training."""

    def __init__(self, draw: Callable[[Tensor], object], chance: float) -> None:
        super().__init__()
        self.linear, self.drop, self.draw = nn.Linear(16, 16), nn.Dropout(chance), draw

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        x = self.drop(self.linear(x))
        output: Tensor = x * self.draw(x) if self.training else x
        return output


def _drawing(draw: Callable[[Tensor], object], chance: float = 0.1) -> App:
    return _app(lambda: _net(lambda: Drawing(draw, chance)))


def _net(layer: Callable[[], nn.Module]) -> nn.Module:
    return Net(nn.Linear(16, 16), layer, nn.Sequential(nn.Flatten(), nn.Linear(128, 4)))


def python() -> App:
    return _drawing(lambda _: random.random())


def numpy() -> App:
    return _drawing(lambda _: np.random.rand())


def integers() -> App:
    return _drawing(lambda x: torch.randint(0, 3, (len(x), 1, 1)))


def own_generator() -> App:
    return _drawing(lambda x: torch.rand(len(x), 1, 1, generator=torch.Generator().manual_seed(1)))


def pairs() -> App:
    return _drawing(lambda x: torch.rand(len(x), len(x)).mean())


def sometimes() -> App:
    """Return an App with draws that the recording of a few examples does not see."""
    return _drawing(lambda x: torch.rand(len(x), 1, 1) if len(x) > 3 else 1.0)


def branching() -> App:
    """Return an App that needs values: it branches on its input."""
    return _drawing(lambda x: torch.rand(len(x), 1, 1) if float(x.detach().sum()) < 1e9 else 1.0)


def hidden() -> App:
    """Return an App that draws from a generator that nobody can see."""
    generator = np.random.default_rng()
    return _drawing(lambda _: 1.0 + (generator.random() > 0.5), chance=0.0)


def by_rank() -> App:
    """Return an App whose ranks compute other functions in training."""
    return _drawing(lambda _: 1.0 + int(os.environ.get("RANK", "0")))


class Drifting(nn.Linear):
    """A layer whose bias starts at 0. The second rank changes it in the third step, as a faulty processor would."""

    step = 0

    def __init__(self, change: float) -> None:
        super().__init__(16, 16)
        nn.init.zeros_(self.bias)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        self.step += self.training
        if self.step == 3 and os.environ.get("RANK") == "1":
            self.bias.data.add_(self.change)
        return super().forward(x)


def drifting() -> App:
    """Return an App whose copies move apart."""
    return _app(lambda: _net(lambda: Drifting(0.1)))


def rounding() -> App:
    """Return an App whose copies differ by far less than their values, but not less than a bias near 0."""
    return _app(lambda: _net(lambda: Drifting(1e-5)))


def always() -> App:
    """Return an App that draws in evaluation, too."""

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.3)

    return _app(lambda: _net(lambda: Noisy(16, 16)))


class Stack(nn.Module):
    """Skips each of its layers by a random number, as the encoders of transformers do.

    Reference:
        LayerDrop: Fan et al. 2019, arXiv 1909.11556.
    """

    def __init__(self, chance: float, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.chance, self.dropout = chance, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        for layer in self.layers:
            if not self.training or torch.rand([]) >= self.chance:
                x = functional.dropout(layer(x), self.dropout, self.training)
        return x


class Skipped(nn.Linear):
    """A layer that skips itself by a random number."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        if self.training and torch.rand(()) < 0.4:
            return x
        return x + torch.tanh(super().forward(x))


def layerdrop() -> App:
    """Return an App whose encoder skips layers, and the dropout after them."""
    return _app(lambda: nn.Sequential(Stack(0.4), nn.Flatten(), nn.Linear(128, 4)))


def skipping() -> App:
    """Return an App whose layers skip themselves."""
    return _app(lambda: _net(lambda: Skipped(16, 16)))


class Kept(nn.Linear):
    """A layer with dropout that a small random number keeps, and a large one skips."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        if self.training and not torch.bernoulli(torch.tensor(0.6)):
            return x
        return x + functional.dropout(torch.tanh(super().forward(x)), 0.1, self.training)


def keeping() -> App:
    """Return an App whose layers are kept by a small number."""
    return _app(lambda: _net(lambda: Kept(16, 16)))


def skipping_first() -> App:
    """Return an App whose first stage may have no gradient."""
    return _app(lambda: Net(nn.Identity(), lambda: Skipped(16, 16), nn.Sequential(nn.Flatten(), nn.Linear(128, 4))))


def embedded() -> App:
    """Return an App with a module before an encoder that skips layers, and without dropout between them."""
    return _app(lambda: nn.Sequential(nn.Linear(16, 16), Stack(0.4, 0.0), nn.Flatten(), nn.Linear(128, 4)))

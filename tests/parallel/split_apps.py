"""Apps that a wrong layout would train as different models."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fanin.datacenter.models.digits_app import app
from fanin.datacenter.models.seeding import seeded
from fanin.edge.export.app.app import App

HEADS = 4


class Attention(nn.Module):
    """Attention over the rows of an image.

    Args:
        fixed: Whether the forward assumes the total number of heads.
        gained: Whether a learned scalar multiplies the output of column layers, which a row layer reads.
    """

    def __init__(self, *, fixed: bool, gained: bool) -> None:
        super().__init__()
        if gained:
            self.gain = nn.Parameter(torch.ones(1))
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        heads = nn.functional.scaled_dot_product_attention(query, key, value)
        rows = heads.transpose(1, 2).flatten(2)
        out: Tensor = self.out(rows * self.gain if hasattr(self, "gain") else rows)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        shape = (HEADS, -1) if self.fixed else (-1, 16 // HEADS)
        return x.unflatten(-1, shape).transpose(1, 2)


class Recurrence(nn.Module):
    """A recurrent layer. Its output is a view whose values are in another order than its memory."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(16, 16, batch_first=True)  # type: ignore[call-arg]  # the mode is that of a subclass

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        output: Tensor = self.cell(x)[0]
        return output


class Perceptron(nn.Module):
    """Two layers with 15 values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 15), nn.Linear(15, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        output: Tensor = self.down(torch.relu(self.up(x)))
        return output


class Block(nn.Module):
    """Attention, added to its input."""

    def __init__(self, *, fixed: bool, gained: bool) -> None:
        super().__init__()
        self.attention = Attention(fixed=fixed, gained=gained)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 8, 16) to (B, 8, 16)."""
        output: Tensor = x + self.attention(x)
        return output


class Rows(nn.Module):
    """Classifies images of 8 x 8 pixels by attention over their rows.

    Args:
        fixed: See ``Attention``.
        gained: See ``Attention``.
        scaled: Whether the forward computes a function between two modules.
        noise: Size of the random numbers that it adds to the images, in evaluation too.
    """

    def __init__(self, *, fixed: bool, gained: bool, scaled: bool, noise: float) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Linear(8, 16)
            self.blocks = nn.ModuleList(Block(fixed=fixed, gained=gained) for _ in range(2))
            self.pool, self.head = nn.Flatten(), nn.Linear(128, 10)
        self.scaled, self.noise = scaled, noise

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        x = self.embed(images + self.noise * torch.rand_like(images) if self.noise else images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.pool(torch.tanh(x) if self.scaled else x))
        return logits


def _rows(name: str, *, fixed: bool = False, gained: bool = False, scaled: bool = False, noise: float = 0.0) -> App:
    module = Rows(fixed=fixed, gained=gained, scaled=scaled, noise=noise)
    images = app().inputs["x"].reshape(-1, 8, 8)
    return App(name=name, module=module, calibration=images, batch_size=16, num_classes=10)


def rows() -> App:
    """Return an App that a layout describes correctly."""
    return _rows("rows")


def fixed() -> App:
    """Return an App whose forward makes four heads of the shard of each tp rank."""
    return _rows("fixed", fixed=True)


def gained() -> App:
    """Return an App with a parameter that tp does not split, while each rank has a part of its gradient."""
    return _rows("gained", gained=True)


def scaled() -> App:
    """Return an App whose forward computes a function between two modules."""
    return _rows("scaled", scaled=True)


def noisy() -> App:
    """Return an App whose loss differs between evaluations."""
    return _rows("noisy", noise=0.5)


def _with_blocks(name: str, block: Callable[[], nn.Module]) -> App:
    """Return an App whose blocks are others than attention."""
    plain = _rows(name)
    with seeded(0):
        plain.module.blocks = nn.ModuleList(block() for _ in range(2))
    return plain


def lstm() -> App:
    """Return an App of two LSTM."""
    return _with_blocks("lstm", lambda: Recurrence(nn.LSTM))


def gru() -> App:
    """Return an App of two GRU."""
    return _with_blocks("gru", lambda: Recurrence(nn.GRU))


def odd() -> App:
    """Return an App with a width that tp=2 cannot split."""
    return _with_blocks("odd", Perceptron)

"""A mask of padded rows that an App forgets is named by the export. Without a trace."""

from dataclasses import replace

import pytest
import torch
from support.padded import LONGEST, NUM_WORDS, PADDING, Masked, padded_app
from support.tags import tags_app
from torch import Tensor, nn

from fanin.edge.export import App, Lengths, squared_error
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.verification.padding import notes_on_padding
from fanin.edge.export.verification.ready import checked
from fanin.protos.errors import UnsupportedModel


class Unmasked(nn.Module):
    """A class for each row, from the mean of all words and of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(NUM_WORDS, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, 3)."""
        logits: Tensor = self.head(self.table(ids).mean(1))
        return logits


class OneLength(Unmasked):
    """The same for all words of a row in one vector: it accepts one length only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8 * LONGEST, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, 3)."""
        logits: Tensor = self.head(self.table(ids).flatten(1))
        return logits


class Values(nn.Module):
    """A value for each position, from that position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, T)."""
        values: Tensor = self.scale(x.unsqueeze(-1)).squeeze(-1)
        return values


def rows(module: nn.Module, *sizes: int) -> App:
    """Return an App of one class for each row of words."""
    return App(
        name="rows",
        module=module,
        calibration={"ids": padded_app().inputs["ids"]},
        batch_size=4,
        num_classes=3,
        lengths=Lengths(sizes=sizes, axes={"ids": 1}, padding={"ids": PADDING}),
    )


def values(loss: object) -> App:
    """Return an App of a value for each position."""
    return App(
        name="values",
        module=Values(),
        calibration=torch.linspace(0.5, 2.0, 8 * LONGEST).reshape(8, LONGEST),
        batch_size=4,
        loss=loss,  # type: ignore[arg-type]  # one of two functions
        lengths=Lengths(sizes=(LONGEST,), axes={"x": 1, "y": 1}),
    )


def counted_error(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of the positions that are not padding."""
    is_used = (y != -1.0).float()
    return ((output - y).square() * is_used).sum(1) / is_used.sum(1)


@pytest.mark.parametrize(("sizes", "size"), [((LONGEST,), 3), ((4, LONGEST), 4)])
def test_an_output_that_depends_on_padding_is_a_note(sizes: tuple[int, ...], size: int) -> None:
    (note,) = checked(rows(Unmasked(), *sizes), ["onnx"]).notes
    assert note == (
        f"the output of a row of {size} positions changes if it is padded to 6, so the model also learns from padding; "
        "hide padding in forward, by a mask as a further input with its axis in lengths, or by x != 0"
    )


def test_a_loss_that_depends_on_padding_is_a_note() -> None:
    (note,) = notes_on_padding(prepare(values(squared_error)))
    assert note == (
        "the loss of a row of 3 positions changes if it is padded to 6, so the model also learns from padding; exclude "
        "padded positions from the loss, by the padding of y in lengths"
    )


@pytest.mark.parametrize(
    "app", [padded_app(), tags_app(), replace(padded_app(), lengths=None), values(counted_error), rows(OneLength(), 6)]
)
def test_rows_without_their_padding_have_no_note(app: App) -> None:
    assert notes_on_padding(prepare(app)) == ()


def test_a_mask_without_an_axis_is_refused() -> None:
    app = padded_app()
    without = replace(app, lengths=Lengths(sizes=(LONGEST,), axes={"ids": 1, "y": 1}, padding={"ids": PADDING}))
    assert isinstance(without.module, Masked)
    message = (
        r"lengths: got axes \{'ids': 1, 'y': 1\}, but the module accepts 3 positions only if seen has as many; add "
        r"'seen': 1 to axes\n"
    )
    with pytest.raises(UnsupportedModel, match=message):
        checked(without, ["onnx"])

"""Figures as a notebook shows them, and that of a partition. No other module imports matplotlib at its top."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

MAX_LABELS: Final = 20
"""More labels have no colours that an eye can tell apart."""
SIZE_INCHES: Final = (8.0, 4.5)


class ShownFigure(Figure):
    """A figure that a notebook shows as the value of a cell.

    IPython shows a plain ``Figure`` only after an import of ``matplotlib.pyplot``. That module would also keep each
    figure until the user closes it.
    """

    def _repr_png_(self) -> bytes:
        """Return the picture for IPython."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def new_figure() -> tuple[Figure, Axes]:
    """Return an empty figure with one pair of axes."""
    figure = ShownFigure(figsize=SIZE_INCHES, layout="constrained")
    return figure, figure.add_subplot()


def save_figure(figure: Figure, path: Path | str | None) -> None:
    """Write a figure in the format of the file's suffix; None writes nothing.

    Raises:
        InvalidInput: matplotlib does not know the format.
    """
    if path is not None:
        check_figure_file(path)
        figure.savefig(path)


def check_figure_file(path: Path | str) -> None:
    """Raise InvalidInput unless matplotlib knows the format of a file's suffix and its folder exists."""
    figure, _ = new_figure()
    known = sorted(figure.canvas.get_supported_filetypes())
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise InvalidInput(
            f"plot: got the file {path}, expected a name that ends in one of: {', '.join(known)}", code="FN-1146"
        )
    if not Path(path).parent.is_dir():
        raise InvalidInput(
            f"plot: {path} cannot be written, {Path(path).parent} is not a folder; create it", code="FN-1146"
        )


def plot_partition(sizes: Sequence[int], counts: Int64s | None, num_examples: int, path: Path | str | None) -> Figure:
    """Draw the examples of each client. See ``Partition.plot``.

    Args:
        sizes: The examples of each client.
        counts: Those of each label (clients, labels); None if the targets are no labels.
        num_examples: Examples of the data set.
        path: The file to write; None writes none.
    """
    figure, axes = new_figure()
    clients = np.arange(len(sizes))
    if counts is None or counts.shape[1] > MAX_LABELS:
        axes.bar(clients, sizes, width=1.0)
    else:
        colours, below = _colours(counts.shape[1]), np.zeros(len(sizes))
        for label, column in enumerate(counts.T):
            axes.bar(clients, column, bottom=below, width=1.0, color=colours[label], label=str(label))
            below += column
        axes.legend(title="label", fontsize="small", ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("client")
    axes.set_ylabel("examples")
    axes.set_title(f"{counted(num_examples, 'example')} of {counted(len(sizes), 'client')}")
    save_figure(figure, path)
    return figure


def _colours(num: int) -> list[tuple[float, float, float, float]]:
    colours = colormaps["tab20" if num > 10 else "tab10"]
    return [colours(index) for index in range(num)]

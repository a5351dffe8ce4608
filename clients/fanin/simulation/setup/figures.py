"""Figures as a notebook shows them. This is the only module that imports matplotlib at its top."""

import io
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fanin.protos.errors import InvalidInput

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
        raise InvalidInput(f"plot: got the file {path}, expected a name that ends in one of: {', '.join(known)}")
    if not Path(path).parent.is_dir():
        raise InvalidInput(f"plot: {path} cannot be written, {Path(path).parent} is not a folder; create it")

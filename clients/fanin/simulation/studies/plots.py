"""Plots of results, drawn with matplotlib (the extra ``plots``).

Figures are created without pyplot, so drawing needs no display and leaves no global state. A notebook shows a returned
Figure.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fanin.simulation.rows import RoundRow
    from fanin.simulation.studies.baseline import BaselineRow
    from fanin.simulation.studies.seeds import SpreadRow


class HasRounds(Protocol):
    """The part of a ``Result`` that ``plot_results`` draws."""

    @property
    def rounds(self) -> "Sequence[RoundRow]": ...


class HasSpread(Protocol):
    """The part of a ``Result`` that ``plot_rounds`` draws."""

    @property
    def spread(self) -> "Sequence[SpreadRow]": ...

    @property
    def baseline(self) -> "Sequence[BaselineRow]": ...


def plot_rounds(result: "HasSpread", path: Path | str | None) -> "Figure":
    """Draw the Rounds of a result, the spread of its seeds and its baseline. See ``Result.plot``."""
    from fanin.simulation.data.figures import new_figure, save_figure

    figure, axes = new_figure()
    rows, baseline = result.spread, result.baseline
    _line(axes, rows, "train_loss", "C0--", "training loss")
    axes.set_xlabel("round")
    axes.set_ylabel("loss, nats")
    _line(axes, rows, "test_loss", "C0-", "test loss")
    if any(math.isfinite(row.test_loss) for row in baseline):
        axes.plot([row.round for row in baseline], [row.test_loss for row in baseline], "C2-", label="centralized loss")
    handles, names = axes.get_legend_handles_labels()
    if any(math.isfinite(row.mean["test_accuracy"]) for row in rows):
        right = axes.twinx()
        _line(right, rows, "test_accuracy", "C1-", "test accuracy")
        _line(right, rows, "test_accuracy_int8", "C1:", "test accuracy, int8")
        if baseline:
            accuracies = [row.test_accuracy for row in baseline]
            right.plot([row.round for row in baseline], accuracies, "C3-", label="centralized accuracy")
        right.set_ylabel("accuracy")
        right.set_ylim(0.0, 1.0)
        more_handles, more_names = right.get_legend_handles_labels()
        handles, names = handles + more_handles, names + more_names
    # Below the axes it covers no curve.
    figure.legend(handles, names, fontsize="small", loc="outside lower center", ncols=3)
    save_figure(figure, path)
    return figure


def _line(axes: "Axes", rows: "Sequence[SpreadRow]", column: str, form: str, label: str) -> None:
    """Draw the mean of a column and, of several seeds, a band of one standard deviation. Rows without it are left out.

    A simulation may evaluate each n-th Version only.
    """
    rows = [row for row in rows if math.isfinite(row.mean[column])]
    if not rows:
        return
    rounds, means = [row.round for row in rows], [row.mean[column] for row in rows]
    axes.plot(rounds, means, form, label=label)
    if all(math.isfinite(row.std[column]) for row in rows):
        low = [row.mean[column] - row.std[column] for row in rows]
        high = [row.mean[column] + row.std[column] for row in rows]
        axes.fill_between(rounds, low, high, color=form[:2], alpha=0.2, linewidth=0.0)


def plot_results(results: "Mapping[str, HasRounds]", path: Path | str | None = None) -> object:
    """Draw several results in one figure: test accuracy over the Rounds, or the loss if there is no accuracy.

    Args:
        results: The results by name, such as ``{"FedAvg": first, "FedProx": second}``.
        path: The file to write, in the format of its suffix. None writes none.

    Returns:
        The matplotlib Figure, which a notebook shows.

    Raises:
        InvalidInput: There is no result, or matplotlib does not know the format.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not results:
        raise InvalidInput("plot: got no results, expected at least one", code="FN-1147")
    rows = {name: result.rounds for name, result in results.items()}
    columns = ("test_accuracy", "test_loss")
    column = next((each for each in columns if all(_finite(one, each) for one in rows.values())), "train_loss")
    from fanin.simulation.data.figures import new_figure, save_figure

    figure, axes = new_figure()
    for name, each in rows.items():
        shown = _finite(each, column)
        axes.plot([row.round for row in shown], [getattr(row, column) for row in shown], label=name)
    axes.set_xlabel("round")
    axes.set_ylabel(column.replace("_", " "))
    axes.legend(fontsize="small")
    save_figure(figure, path)
    return figure


def _finite(rounds: "Sequence[RoundRow]", column: str) -> "list[RoundRow]":
    return [row for row in rounds if math.isfinite(getattr(row, column))]

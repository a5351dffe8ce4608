"""The plot of one result, drawn with matplotlib (the extra ``plots``).

Figures are created without pyplot, so drawing needs no display and leaves no global state. A notebook shows a returned
Figure.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fanin.simulation.studies.baseline import BaselineRow
    from fanin.simulation.studies.seeds import SpreadRow


OF_SETS: Final = "metrics."
ACCURACY: Final = ".accuracy"


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
        # The first named test set is the test data.
        sets = [name for name in rows[0].mean if name.startswith(OF_SETS) and name.endswith(ACCURACY)][1:]
        for index, name in enumerate(sets):
            label = name.removeprefix(OF_SETS).removesuffix(ACCURACY)
            _line(right, rows, name, f"C{4 + index % 6}-", f"test accuracy, {label}")
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


def plot_shares(columns: "Mapping[str, Sequence[float]]", metric: str, path: Path | str | None) -> "Figure":
    """Draw the distribution of a metric over the clients. See ``Result.plot_per_client``."""
    from fanin.simulation.data.figures import new_figure, save_figure

    figure, axes = new_figure()
    for part, form in (("global", "C0-"), ("personal", "C1-")):
        values = sorted(value for value in columns.get(f"{part}.{metric}", ()) if math.isfinite(value))
        if values:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step([values[0], *values], [0.0, *shares], form, where="post", label=f"{part} model")
    if not axes.lines:
        known = sorted({name.partition(".")[2] for name in columns if "." in name})
        raise InvalidInput(
            f"plot: got the metric {metric!r}, expected one of {known} that clients have; set client_test in the "
            "settings for test examples of each client",
            code="FN-1838",
        )
    axes.set_xlabel(metric)
    axes.set_ylabel("share of the clients with at most this value")
    axes.set_ylim(0.0, 1.0)
    axes.legend(fontsize="small")
    save_figure(figure, path)
    return figure


def _line(axes: "Axes", rows: "Sequence[SpreadRow]", column: str, form: str, label: str) -> None:
    """Draw the mean of a column and, of several seeds, a band of one standard deviation. Rows without it are left out.

    A simulation may evaluate each n-th Version only.
    """
    rows = [row for row in rows if math.isfinite(row.mean.get(column, math.nan))]
    if not rows:
        return
    rounds, means = [row.round for row in rows], [row.mean[column] for row in rows]
    axes.plot(rounds, means, form, label=label)
    if all(math.isfinite(row.std[column]) for row in rows):
        low = [row.mean[column] - row.std[column] for row in rows]
        high = [row.mean[column] + row.std[column] for row in rows]
        axes.fill_between(rounds, low, high, color=form[:2], alpha=0.2, linewidth=0.0)

"""A Round as one line of at most 100 characters, and as the cells of a row.

The accuracy is that of the Version with which the Round began, on the validation parts of the Round's devices. All
else of a Round, such as digests and spreads, is in ``event_text`` and in the JSON.
"""

import math
from dataclasses import dataclass
from typing import Final

from fanin.edge.runtimes.evaluations import OF_GLOBAL, OF_PERSONAL, validation_means
from fanin.protos.messages import VersionPublished
from fanin.protos.texts import counted, epsilon_text, lasted, sized

MAX_LINE: Final = 100
COLUMNS: Final = (
    ("round", 6),
    ("devices", 8),
    ("loss", 9),
    ("accuracy", 9),
    ("int8", 7),
    ("seconds", 8),
    ("down", 9),
    ("up", 9),
)
"""The columns of a row with their widths, the most important ones first. Each is preceded by a space."""
MISSING: Final = "-"
ACCURACY: Final = "accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    """The numbers of a Round that one line has.

    Attributes:
        version: The event of its Version.
        num_devices: Devices whose Updates it accepted; None if that is not known.
    """

    version: VersionPublished
    num_devices: int | None

    @property
    def loss(self) -> float:
        """The mean training loss of the devices, or without one the validation loss; NaN without both."""
        if self.version.train_loss_examples:
            return self.version.train_loss
        return math.nan if self.version.evaluation is None else self.version.evaluation.loss

    @property
    def accuracies(self) -> tuple[str, str]:
        """The accuracy in float and in int8. Without labels, only what int8 costs is known."""
        evaluation = self.version.evaluation
        if evaluation is None:
            return "", ""
        if evaluation.has_labels:
            return f"{evaluation.accuracy_float:.4f}", f"{evaluation.accuracy_int8:.4f}"
        rise = evaluation.int8_rise_percent
        return "", "" if rise is None else f"{rise:+.2f} %"

    def text(self) -> str:
        """Return the line. With the accuracy of two models, or absurd numbers, it may lack the bytes."""
        version, (in_float, in_int8) = self.version, self.accuracies
        parts = [f"round {version.round:3d}"]
        if self.num_devices is not None:
            parts.append(counted(self.num_devices, "device"))
        if not math.isnan(self.loss):
            parts.append(f"loss {self.loss:#.4g}")
        if in_float:
            parts.append(f"accuracy {in_float} int8 {in_int8}")
        elif in_int8:
            parts.append(f"int8 {in_int8}")
        means = validation_means(version.statistics, version.statistics_examples)
        if OF_GLOBAL + ACCURACY in means and OF_PERSONAL + ACCURACY in means:
            parts.append(f"global {means[OF_GLOBAL + ACCURACY]:.4f} own {means[OF_PERSONAL + ACCURACY]:.4f}")
        if version.privacy is not None:
            parts.append(f"epsilon {epsilon_text(version.privacy.epsilon, 3)} of {version.privacy.budget:g}")
            parts += [f"clip {version.privacy.clip_norm:.3g}"] if version.privacy.clip_norm else []
        parts.append(lasted(version.round_s))
        sizes = f"{sized(version.bytes_down)} down {sized(version.bytes_up)} up"
        line = "  ".join([*parts, sizes])
        return line if len(line) <= MAX_LINE else "  ".join(parts)[:MAX_LINE]

    def cells(self) -> tuple[str, ...]:
        """Return the row, a cell for each of ``COLUMNS``."""
        version, (in_float, in_int8) = self.version, self.accuracies
        devices = MISSING if self.num_devices is None else str(self.num_devices)
        loss = MISSING if math.isnan(self.loss) else f"{self.loss:#.4g}"
        sizes = (sized(version.bytes_down), sized(version.bytes_up))
        return (
            *(str(version.round), devices, loss, in_float or MISSING, in_int8 or MISSING),
            *(lasted(version.round_s), *sizes),
        )


def row_text(cells: tuple[str, ...], columns: int) -> tuple[tuple[str, str], ...]:
    """Return the cells that a terminal of this width has room for, right-aligned, each with its style."""
    spans: list[tuple[str, str]] = []
    used = 0
    for (name, width), cell in zip(COLUMNS, cells, strict=True):
        used += width + 1
        if used > columns:
            break
        style = "bold" if name in ("accuracy", "int8") else "dim" if name in ("down", "up") else ""
        spans.append((f" {cell:>{width}}", style))
    return tuple(spans)

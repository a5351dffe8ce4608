"""The Rounds of a simulation as TensorBoard event files.

The writer is that of tensorboardX, which needs only numpy and protobuf. It is not an extra, as in ``fanin.datacenter``:
the CSV files have the same numbers.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fanin.protos.errors import RuntimeMissing
from fanin.simulation.rows import RoundRow, cells


class ScalarWriter(Protocol):
    """The part of a TensorBoard ``SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write one number."""
        ...

    def close(self) -> object:
        """Close the files."""
        ...


def check_board(module: str = "tensorboardX") -> None:
    """Raise RuntimeMissing unless tensorboardX is installed."""
    if find_spec(module) is None:
        raise RuntimeMissing(f"TensorBoard: {module} is not installed here; pip install tensorboardX", code="FN-1105")


def open_board(folder: Path | str, module: str = "tensorboardX") -> ScalarWriter:
    """Return a writer of event files in a folder. Raises RuntimeMissing if tensorboardX is not installed."""
    check_board(module)
    writer: ScalarWriter = import_module(module).SummaryWriter(str(folder))
    return writer


def write_scalars(rounds: Sequence[RoundRow], writer: ScalarWriter) -> None:
    """Write each finite number of each Round under its column's name, and close the writer."""
    for row in rounds:
        for name, value in cells(row).items():
            if name not in ("seed", "round") and math.isfinite(value):
                writer.add_scalar(name, float(value), row.round)
    writer.close()

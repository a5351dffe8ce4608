"""Sinks of step records: JSON lines, a status line on a terminal, and TensorBoard.

Each sink implements ``meters.Sink``. Nothing here imports torch.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from io import TextIOBase
from pathlib import Path
from typing import Final, Protocol, TextIO

from fanin.datacenter.watch.meters import StepRecord
from fanin.protos.errors import RuntimeMissing

KILO: Final = 1000.0
SUFFIXES: Final = ("", "k", "M", "G", "T", "P")


class JsonLines:
    """A file with one JSON object per record. Each line is flushed before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: StepRecord) -> None:
        """Append a line."""
        self._file.write(json.dumps(asdict(row), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StatusLine:
    """A status line: overwritten on a terminal, and appended every ``every_s`` seconds to any other stream."""

    def __init__(
        self,
        out: TextIO | TextIOBase,
        num_steps: int = 0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._num_steps = num_steps
        self._every_s = every_s
        self._clock = clock
        self._last_write_s: float | None = None
        self._width = 0

    def write(self, row: StepRecord) -> None:
        """Show a record. Outside of a terminal, most records are skipped."""
        if self._out.isatty():
            text = format_record(row, self._num_steps)
            self._out.write(f"\r{text:{self._width}}")
            self._width = len(text)
            self._out.flush()
            return
        now_s, last = self._clock(), row.step + 1 == self._num_steps
        if last or self._last_write_s is None or now_s - self._last_write_s >= self._every_s:
            self._last_write_s = now_s
            self._out.write(format_record(row, self._num_steps) + "\n")

    def close(self) -> None:
        """End the line."""
        if self._width:
            self._out.write("\n")
            self._width = 0


def format_record(row: StepRecord, num_steps: int = 0) -> str:
    """Return a record as one line of text, without its unknown values."""
    of = f"/{num_steps}" if num_steps else ""
    loss = "skipped" if row.loss is None else f"loss {row.loss:.4f}"
    parts = [f"step {row.step + 1}{of}", loss, f"{format_number(row.tokens_per_second)} tokens/s"]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    parts.append(f"{format_number(row.peak_memory_bytes)}B")
    parts.append(f"data {row.data_seconds / row.seconds:.0%}")
    if row.waiting_share is not None:
        parts.append(f"waiting {row.waiting_share:.0%}")
    parts += [f"{axis} {format_number(size)}B" for axis, size in row.bytes_by_axis.items() if size]
    return "  ".join(parts)


def format_number(number: float) -> str:
    """Return a number with three digits and an SI suffix."""
    value, index = float(number), 0
    while abs(value) >= KILO and index < len(SUFFIXES) - 1:
        value, index = value / KILO, index + 1
    return f"{value:.3g}{SUFFIXES[index]}" if abs(value) < KILO else f"{value:.0f}{SUFFIXES[index]}"


class Writer(Protocol):
    """The methods of a TensorBoard writer that ``TensorBoard`` calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record a number."""

    def close(self) -> None:
        """Close the event file."""


class TensorBoard:
    """A sink that writes each number of a record under its own tag."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, row: StepRecord) -> None:
        """Write all known numbers of a record."""
        for name, value in asdict(row).items():
            if isinstance(value, dict):
                for axis, size in value.items():
                    self._writer.add_scalar(f"{name}/{axis}", float(size), row.step)
            elif value is not None and name != "step":
                self._writer.add_scalar(name, float(value), row.step)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def check_tensorboard(module: str = "tensorboardX") -> None:
    """Raise RuntimeMissing unless the library that writes TensorBoard event files is installed."""
    if find_spec(module) is None:
        raise RuntimeMissing(f"TensorBoard: {module} is not installed here; pip install tensorboardX", code="FN-1105")


def open_tensorboard(folder: Path, module: str = "tensorboardX") -> TensorBoard:
    """Return a sink that writes TensorBoard event files into a folder.

    tensorboardX needs only numpy and protobuf, which are installed anyway. It is not a requirement, because the JSON
    lines hold the same numbers.

    Raises:
        RuntimeMissing: The library is not installed.
    """
    check_tensorboard(module)
    return TensorBoard(import_module(module).SummaryWriter(str(folder)))

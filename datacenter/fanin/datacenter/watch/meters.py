"""What is seen while a model trains: one Row a step, and where rows go.

A Row is made by the rank that tells (``Meter``) and given to sinks: a line that a person reads, JSON lines,
TensorBoard. Nothing here speaks to other ranks or imports torch; time, and how
memory is looked at, are given.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from io import TextIOBase
from pathlib import Path
from typing import Final, Protocol, TextIO

from fanin.datacenter.watch.timeline import Timeline, waiting_share
from fanin.protos.errors import InvalidInput, RuntimeMissing

DATA: Final = "data"
STEP: Final = "step"
KILO: Final = 1000.0
SUFFIXES: Final = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step. ``loss`` and ``gradient_norm`` are None where they are not finite; ``tokens_per_second`` of all ranks;
    ``mfu`` by the definition of ``flops``, None without a known peak; ``data_seconds`` waiting for input; ``gain``
    AdaScale's; ``waiting_share`` of a pipeline's time; ``bytes_by_axis`` payload of a rank."""

    step: int
    loss: float | None
    seconds: float
    tokens_per_second: float
    data_seconds: float
    peak_memory_bytes: int
    mfu: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    gain: float | None = None
    waiting_share: float | None = None
    bytes_by_axis: Mapping[str, int] = field(default_factory=dict)


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Take a row."""

    def close(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a rate is compared with; 0.0: unknown. ``pipelined``: whether ranks wait for each other in a pipeline."""

    num_ranks: int = 1
    flops_per_token: float = 0.0
    peak_flops_per_second: float = 0.0
    pipelined: bool = False


class Meter:
    """Makes rows of what a Timeline has noted under ``data`` and ``step``::

    with timeline.phase(DATA):
        batch = next(batches)
    with timeline.phase(STEP):
        stepped = engine.step(batch)
        loss = float(stepped.loss)            # a GPU's step is over when its loss is here
    meter.tell(loss, num_tokens)
    """

    def __init__(
        self, timeline: Timeline, scale: Scale, sinks: Sequence[Sink], peak_memory: Callable[[], int] | None = None
    ) -> None:
        self.timeline = timeline
        self.scale = scale
        self.sinks = sinks
        self.bytes_by_axis: Mapping[str, int] = {}
        """What a step sends: all steps send the same, so one is counted, by a ByteCounter, and told here."""
        self._peak_memory = peak_memory or peak_resident_bytes

    def tell(
        self,
        loss: float | None,
        num_tokens: int,
        norm: float | None = None,
        learning_rate: float | None = None,
        gain: float | None = None,
    ) -> Row:
        """The row of the step that ends here; ``num_tokens`` over all ranks, without padding."""
        step = self.timeline.step
        seconds = self.timeline.next_step()
        data_s, whole_s = seconds.get(DATA, 0.0), seconds.get(STEP, 0.0)
        if whole_s <= 0:
            raise InvalidInput(f"meter: got no time under {STEP!r} in step {step}, expected timeline.phase({STEP!r})")
        rate = num_tokens / (data_s + whole_s)
        scale = self.scale
        known = scale.peak_flops_per_second * scale.num_ranks
        row = Row(
            step=step,
            loss=loss,
            seconds=data_s + whole_s,
            tokens_per_second=rate,
            data_seconds=data_s,
            peak_memory_bytes=self._peak_memory(),
            mfu=scale.flops_per_token * rate / known if known > 0 and scale.flops_per_token > 0 else None,
            gradient_norm=norm,
            learning_rate=learning_rate,
            gain=gain,
            waiting_share=waiting_share(seconds, whole_s) if scale.pipelined else None,
            bytes_by_axis=dict(self.bytes_by_axis),
        )
        for sink in self.sinks:
            sink.write(row)
        return row

    def close(self) -> None:
        """No step follows."""
        for sink in self.sinks:
            sink.close()


def peak_resident_bytes() -> int:
    """The most memory that this process has had (a CPU's; a GPU's allocator is asked by its owner)."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in kilobytes, macOS in bytes.
    return found if sys.platform == "darwin" else found * 1024


class JsonLines:
    """One JSON object a row; each is on its way to the disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Row) -> None:
        """Append a line."""
        self._file.write(json.dumps(asdict(row), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Progress:
    """A line that is written over on a terminal, and every ``every_s`` seconds a line of its own elsewhere."""

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
        self._told_s: float | None = None
        self._width = 0

    def write(self, row: Row) -> None:
        """Show a row, if it is time."""
        if self._out.isatty():
            text = line(row, self._num_steps)
            self._out.write(f"\r{text:{self._width}}")
            self._width = len(text)
            self._out.flush()
            return
        now_s, last = self._clock(), row.step + 1 == self._num_steps
        if last or self._told_s is None or now_s - self._told_s >= self._every_s:
            self._told_s = now_s
            self._out.write(line(row, self._num_steps) + "\n")

    def close(self) -> None:
        """End the line."""
        if self._width:
            self._out.write("\n")
            self._width = 0


def line(row: Row, num_steps: int = 0) -> str:
    """A row in one line; what is not known is left out."""
    of = f"/{num_steps}" if num_steps else ""
    loss = "loss not finite" if row.loss is None else f"loss {row.loss:.4f}"
    parts = [f"step {row.step + 1}{of}", loss, f"{short(row.tokens_per_second)} tokens/s"]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    parts.append(f"{short(row.peak_memory_bytes)}B")
    parts.append(f"data {row.data_seconds / row.seconds:.0%}")
    if row.waiting_share is not None:
        parts.append(f"waiting {row.waiting_share:.0%}")
    parts += [f"{axis} {short(size)}B" for axis, size in row.bytes_by_axis.items() if size]
    return "  ".join(parts)


def short(number: float) -> str:
    """A number in three digits and a suffix of thousands."""
    value, index = float(number), 0
    while abs(value) >= KILO and index < len(SUFFIXES) - 1:
        value, index = value / KILO, index + 1
    return f"{value:.3g}{SUFFIXES[index]}" if abs(value) < KILO else f"{value:.0f}{SUFFIXES[index]}"


class Writer(Protocol):
    """What a TensorBoard writer has, as far as it is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Note a number."""

    def close(self) -> None:
        """Nothing more comes."""


class TensorBoard:
    """Each number of a row under a tag of its own."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, row: Row) -> None:
        """Note all numbers that are known."""
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
    """Raise RuntimeMissing where the library that writes TensorBoard's event files is not installed."""
    if find_spec(module) is None:
        raise RuntimeMissing(f"TensorBoard: {module} is not installed here; pip install tensorboardX")


def open_tensorboard(folder: Path, module: str = "tensorboardX") -> TensorBoard:
    """A sink that writes TensorBoard's event files. Raises RuntimeMissing where the library is not installed.

    tensorboardX writes them with no more than numpy and protobuf, which are here already; it is no requirement, since
    JSON lines have the same numbers.
    """
    check_tensorboard(module)
    return TensorBoard(import_module(module).SummaryWriter(str(folder)))

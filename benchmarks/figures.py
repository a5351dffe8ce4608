"""The figures that ``ratchet.py`` holds, and the command that measures each in a tree of sources.

Every figure is a ratio within one run, or a time in units of the calibration loop, so records of two machines can be
compared. ``noise`` is the change between two runs of one commit that a quiet machine does not exceed.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from fanin.commands.bench.memory import GATE as MEMORY_GATE
from fanin.commands.bench.rounds import GATE_AGAINST_BARE

Report = Mapping[str, Any]
FANIN: Final = ("-m", "fanin.commands.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a measurement.

    Attributes:
        what: The quantity, for the table.
        read: Returns the number from the report of the command and the seconds of the calibration loop.
        noise: The relative change that is not a result.
        gate: The bound of the budget, None if the budget has another unit.
        is_speed: Whether a larger number is better.
    """

    what: str
    read: Callable[[Report, float], float]
    noise: float
    gate: float | None = None
    is_speed: bool = False

    def worsening(self, now: float, before: float) -> float:
        """Return by how much ``now`` is worse than ``before``, relative; below 0 if it is better."""
        return (before / now if self.is_speed else now / before) - 1.0

    def passes(self, value: float) -> bool:
        """Return whether a number passes the gate."""
        return self.gate is None or (value >= self.gate if self.is_speed else value <= self.gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A command of Python that writes its report to the file after ``--json``, and the figures in the report."""

    words: tuple[str, ...]
    figures: Mapping[str, Figure]
    repeats: int = 2


def calibration_s() -> float:
    """Return the seconds of a fixed loop: digests, additions of arrays and interpreted code, like a coordinator's."""
    values, total = np.arange(1 << 18), 0
    data = values.tobytes()
    started_s = time.perf_counter()
    for number in range(60_000):
        total += number % 7
    for _ in range(4):
        hashlib.sha256(data).digest()
        values = values + 1
    return time.perf_counter() - started_s


def _memory(clients: int) -> Measurement:
    figure = Figure(
        what=f"coordinator's memory over idle, {clients} clients, models",
        read=lambda report, _: float(report["peak_rss_over_idle_models"]),
        noise=0.06,
        gate=MEMORY_GATE,
    )
    words = (*FANIN, "bench", "memory", "--clients", str(clients), "--megabytes", "64")
    return Measurement(words=words, figures={f"memory-{clients}": figure}, repeats=2 if clients < 16 else 1)


def _train_step(model: str, gate: float) -> Figure:
    return Figure(
        what=f"train step of {model}, eager torch / onnxruntime",
        read=lambda report, _: float(report["models"][model]["runtimes"]["onnx"]["train_speed_up"]),
        noise=0.15,
        gate=gate,
        is_speed=True,
    )


def _check_ins(kind: str) -> Figure:
    key = f"{kind}_coordinator_cpu_seconds_per_check_in"
    return Figure(
        what=f"processor time of a check-in, {kind} connection, loops",
        read=lambda report, loop_s: float(report[key]) / loop_s,
        noise=0.15,
    )


MEASUREMENTS: Final[Mapping[str, Measurement]] = MappingProxyType(
    {
        "rounds": Measurement(
            words=(*FANIN, "bench", "rounds", "--clients", "4", "--megabytes", "16", "--rounds", "9"),
            figures={
                "rounds": Figure(
                    what="Round of 4 x 16 MB / bare stream",
                    read=lambda report, _: float(report["ratio_to_bare"]),
                    noise=0.15,
                    gate=GATE_AGAINST_BARE,
                )
            },
            repeats=3,
        ),
        "memory-4": _memory(4),
        "memory-64": _memory(64),
        "machine": Measurement(
            words=("benchmarks/machine.py",),
            figures={
                "machine": Figure(
                    what="1,000 events of the round machine, loops",
                    read=lambda report, loop_s: float(report["event_us"]) / loop_s / 1e3,
                    noise=0.2,
                )
            },
        ),
        "fold": Measurement(
            words=("benchmarks/fold.py",),
            figures={
                "fold": Figure(
                    what="fold / np.add, speed",
                    read=lambda report, _: float(report["best_speed_over_numpy_add"]),
                    noise=0.15,
                    gate=0.8,
                    is_speed=True,
                )
            },
            repeats=3,
        ),
        "restart": Measurement(
            words=("benchmarks/restart.py", "--clients", "16", "--restarts", "5"),
            figures={
                "restart": Figure(
                    what="restart to serving, 16 x 16 MB open, loops",
                    read=lambda report, loop_s: float(report["seconds_to_serving"]) / loop_s,
                    noise=0.2,
                )
            },
        ),
        "checkins": Measurement(
            words=(*FANIN, "bench", "checkins", "--devices", "12000"),
            figures={"checkins-kept": _check_ins("kept"), "checkins-new": _check_ins("new")},
        ),
        "edge": Measurement(
            words=(
                *("benchmarks/edge.py", "--models", "mlp", "cnn", "--runtimes", "onnx"),
                *("--starts", "1", "--epochs", "0", "--rounds", "3"),
            ),
            figures={
                "train-step-mlp": _train_step("mlp", 2.5),
                "train-step-cnn": _train_step("cnn", 2.5),
                "device-memory": Figure(
                    what="memory of a device in training / import of torch",
                    read=lambda report, _: float(
                        report["memory"]["onnx"]["peak_rss_mb"] / report["memory"]["importing_torch_mb"]
                    ),
                    noise=0.06,
                ),
            },
        ),
        "export": Measurement(
            words=("benchmarks/export.py", "--models", "cnn-545k"),
            figures={
                "export": Figure(
                    what="export of a CNN / import of torch, processor time",
                    read=lambda report, _: float(
                        report["rows"][0]["processor_seconds"] / report["importing_torch_processor_seconds"]
                    ),
                    noise=0.15,
                )
            },
            # The first run reads the libraries of the formats from a cold disk: the median pair must be another one.
            repeats=3,
        ),
        "simulation": Measurement(
            words=("benchmarks/simulation.py", "--only", "torch,fanin", "--rounds", "8"),
            figures={
                "simulation": Figure(
                    what="plain torch loop / simulated Round, speed",
                    read=lambda report, _: float(
                        report["seconds_per_round"]["torch"] / report["seconds_per_round"]["fanin"]
                    ),
                    noise=0.2,
                    gate=1.2,
                    is_speed=True,
                )
            },
        ),
    }
)
FIGURES: Final[Mapping[str, Figure]] = MappingProxyType(
    {name: figure for measurement in MEASUREMENTS.values() for name, figure in measurement.figures.items()}
)

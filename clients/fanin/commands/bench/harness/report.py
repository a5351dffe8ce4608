"""The report of a benchmark: lines of text, or one JSON object; medians with all samples.

Keys name the quantity and its unit. The samples of ``x`` are under ``x_samples``.
"""

import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from fanin.commands.console.terminal import prints_text, write_json

LIBRARIES: Final = ("grpcio", "numpy", "cryptography")
CPU_INFO: Final = Path("/proc/cpuinfo")


def sampled(name: str, samples: Sequence[float]) -> dict[str, object]:
    """Return a row with the median under ``name`` and the samples."""
    return {name: statistics.median(samples), f"{name}_samples": list(samples)}


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the sample below which ``percent`` of the samples are."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def machine() -> dict[str, object]:
    """Return the row that describes this machine."""
    return {
        "cpu_model": _cpu_model(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def write_report(row: Mapping[str, object], json: str) -> None:
    """Write the results as JSON, and also as text unless the JSON is written to standard output."""
    if json:
        write_json(json, {**row, "machine": machine()})
    if prints_text(json):
        width = max(map(len, row)) + 2
        for key, value in row.items():
            if not key.endswith("_samples"):
                sys.stdout.write(f"{key:{width}}{_text(value)}\n")


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:.4g}"
        case int():
            return f"{value:,}"
        case Mapping():
            return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
        case _:
            return str(value)


def _cpu_model() -> str:
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

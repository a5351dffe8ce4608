"""The results of ``edge.py`` as tables, compared with the gates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

MIN_SPEED_UP: Final = MappingProxyType(
    {"mlp": 3.0, "mlp-small": 3.0, "cnn": 2.0, "attention": 1.3, "attention-small": 1.3, "ds-cnn": 1.0}
)
"""Train step in onnxruntime: eager torch's time over its."""
MAX_PEAK_RSS_MB: Final = MappingProxyType({"tflite": 80.0, "litert": 85.0, "onnx": 100.0})
MAX_INSTALLED_MB: Final = MappingProxyType({"tflite": 150.0})
MAX_DROP_POINTS: Final = 0.5
GRAPHS: Final = ("train", "evaluate", "infer", "whole")
Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One budget: the measured value, its bound, and whether the gate passes.

    A ratio is reported for the medians and for the minima, and both must be within the bound. If they differ, the
    machine was busy with something else.
    """

    what: str
    found: float
    bound: float
    kept: bool
    found_of_minima: float | None = None


def gates(results: Results) -> list[dict[str, object]]:
    """Return every budget that this benchmark measures."""
    return [asdict(gate) for gate in _gates(results)]


def _gates(results: Results) -> Iterator[Gate]:
    for model, bound in MIN_SPEED_UP.items():
        row = results["models"].get(model, {}).get("runtimes", {}).get("onnx")
        if row is not None:
            ratio, of_minima = row["train_speed_up"], row["train_speed_up_of_minima"]
            what = f"{model}: train step, eager / onnx"
            passes = min(ratio, of_minima) >= bound
            yield Gate(what=what, found=ratio, bound=bound, kept=passes, found_of_minima=of_minima)
    for runtime, bound in MAX_PEAK_RSS_MB.items():
        if runtime in results.get("memory", {}):
            mb = results["memory"][runtime]["peak_rss_mb"]
            yield Gate(what=f"{runtime}: device's peak RSS, MB", found=mb, bound=bound, kept=mb <= bound)
    for runtime, bound in MAX_INSTALLED_MB.items():
        if runtime in results["environments"]:
            mb = results["environments"][runtime]["installed_without_installer_and_bytecode_mb"]
            yield Gate(what=f"{runtime}: environment, MB", found=mb, bound=bound, kept=mb <= bound)
    for runtime in MAX_PEAK_RSS_MB:
        if runtime in results.get("accuracy", {}):
            drop = results["accuracy"][runtime]["drop_points"]
            what = f"{runtime}: int8 under float, points"
            yield Gate(what=what, found=drop, bound=MAX_DROP_POINTS, kept=drop <= MAX_DROP_POINTS)


def text_of(results: Results) -> str:
    """Return the report as text."""
    parts = [_steps(results["models"]), _sizes(results["models"]), _environments(results)]
    if "accuracy" in results:
        parts.append(_accuracy(results["accuracy"]))
    if "memory" in results:
        parts.append(_memory(results["memory"]))
    parts.append(_gate_table(results["gates"]))
    return "\n\n".join(parts) + "\n"


def _steps(models: Results) -> str:
    head = [
        "model",
        "runtime",
        "train ms",
        "(min)",
        "eager /",
        "(min)",
        "float ms",
        "int8 1",
        "int8 batch",
        "start ms",
        "RSS",
    ]
    rows = []
    for model, results in models.items():
        for name, row in {"eager": results["eager"], **results["runtimes"]}.items():
            times = [row[kind]["median_ms"] for kind in ("evaluate", "predict_one", "predict_batch")]
            rows.append(
                [
                    model,
                    name,
                    f"{row['train']['median_ms']:.3f}",
                    f"{row['train']['min_ms']:.3f}",
                    *(
                        f"{row[key]:.2f}" if key in row else ""
                        for key in ("train_speed_up", "train_speed_up_of_minima")
                    ),
                    *(f"{ms:.3f}" for ms in times),
                    f"{row['start_up_ms']:.0f}",
                    f"{row['peak_rss_training_mb']:.0f}",
                ]
            )
    return _table(head, rows)


def _sizes(models: Results) -> str:
    rows = [
        [model, graph_format, *(f"{sizes[name] / 1e3:.1f}" for name in GRAPHS)]
        for model, results in models.items()
        for graph_format, sizes in results["size_bytes"].items()
    ]
    return _table(["model", "kB in", *GRAPHS], rows)


def _environments(results: Results) -> str:
    rows = [
        [name, f"{row['installed_mb']:.1f}", f"{row['installed_without_installer_and_bytecode_mb']:.1f}"]
        for name, row in results["environments"].items()
    ]
    return _table(["environment", "MB", "without pip, setuptools and bytecode"], rows)


def _accuracy(results: Results) -> str:
    rows = [
        [name, *(f"{100 * row[key]:.2f}" for key in ("accuracy_float", "accuracy_int8")), f"{row['drop_points']:.2f}"]
        for name, row in results.items()
        if isinstance(row, dict)
    ]
    return _table([f"{results['model']} on {results['dataset']}", "float %", "int8 %", "points lost"], rows)


def _memory(results: Results) -> str:
    rows = [
        [f"fanin join, {name}", f"{row['peak_rss_mb']:.1f}", f"{row['importing_join_mb']:.1f}"]
        for name, row in results.items()
        if isinstance(row, dict)
    ]
    rows.append(["import torch", f"{results['importing_torch_mb']:.1f}", ""])
    return _table(["peak RSS", "MB", "of that, imports without the runtime"], rows)


def _gate_table(results: Sequence[Results]) -> str:
    rows = [
        [
            row["what"],
            f"{row['found']:.2f}",
            "" if row["found_of_minima"] is None else f"{row['found_of_minima']:.2f}",
            f"{row['bound']:g}",
            "pass" if row["kept"] else "MISS",
        ]
        for row in results
    ]
    return _table(["gate", "found", "(of minima)", "bound", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

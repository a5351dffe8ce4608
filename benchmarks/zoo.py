"""The zoo: models as people have them, each exported in a process of its own and trained in three runtimes.

    python benchmarks/zoo.py --json FILE              (tflite-runtime: `make devices`)
    python benchmarks/zoo.py --models bert,unet --runtimes onnx
    python benchmarks/zoo.py --list

The file has the key ``models``, a list with an object for each model:

- ``parameters``: the number of values that learn.
- ``export_seconds``, ``export_processor_seconds``: of the export in all formats with its verification, in a new process
  whose torch is imported. ``load`` is the machine's load (1 minute) when it ended.
- ``peak_memory_bytes``: peak memory of that process and its forks together (``tree_memory``).
- ``bundle_bytes``: size of the Bundle's folder.
- ``parity``: by runtime, the largest difference of a parameter from eager torch's after 20 train steps on the same
  batches with the same random numbers. For each tensor it is the L2 norm of the difference relative to the L2 norm of
  eager torch's tensor, as in the verification of an export. A tensor whose root mean square is below 0.01 counts as if
  it were 0.01: a bias that only rounding moves has almost no norm.
- ``parity_of_float64``: the same difference between eager torch in float64 and in float32, for comparison.
- ``parity_of_shaken``: the same difference if eager torch begins with parameters that differ by 1e-7 of themselves. A
  model that amplifies this ends elsewhere in every runtime.
- ``moved``: the same difference between eager torch's parameters after the steps and before.
- ``int8_agreement``: the share of predictions of the int8 ``infer`` graph that equal float's after these steps, on data
  that did not calibrate it; the least of the runtimes. A value agrees if it differs by less than a tenth of the
  standard deviation of all values. ``int8_agreement_by_runtime`` has each.
- ``accuracy``: of the float model on the same data: the share of right classes, or of the variance explained.
- ``train_ms``: median time of a train step by runtime and in eager torch, on one thread, alternating.
- ``train_step_over_eager``: onnxruntime's over eager torch's.
- ``error``, ``errors``: present if an export or a runtime failed. The other models are not affected.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from edge_children import (
    BENCHMARKS,
    EAGER,
    ENVIRONMENTS,
    WORKING_TREE,
    Child,
    child,
    make_environments,
    python_of,
)
from zoo_export import BUNDLE, NUM_STEPS, PUBLISHER, ROW
from zoo_models import MODELS

from fanin.edge.bundles.bundle import open_folder
from fanin.edge.tensors import Float32s, TensorTable

FORMAT_OF: Final = {"onnx": "onnx", "litert": "tflite", "tflite": "tflite"}
LEAST_RMS: Final = 0.01
"""Least root mean square to which the difference of a tensor is relative."""
NUM_TIMED: Final = 30
WARM_UP: Final = 3
NUM_ROUNDS: Final = 5
EXPORT_LIMIT_S: Final = 1800.0
ModelRow = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options = parser().parse_args(argv)
    if options.list:
        sys.stdout.write("".join(f"{name}\n" for name in MODELS))
        return 0
    names, runtimes = options.models.split(","), options.runtimes.split(",")
    for what, selection, known in (("models", names, MODELS), ("runtimes", runtimes, ENVIRONMENTS)):
        if unknown := [name for name in selection if name not in known]:
            parser().error(f"--{what}: got {','.join(unknown)}, expected some of {','.join(known)}")
    make_environments(runtimes)
    rows: list[ModelRow] = []
    sys.stdout.write(head(runtimes))
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fanin-zoo-") as folder:
            rows.append(measured(name, Path(folder), runtimes, options.limit))
        sys.stdout.write(line_of(rows[-1], runtimes))
        sys.stdout.flush()
        if options.json:
            # After each model: what is measured survives an interrupt.
            Path(options.json).write_text(json.dumps({"num_steps": NUM_STEPS, "models": rows}, indent=1) + "\n")
    return int(any("error" in row or row.get("errors") for row in rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    options = argparse.ArgumentParser(description="Models x runtimes: export, parity, int8 and time of a train step.")
    options.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    options.add_argument("--runtimes", default=",".join(ENVIRONMENTS), metavar="NAME,...")
    options.add_argument(
        "--limit",
        type=float,
        default=EXPORT_LIMIT_S,
        metavar="SECONDS",
        help="of one export, after which it fails (1800)",
    )
    options.add_argument("--list", action="store_true", help="list the models, and do nothing else")
    options.add_argument("--json", metavar="FILE", default="")
    return options


def measured(name: str, folder: Path, runtimes: Sequence[str], limit_s: float) -> ModelRow:
    """Export one model and train it in each runtime. Errors are a part of the row."""
    formats = sorted({FORMAT_OF[runtime] for runtime in runtimes})
    row: ModelRow = {"name": name}
    with ExitStack() as stack:
        try:
            eager = stack.enter_context(child([sys.executable, str(BENCHMARKS / "zoo_eager.py"), name, str(folder)]))
        except (RuntimeError, OSError) as exc:
            return row | {"error": f"the training before the export: {exc}"}
        row |= {**exported(name, folder, formats, limit_s), "load": os.getloadavg()[0]}
        usable = [runtime for runtime in runtimes if FORMAT_OF[runtime] in row.get("formats", ())]
        return row | (trained(name, folder, eager, usable) if usable else {})


def exported(name: str, folder: Path, formats: Sequence[str], limit_s: float) -> ModelRow:
    """Export a model in a child process. Return its row."""
    command = [sys.executable, str(BENCHMARKS / "zoo_export.py"), name, str(folder), *formats]
    try:
        completed = subprocess.run(
            command, env=os.environ | WORKING_TREE, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the export took more than {limit_s:g} s"}
    file = folder / ROW
    if not file.exists():
        return {"error": f"the export ended with status {completed.returncode}: {completed.stderr[-1000:]}"}
    row: ModelRow = json.loads(file.read_text())
    return row


def trained(name: str, folder: Path, eager: Child, runtimes: Sequence[str]) -> ModelRow:
    """Train an exported model in eager torch and in each runtime. Return parity, int8's agreement and times."""
    bundle = open_folder(folder / BUNDLE, trusted=[PUBLISHER.public])
    table, initial = bundle.manifest.table, bundle.initial_parameters()
    answers: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, str] = {}
    script, rate = str(BENCHMARKS / "zoo_device.py"), str(MODELS[name].learning_rate)
    with ExitStack() as stack:
        try:
            eager.ask("steps")
        except (RuntimeError, OSError) as exc:
            return {"errors": {EAGER: str(exc)}}
        children = {EAGER: eager}
        for runtime in runtimes:
            command = [str(python_of(runtime)), script, runtime, PUBLISHER.public, rate, str(folder)]
            try:
                children[runtime] = stack.enter_context(child(command))
                answers[runtime] = children[runtime].ask("steps")
            except (RuntimeError, OSError) as exc:
                children.pop(runtime, None)
                errors[runtime] = str(exc)
        train_ms = timed(children)
    steps, exact, shaken = (np.load(folder / f"{kind}.npy") for kind in ("eager", "exact", "shaken"))
    devices = [runtime for runtime in runtimes if runtime in answers]
    row: ModelRow = {
        "parity": {runtime: difference(table, np.load(folder / f"{runtime}.npy"), steps) for runtime in devices},
        "parity_of_float64": difference(table, exact, steps),
        "parity_of_shaken": difference(table, shaken, steps),
        "moved": difference(table, initial, steps),
        "int8_agreement_by_runtime": {runtime: answers[runtime]["int8_agreement"] for runtime in devices},
        "int8_agreement": min((answers[runtime]["int8_agreement"] for runtime in devices), default=None),
        "accuracy": max((answers[runtime]["accuracy"] for runtime in devices), default=None),
        "train_ms": train_ms,
    }
    if "onnx" in train_ms:
        row["train_step_over_eager"] = train_ms["onnx"] / train_ms[EAGER]
    return row | ({"errors": errors} if errors else {})


def timed(children: Mapping[str, Child]) -> dict[str, float]:
    """Return the median milliseconds of a train step of each child. The children alternate."""
    samples: dict[str, list[float]] = {name: [] for name in children}
    for each in children.values():
        each.timed_ms("train", WARM_UP)
    for _ in range(NUM_ROUNDS):
        for name, each in children.items():
            samples[name] += each.timed_ms("train", NUM_TIMED // NUM_ROUNDS)
    return {name: median(times_ms) for name, times_ms in samples.items()}


def difference(table: TensorTable, actual: Float32s, expected: Float32s) -> float:
    """Return the largest relative L2 difference of a tensor; see this module."""
    largest, offset = 0.0, 0
    for row in table.specs:
        size = int(np.prod(row.shape))
        a, b = (flat[offset : offset + size].astype(np.float64) for flat in (actual, expected))
        norm = max(float(np.linalg.norm(b)), LEAST_RMS * size**0.5)
        largest, offset = max(largest, float(np.linalg.norm(a - b)) / norm), offset + size
    return largest


def head(runtimes: Sequence[str]) -> str:
    """Return the head of the table, in Markdown."""
    columns = ["model", "parameters", "export, s", "peak, MB", "Bundle, kB", *runtimes, "float64", "shaken"]
    columns += ["int8 agrees", "step / eager"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"


def line_of(row: ModelRow, runtimes: Sequence[str]) -> str:
    """Return a row of the table, in Markdown."""
    if "parity" not in row:
        return f"| {row['name']} | {row.get('error') or row.get('errors')} |\n"
    parity = [f"{row['parity'][name]:.1e}" if name in row["parity"] else "-" for name in runtimes]
    ratio = f"{row['train_step_over_eager']:.2f}" if "train_step_over_eager" in row else "-"
    cells = [
        *(row["name"], f"{row['parameters']:,}", f"{row['export_seconds']:.1f}"),
        *(f"{row['peak_memory_bytes'] / 1e6:.0f}", f"{row['bundle_bytes'] / 1e3:.0f}"),
        *(
            *parity,
            f"{row['parity_of_float64']:.1e}",
            f"{row['parity_of_shaken']:.1e}",
            f"{100 * row['int8_agreement']:.1f} %",
            ratio,
        ),
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

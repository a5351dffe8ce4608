"""The cost of the edge: each model in each runtime compared with eager torch, install sizes, and memory.

    python benchmarks/edge.py --json FILE          (int8's accuracy on Fashion-MNIST: see FANIN_DATA; else on digits)

The benchmark creates the devices' environments if they are missing (``make devices``), and exports every model to a
Bundle in both formats. Child processes in those environments, and one with torch, then alternate train steps,
evaluations and predictions on one thread each. A short training compares float with int8. A federation with one device
of each runtime measures the memory of a device. The report ends with the gates.

Times depend on the load of the machine, so ratios compare only measurements of the same minutes. ``float`` is the
``evaluate`` Signature on a batch; in eager torch it is a forward pass. ``int8`` is ``infer``; in eager torch it is the
float model. ``start`` is the time from the start of a process to the end of its first train step.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edge_children import EAGER, ENVIRONMENTS, device_command, eager_command, installed_mb, make_environments
from edge_children import measure_in_turn as in_turn
from edge_fleet import PUBLISHER, accuracy, memory
from edge_models import MODELS, app_of, examples_of
from edge_report import gates, text_of

from fanin.edge.bundles.bundle import MANIFEST_FILE, Bundle, open_folder
from fanin.edge.export import export


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options = parser().parse_args(argv)
    make_environments(options.runtimes)
    with tempfile.TemporaryDirectory(prefix="fanin-edge-") as temporary:
        folder = Path(options.keep or temporary)
        for name in options.models:
            export_model(name, folder / name)
        results: dict[str, Any] = {
            "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
            "environments": {runtime: installed_mb(runtime) for runtime in options.runtimes},
            "models": {name: measured(name, folder / name, options) for name in options.models},
        }
        if options.epochs:
            results["accuracy"] = accuracy(options.runtimes, fresh(folder / "accuracy"), options.epochs)
        if options.rounds:
            with tempfile.TemporaryDirectory(prefix="fanin-edge-memory-") as place:
                results["memory"] = memory(options.runtimes, Path(place), options.rounds)
    results["gates"] = gates(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(text_of(results))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    options = argparse.ArgumentParser(description="Models x runtimes: time, memory, sizes and accuracy at the edge.")
    options.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options.add_argument("--runtimes", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    options.add_argument("--steps", type=int, default=60, help="of each kind that are timed, after a warm-up (60)")
    options.add_argument("--starts", type=int, default=3, help="of each child, whose median is reported (3)")
    options.add_argument(
        "--epochs", type=int, default=3, help="of training before accuracy is measured; 0: leave it out"
    )
    options.add_argument("--rounds", type=int, default=5, help="of the federation for memory; 0: leave it out (5)")
    options.add_argument("--keep", metavar="DIR", default="", help="keep Bundles there, and use those that are there")
    options.add_argument("--json", metavar="FILE", default="")
    return options


def export_model(name: str, folder: Path) -> None:
    """Export a model's Bundle in both formats, and write its batches next to it."""
    if (folder / MANIFEST_FILE).exists():
        return
    say(f"exporting {name}")
    export(app_of(name), folder, PUBLISHER)
    examples = examples_of(name)
    np.savez(examples_file(folder), x=examples.inputs["x"], y=examples.y)


def examples_file(folder: Path) -> Path:
    """Return the path of a Bundle's batches."""
    return folder.with_suffix(".npz")


def measured(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in eager torch and in each runtime, and the sizes of its files."""
    say(f"measuring {name}")
    commands = {EAGER: eager_command(name)}
    for runtime in options.runtimes:
        commands[runtime] = device_command(runtime, folder, PUBLISHER.public, examples_file(folder))
    rows: dict[str, Any] = dict(in_turn(commands, options.steps, options.starts))
    eager = rows.pop(EAGER)
    for row in rows.values():
        row["train_speed_up"] = eager["train"]["median_ms"] / row["train"]["median_ms"]
        row["train_speed_up_of_minima"] = eager["train"]["min_ms"] / row["train"]["min_ms"]
        say(f"  {row['runtime']}: {row['train']['median_ms']:.3f} ms, eager {eager['train']['median_ms']:.3f} ms")
    return {"eager": eager, "runtimes": rows, "size_bytes": sizes(open_folder(folder, trusted=[PUBLISHER.public]))}


def sizes(bundle: Bundle) -> dict[str, dict[str, int]]:
    """Return the bytes of each Signature's file and of everything that a device needs, by graph format.

    TFLite has one file for all Signatures.
    """
    manifest = bundle.manifest
    sizes_of: dict[str, dict[str, int]] = {}
    for graph_format in ("onnx", "tflite"):
        files = {name: signature.graphs[graph_format] for name, signature in manifest.signatures.items()}
        needed = {*files.values(), manifest.initial}
        sizes_of[graph_format] = {name: manifest.artifacts[file].size_bytes for name, file in files.items()}
        sizes_of[graph_format]["whole"] = len(bundle.signed.data) + sum(
            manifest.artifacts[file].size_bytes for file in needed
        )
    return sizes_of


def fresh(folder: Path) -> Path:
    """Return a folder, created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(text: str) -> None:
    """Write progress to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the edge costs: each model in each runtime beside eager torch, the devices' environments, and their memory.

    python benchmarks/edge.py --json FILE          (int8's accuracy on Fashion-MNIST: see FANIN_DATA; else on digits)

It makes the devices' environments if they are missing (``make devices``), exports every model to a Bundle in both
formats, and lets children in those environments, and one with torch, take train steps, evaluate and predict in turn,
on one thread each. Then it trains a model for a short while and compares float with int8, and runs a federation with
one device of each runtime to see how much memory a device takes. At the end stand the gates.

Times are of one machine while it did whatever else it did: ratios are between what ran in the same minutes. ``float``
is the ``evaluate`` Signature on a batch (in eager torch a forward pass), int8 is ``infer`` (in eager torch the float
model); ``start`` is from the start of a process to the end of its first train step.
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
    """The command."""
    options = parser().parse_args(argv)
    make_environments(options.runtimes)
    with tempfile.TemporaryDirectory(prefix="fanin-edge-") as temporary:
        folder = Path(options.keep or temporary)
        for name in options.models:
            export_model(name, folder / name)
        found: dict[str, Any] = {
            "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
            "environments": {runtime: installed_mb(runtime) for runtime in options.runtimes},
            "models": {name: measured(name, folder / name, options) for name in options.models},
        }
        if options.epochs:
            found["accuracy"] = accuracy(options.runtimes, fresh(folder / "accuracy"), options.epochs)
        if options.rounds:
            with tempfile.TemporaryDirectory(prefix="fanin-edge-memory-") as place:
                found["memory"] = memory(options.runtimes, Path(place), options.rounds)
    found["gates"] = gates(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(text_of(found))
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description="Models x runtimes: time, memory, sizes and accuracy at the edge.")
    made.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    made.add_argument("--runtimes", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    made.add_argument("--steps", type=int, default=60, help="of each kind that are timed, after a warm-up (60)")
    made.add_argument("--starts", type=int, default=3, help="of each child, whose median is told (3)")
    made.add_argument("--epochs", type=int, default=3, help="of training before accuracy is measured; 0: leave it out")
    made.add_argument("--rounds", type=int, default=5, help="of the federation for memory; 0: leave it out (5)")
    made.add_argument("--keep", metavar="DIR", default="", help="keep Bundles there, and use those that are there")
    made.add_argument("--json", metavar="FILE", default="")
    return made


def export_model(name: str, folder: Path) -> None:
    """A model's Bundle in both formats, and its batches beside it."""
    if (folder / MANIFEST_FILE).exists():
        return
    say(f"exporting {name}")
    export(app_of(name), folder, PUBLISHER)
    examples = examples_of(name)
    np.savez(examples_file(folder), x=examples.x, y=examples.y)


def examples_file(folder: Path) -> Path:
    """Where a Bundle's batches lie."""
    return folder.with_suffix(".npz")


def measured(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One model: eager torch, each runtime, and the sizes of its files."""
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
    """Bytes of each Signature's file and of all that a device needs, by graph format; TFLite has one file for all."""
    manifest = bundle.manifest
    found = {}
    for graph_format in ("onnx", "tflite"):
        files = {name: signature.graphs[graph_format] for name, signature in manifest.signatures.items()}
        needed = {*files.values(), manifest.initial}
        found[graph_format] = {name: manifest.artifacts[file].size_bytes for name, file in files.items()}
        found[graph_format]["whole"] = len(bundle.signed.data) + sum(
            manifest.artifacts[file].size_bytes for file in needed
        )
    return found


def fresh(folder: Path) -> Path:
    """The folder, made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

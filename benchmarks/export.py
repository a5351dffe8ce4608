"""The cost of an export: processor seconds, wall seconds and peak memory, for models and graph formats.

    python benchmarks/export.py --models cnn-545k --formats onnx
    python benchmarks/export.py --models cnn-545k --check

Each model is exported, or checked as ``fanin export --check`` does, twice in one process. The first row of the first
model includes the imports of the formats' libraries, as ``fanin export`` does. The import of torch is not included.
``--json FILE`` writes the numbers, with the processor seconds of that import in a process of its own. Processor seconds
include child processes. They depend on the load of the machine less than wall seconds. Peak memory is
that of the process and its fork together (``tree_memory``).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from edge_fleet import PUBLISHER
from edge_models import MODELS, app_of
from torch import nn
from tree_memory import peak_memory

from fanin.edge.export import App, check_app, export

CNN: Final = "cnn-545k"
"""Two convolutions and two linear layers for 28 x 28 images, 544,375 parameters."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description="Seconds and memory of exports.")
    options.add_argument("--models", nargs="*", choices=[CNN, *MODELS], default=["mlp", "cnn"])
    options.add_argument("--formats", nargs="+", choices=["onnx", "tflite"], default=["onnx", "tflite"])
    options.add_argument("--check", action="store_true", help="check the App, and write nothing")
    options.add_argument("--json", metavar="FILE", default="")
    arguments = options.parse_args(argv)
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        for which in ("first", "second"):
            app = _cnn() if name == CNN else app_of(name)
            with peak_memory() as peak_bytes, tempfile.TemporaryDirectory(prefix="fanin-export-cost-") as folder:
                processor_s, wall_s = _processor_s(), time.monotonic()
                if arguments.check:
                    assert not check_app(app, arguments.formats), "every model of the benchmark can be exported"
                else:
                    export(app, Path(folder) / "bundle", PUBLISHER, arguments.formats)
                # Before the sampler of the memory ends, whose time then counts.
                processor_s, wall_s = _processor_s() - processor_s, time.monotonic() - wall_s
                peak_mb = peak_bytes() / 1e6
            rows.append({"model": name, "processor_seconds": processor_s, "wall_seconds": wall_s, "peak_mb": peak_mb})
            sys.stdout.write(
                f"{name} {'+'.join(arguments.formats)} {'check ' if arguments.check else ''}{which}: "
                f"processor {processor_s:.1f} s, wall {wall_s:.1f} s, peak {peak_mb:.0f} MB\n"
            )
            sys.stdout.flush()
    if arguments.json:
        report = {"rows": rows, "importing_torch_processor_seconds": _importing_torch_s()}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _importing_torch_s() -> float:
    """Return the processor seconds of a process that imports torch: the lesser of two, because the first one reads."""
    code = "import time, torch; print(time.process_time())"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(2))


def _cnn() -> App:
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 167), nn.ReLU(), nn.Linear(167, 10)),
    )
    return App(name=CNN, module=module, calibration=torch.randn(64, 1, 28, 28), batch_size=16, num_classes=10)


def _processor_s() -> float:
    """Return the processor seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The cost of an export: processor seconds, wall seconds and peak memory, for models and graph formats.

    python benchmarks/export.py --models mlp cnn --formats onnx

Each model is exported twice in one process: the first export also imports the libraries of its format. Processor
seconds include child processes. They depend on the load of the machine less than wall seconds.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from edge_fleet import PUBLISHER
from edge_models import MODELS, app_of

from fanin.edge.export import export


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description="Seconds and memory of exports.")
    options.add_argument("--models", nargs="*", choices=MODELS, default=["mlp", "cnn"])
    options.add_argument("--formats", nargs="+", choices=["onnx", "tflite"], default=["onnx", "tflite"])
    arguments = options.parse_args(argv)
    for name in arguments.models:
        for which in ("first", "second"):
            processor_s, wall_s = _processor_s(), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="fanin-export-cost-") as folder:
                export(app_of(name), Path(folder) / "bundle", PUBLISHER, arguments.formats)
            processor_s, wall_s = _processor_s() - processor_s, time.monotonic() - wall_s
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            sys.stdout.write(
                f"{name} {'+'.join(arguments.formats)} {which}: processor {processor_s:.1f} s, wall {wall_s:.1f} s, "
                f"peak {peak_mb:.0f} MB\n"
            )
            sys.stdout.flush()
    return 0


def _processor_s() -> float:
    """Return the processor seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The zoo: models as their packages ship them, each exported and trained in a process of its own.

    make zoo                                                  (all models; ARGS="--models bert,unet" for some)
    .venv/bin/python benchmarks/zoo.py --json FILE
    .venv/bin/python benchmarks/zoo.py --table FILE           (the table of earlier rows; measure nothing)

The packages are in an environment of their own, ``.venv-zoo``, in the versions of ``.ci/constraints-zoo.txt``. Modules
have random parameters and the defaults of their package. Only input sizes, widths and numbers of classes differ, and
the settings that a row names.

The file has a JSON object a line for each model, in the order of their ends:

- ``package``, ``version``, ``model``, ``settings``, ``parameters``.
- ``formats``: by graph format, either ``refusal``, the code and text of the error, or these keys:
- ``errors``: by runtime, the largest difference of a parameter or buffer from eager torch's after a train step. It is
  the largest of five steps, and each begins from torch's own state, so that no error grows from step to step. For each
  tensor it is the L2 norm of the difference relative to the L2 norm of torch's tensor. A tensor whose root mean square
  is below 0.01 counts as if it were 0.01: a bias that only rounding moves has almost no norm. ``tensors`` names the
  tensors.
- ``float64``: the same difference between torch in float64 and in float32, for the same steps.
- ``shaken``: the same difference if torch begins a step with parameters that differ by 1e-7 of themselves, the larger
  of two trials. An input of a ReLU near zero, or two values that compete for a maximum, decide otherwise then.
- ``int8``: the root mean square of the difference between int8 and torch after the five steps, on inputs that did not
  calibrate int8, relative to the standard deviation of torch's predictions. ``int8_at_export`` is that before the
  steps. Both have the scales of the export.
- ``seconds``, ``export_seconds``: of the format, and of its export alone.
- ``failure``: instead of ``formats``, if the process ended without a row or exceeded its time limit.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from edge_children import BENCHMARKS, ROOT, WORKING_TREE, make_environments
from zoo_sequences import SEQUENCES
from zoo_vision import VISION

ENVIRONMENT: Final = ROOT / ".venv-zoo"
MODELS: Final = (*VISION, *SEQUENCES)
FORMATS: Final = ("onnx", "tflite")
RUNTIMES: Final = ("onnx", "litert", "tflite")
LIMIT_S: Final = 900.0
COLUMNS: Final = (
    *("package", "model", "onnxruntime", "LiteRT", "tflite-runtime", "float64", "shaken"),
    *("int8 at export", "int8 after steps", "with fresh scales", "ONNX, s", "TFLite, s"),
)
GAPS: Final = ("int8_at_export", "int8", "int8_fresh")
ModelRow = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if a model is refused or fails."""
    options = _parser().parse_args(argv)
    if options.table:
        rows = [json.loads(line) for line in Path(options.table).read_text().splitlines()]
        sys.stdout.write(table(rows))
        return 0
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        _parser().error(f"--models: got {','.join(unknown)}, expected some of {','.join(MODELS)}")
    make_environments(RUNTIMES)
    if not (ENVIRONMENT / ".installed").exists():
        subprocess.run(["make", "--silent", f"{ENVIRONMENT.name}/.installed"], cwd=ROOT, check=True, stdout=sys.stderr)
    rows = []
    with ThreadPoolExecutor(options.workers) as pool:
        for future in as_completed([pool.submit(measured, name, options.limit) for name in names]):
            rows.append(future.result())
            sys.stderr.write(f"{line_of(rows[-1])}\n")
            if options.json:
                with Path(options.json).open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    sys.stdout.write(table(rows))
    return int(any("failure" in row or any("refusal" in each for each in row["formats"].values()) for row in rows))


def measured(name: str, limit_s: float) -> ModelRow:
    """Return the row of one model, from a process of its own."""
    command = [str(ENVIRONMENT / "bin" / "python"), str(BENCHMARKS / "zoo_model.py"), name, *FORMATS]
    # Otherwise, the seconds of a repeated export would be those of the cache.
    env = os.environ | WORKING_TREE | {"FANIN_GRAPH_CACHE": "off"}
    row: ModelRow = {"package": {**VISION, **SEQUENCES}[name].package, "model": name}
    try:
        completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return row | {"failure": f"took more than {limit_s:g} s"}
    if completed.returncode:
        return row | {"failure": f"ended with status {completed.returncode}: {completed.stderr[-1000:]}"}
    return dict(json.loads(completed.stdout.splitlines()[-1]))


def table(rows: Iterable[ModelRow]) -> str:
    """Return the rows in Markdown, in the order of MODELS."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [line_of(row) for row in sorted(rows, key=lambda row: MODELS.index(row["model"]))]
    return "".join(f"{line}\n" for line in lines)


def line_of(row: ModelRow) -> str:
    """Return a row in Markdown."""
    name = f"{row['model']}, {row['settings']}" if row.get("settings") else row["model"]
    if "failure" in row:
        return f"| {row['package']} | {name} | {row['failure']} |"
    formats = [row["formats"][each] for each in FORMATS]
    merged = {key: {k: v for each in formats for k, v in each.get(key, {}).items()} for key in ("errors", *GAPS)}
    codes = [each["refusal"].partition(":")[0] if "refusal" in each else "-" for each in formats]
    cells = [
        *(_number(merged["errors"].get(runtime)) or codes[runtime != "onnx"] for runtime in RUNTIMES),
        *(_number(max((each[key] for each in formats if key in each), default=None)) for key in ("float64", "shaken")),
        *(_percent(list(merged[key].values())) for key in GAPS),
        *(f"{each['seconds']:.0f}" for each in formats),
    ]
    return f"| {row['package']} | {name} | {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _percent(values: Sequence[float]) -> str:
    return f"{100 * max(values):.1f} %" if values else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Stock models of packages: export, parity of five steps, int8.")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="models at the same time (2)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=f"of one model ({LIMIT_S:g})")
    parser.add_argument("--json", metavar="FILE", default="", help="receives each row when its model ends")
    parser.add_argument("--table", metavar="FILE", default="", help="print the table of these rows")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

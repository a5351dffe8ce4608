"""Simulated federations: seconds a round of fanin, of pfl-research, of Flower and of a plain loop in torch.

    python benchmarks/simulation.py --json FILE                       # the CNN: 1,000 users x 60 images, cohort 50
    python benchmarks/simulation.py --load logistic --json FILE       # logistic regression, cohort 10
    python benchmarks/simulation.py --only fanin,torch --rounds 20
    python benchmarks/simulation.py --device cuda --only fanin,torch,pfl
    python benchmarks/simulation.py --repeats 5 --json FILE           # medians of 5 runs, and their spread

All systems train the same module on the same images with the same settings: FedAvg, one local epoch, batches of 10, SGD
with a learning rate of 0.1. Each runs by itself, in an environment of its own next to that of this repository, which is
created on first use. fanin runs in each of its forms: engine and number of processes. The images are those of
Fashion-MNIST, from ``FANIN_DATA``.

With ``--device cuda``, the train steps of fanin, torch and pfl run on a GPU.

The JSON has for each system and each form of fanin:

- ``seconds_per_round``: median of the Rounds after the first, which loads libraries.
- ``total_seconds``: the process from its start to its end, with imports, the start-up of the federation and all Rounds.
- ``accuracy``: on the test images, after the last Round.

With ``--repeats`` each number is the median over the runs of a system, and ``spreads`` has the smallest and the largest
one. The runs are interleaved: each system runs once before any system runs again, so a slower machine slows all.

The key ``fanin`` in each of them is the form with the fastest Round, which ``fanin_form`` names.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "simulated"))
from load import Load

ROOT: Final = Path(__file__).parents[1]
SCRIPTS: Final = Path(__file__).parent / "simulated"
LOADS: Final = {
    "cnn": Load(users=1000, samples=60, cohort=50, rounds=100, batch_size=10, learning_rate=0.1, model="cnn"),
    "logistic": Load(users=1000, samples=60, cohort=10, rounds=100, batch_size=10, learning_rate=0.1, model="logistic"),
}
PACKAGES: Final = {
    "pfl": ("pfl==0.5.2", "torch==2.13.0"),
    "flower": ("flwr[simulation]==1.41.0", "torch==2.13.0"),
}
FANIN: Final = "fanin"
FORMS: Final = {
    "cpu": {"graph": ("graph", "1"), "graph x2": ("graph", "2"), "vmap": ("vmap", "1")},
    "cuda": {"vmap:cuda": ("vmap:cuda", "1")},
}
"""The forms of fanin by device: engine and number of processes."""
GATES: Final = {"cnn": {"pfl": 5.0, "flower": 100.0}}
"""How many times as long as fanin a Round of another system takes at least."""


COLUMNS: Final = ("seconds_per_round", "total_seconds", "accuracy")
"""The numbers of a row, and of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurement of one run of a system. The module's docstring describes the numbers."""

    seconds_per_round: float
    total_seconds: float
    accuracy: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if fanin misses a gate."""
    options = _parser().parse_args(argv)
    load = LOADS[options.load]
    load = replace(load, rounds=options.rounds or load.rounds, device=options.device)
    names = options.only.split(",") if options.only else ["torch", FANIN, *PACKAGES]
    labels = [label for name in names for label in labels_of(name, load.device)]
    rows: dict[str, list[Row]] = {label: [] for label in labels}
    with tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        _write_data(load, Path(folder))
        for label in labels * options.repeats:
            row = _row(label, load, Path(folder), options.environments)
            rows[label].append(row)
            sys.stdout.write(
                f"{label:16} {row.seconds_per_round:8.3f} s a round, {row.total_seconds:7.1f} s in total, "
                f"accuracy {row.accuracy:.4f}\n"
            )
            sys.stdout.flush()
    report = report_of(rows, load)
    if options.repeats > 1:
        sys.stdout.write(f"medians of {options.repeats} runs:\n{spread_text(report, labels)}")
    seconds, passes = report["seconds_per_round"], True
    for name, gate in GATES.get(options.load, {}).items():
        if FANIN in seconds and name in seconds:
            ratio = seconds[name] / seconds[FANIN]
            passes = passes and ratio >= gate
            verdict = "passes" if ratio >= gate else "misses"
            sys.stdout.write(f"{name}: {ratio:.2f} x, {verdict} the gate of {gate:g} x\n")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return int(not passes)


def labels_of(name: str, device: str) -> list[str]:
    """Return the rows of a system: fanin has one for each of its forms on a device."""
    return [f"{FANIN} {form}" for form in FORMS[device]] if name == FANIN else [name]


def report_of(rows: Mapping[str, Sequence[Row]], load: Load) -> dict[str, Any]:
    """Return the object of ``--json``.

    Args:
        rows: The measurements of each run by system; those of fanin by ``fanin FORM``.
        load: The load of all systems.
    """
    medians = {
        column: {label: statistics.median(getattr(row, column) for row in runs) for label, runs in rows.items()}
        for column in COLUMNS
    }
    spreads = {
        column: {label: _range([getattr(row, column) for row in runs]) for label, runs in rows.items()}
        for column in COLUMNS
    }
    seconds = {form: medians[COLUMNS[0]].get(f"{FANIN} {form}", math.inf) for form in FORMS[load.device]}
    fastest = min(seconds, key=seconds.__getitem__)
    is_measured = f"{FANIN} {fastest}" in rows
    if is_measured:
        for numbers in (*medians.values(), *spreads.values()):
            numbers[FANIN] = numbers[f"{FANIN} {fastest}"]
    num_repeats = max(map(len, rows.values()))
    return {
        "load": asdict(load),
        "num_repeats": num_repeats,
        "fanin_form": fastest if is_measured else "",
        **medians,
        "spreads": spreads,
    }


def spread_text(report: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Return a line for each system with its median seconds of a Round, and the smallest and the largest ones."""
    seconds, spreads = report[COLUMNS[0]], report["spreads"][COLUMNS[0]]
    rows = [(label, seconds[label], *spreads[label].values()) for label in labels]
    return "".join(
        f"{label:16} {median:8.3f} s a round ({low:.3f} to {high:.3f})\n" for label, median, low, high in rows
    )


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "max": max(values)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=sorted(LOADS), default="cnn")
    parser.add_argument("--device", choices=sorted(FORMS), default="cpu", help="of the train steps")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each system; 0: those of the load")
    parser.add_argument("--repeats", type=_count, default=1, help="runs of each system, interleaved")
    parser.add_argument("--only", default="", help="systems, separated by commas: torch, fanin, pfl, flower")
    parser.add_argument("--environments", type=Path, default=ROOT, help="folder of the peers' environments")
    parser.add_argument("--json", default="")
    return parser


def _count(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of at least 1")
    return int(text)


def _write_data(load: Load, folder: Path) -> None:
    """Write the images of all users as the scripts read them, in one file and in files that can be mapped."""
    from fanin.simulation import load_data

    split = load_data("fashion-mnist", seed=0)
    num = load.users * load.samples
    # The data set has 60,000 training images, of which ``load_data`` may hold some out.
    order = np.random.default_rng(0).permutation(len(split.train))
    picked = np.resize(order, num)
    x = split.train.inputs["x"][picked].reshape(load.users, load.samples, 1, 28, 28)
    y = split.train.y[picked].reshape(load.users, load.samples)
    assert split.test is not None
    np.savez(folder / "data.npz", x=x, y=y, test_x=split.test.inputs["x"], test_y=split.test.y)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


def _row(label: str, load: Load, folder: Path, environments: Path) -> Row:
    name, _, form_name = label.partition(" ")
    form = FORMS[load.device].get(form_name, ())
    python = _python(name, environments) if name in PACKAGES else Path(sys.executable)
    command = [str(python), str(SCRIPTS / f"{name}_rounds.py"), str(folder), json.dumps(asdict(load)), *form]
    # One thread for each process, as the tests and the devices have.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), "RAY_DEDUP_LOGS": "0"}
    environment["PFL_PYTORCH_DEVICE"] = load.device
    # Flower would use another program's Ray cluster on this machine, and wait for ever when that one ends.
    environment["RAY_ADDRESS"] = "local"
    began_s = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    total_s = time.perf_counter() - began_s
    if completed.returncode:
        raise RuntimeError(f"{name} exits with status {completed.returncode}:\n{completed.stderr[-4000:]}")
    measurement = json.loads(
        next(line for line in reversed(completed.stdout.splitlines()) if line.startswith('{"seconds"'))
    )
    return Row(
        seconds_per_round=statistics.median(measurement["seconds"]),
        total_seconds=total_s,
        accuracy=measurement["accuracy"],
    )


def _python(name: str, folder: Path) -> Path:
    """Return the Python of a peer's environment, created if necessary."""
    venv = folder / f".venv-peer-{name}-simulation"
    if not (venv / ".installed").exists():
        sys.stderr.write(f"{venv}: installing {', '.join(PACKAGES[name])}\n")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/pip"), "install", "--quiet", *PACKAGES[name]], check=True)
        (venv / ".installed").touch()
    return venv / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

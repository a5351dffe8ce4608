"""Simulated federations: seconds a round of fanin, of pfl-research, of Flower and of a plain loop in torch.

    python benchmarks/simulation.py --json FILE                       # the CNN: 1,000 users x 60 images, cohort 50
    python benchmarks/simulation.py --load logistic --json FILE       # logistic regression, cohort 10
    python benchmarks/simulation.py --only fanin,torch --rounds 20
    python benchmarks/simulation.py --device cuda --only fanin,torch,pfl

All systems train the same module on the same images with the same settings: FedAvg, one local epoch, batches of 10, SGD
with a learning rate of 0.1. Each runs by itself, in an environment of its own next to that of this repository, which is
created on first use. fanin runs in each of its forms: engine and number of processes. The images are those of
Fashion-MNIST, from ``FANIN_DATA``.

With ``--device cuda``, the train steps of fanin, torch and pfl run on a GPU.

The JSON has for each system and each form of fanin:

- ``seconds_per_round``: median of the Rounds after the first, which loads libraries.
- ``total_seconds``: the process from its start to its end, with imports, the start-up of the federation and all Rounds.
- ``accuracy``: on the test images, after the last Round.

The key ``fanin`` in each of them is the form with the fastest Round, which ``fanin_form`` names.
"""

import argparse
import json
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurement of one system. The module's docstring describes the numbers."""

    seconds_per_round: float
    total_seconds: float
    accuracy: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if fanin misses a gate."""
    options = _parser().parse_args(argv)
    load = LOADS[options.load]
    load = replace(load, rounds=options.rounds or load.rounds, device=options.device)
    names = options.only.split(",") if options.only else ["torch", FANIN, *PACKAGES]
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        _write_data(load, Path(folder))
        for name in names:
            for form, words in FORMS[load.device].items() if name == FANIN else [("", ())]:
                label = f"{name} {form}".strip()
                row = rows[label] = _row(name, words, load, Path(folder), options.environments)
                sys.stdout.write(
                    f"{label:16} {row.seconds_per_round:8.3f} s a round, {row.total_seconds:7.1f} s in total, "
                    f"accuracy {row.accuracy:.4f}\n"
                )
                sys.stdout.flush()
    report = report_of(rows, load)
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


def report_of(rows: Mapping[str, Row], load: Load) -> dict[str, Any]:
    """Return the object of ``--json``.

    Args:
        rows: The measurements by system; those of fanin by ``fanin FORM``.
        load: The load of all systems.
    """
    forms = {form: rows[f"{FANIN} {form}"] for form in FORMS[load.device] if f"{FANIN} {form}" in rows}
    fastest = min(forms, key=lambda form: forms[form].seconds_per_round, default="")
    named = {**rows, FANIN: forms[fastest]} if fastest else rows
    columns = {
        column: {name: getattr(row, column) for name, row in named.items()}
        for column in ("seconds_per_round", "total_seconds", "accuracy")
    }
    return {"load": asdict(load), "fanin_form": fastest, **columns}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=sorted(LOADS), default="cnn")
    parser.add_argument("--device", choices=sorted(FORMS), default="cpu", help="of the train steps")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each system; 0: those of the load")
    parser.add_argument("--only", default="", help="systems, separated by commas: torch, fanin, pfl, flower")
    parser.add_argument("--environments", type=Path, default=ROOT, help="folder of the peers' environments")
    parser.add_argument("--json", default="")
    return parser


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


def _row(name: str, form: Sequence[str], load: Load, folder: Path, environments: Path) -> Row:
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

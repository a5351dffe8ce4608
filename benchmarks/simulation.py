"""Simulated federations: seconds a round of fanin, of pfl-research, of Flower and of a plain loop in torch.

    python benchmarks/simulation.py --json FILE                       # the CNN: 1,000 users x 60 images, cohort 50
    python benchmarks/simulation.py --load logistic --json FILE       # logistic regression, cohort 10
    python benchmarks/simulation.py --only fanin,torch --rounds 20

All systems train the same module on the same images with the same settings: FedAvg, one local epoch, batches of 10, SGD
with a learning rate of 0.1. Each runs by itself, in an environment of its own next to that of this repository, which is
created on first use. fanin runs each of its engines. The images are those of Fashion-MNIST, from ``FANIN_DATA``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

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
FEW_ROUNDS: Final = {"flower": 3}
"""Rounds of a system whose rounds take many seconds; its accuracy is then that of few rounds."""
GATES: Final = {"cnn": {"pfl": 5.0, "flower": 100.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The rounds of one system."""

    seconds_per_round: float
    accuracy: float
    rounds: int


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if a gate is missed."""
    options = _parser().parse_args(argv)
    load = LOADS[options.load]
    load = replace(load, rounds=options.rounds or load.rounds)
    wanted = options.only.split(",") if options.only else ["torch", "fanin", *PACKAGES]
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        _write_data(load, Path(folder))
        for name in wanted:
            engines = [("graph", "1"), ("graph", "2"), ("vmap", "1")] if name == "fanin" else [()]
            for engine in engines:
                label = " ".join((name, *engine[:1], *(f"x{part}" for part in engine[1:] if part != "1")))
                rows[label] = _row(name, engine, load, Path(folder), options.environments)
                sys.stdout.write(
                    f"{label:16} {rows[label].seconds_per_round:8.3f} s a round, "
                    f"accuracy {rows[label].accuracy:.4f} after {rows[label].rounds}\n"
                )
                sys.stdout.flush()
    best = min((row.seconds_per_round for label, row in rows.items() if label.startswith("fanin")), default=0.0)
    seconds = {label: row.seconds_per_round for label, row in rows.items()}
    report = {
        "load": asdict(load),
        "seconds_per_round": seconds | ({"fanin": best} if best else {}),
        "accuracy": {label: row.accuracy for label, row in rows.items()},
        "rounds": {label: row.rounds for label, row in rows.items()},
    }
    passes = True
    for name, gate in GATES.get(options.load, {}).items():
        if best and name in seconds:
            ratio = seconds[name] / best
            passes = passes and ratio >= gate
            sys.stdout.write(f"{name}: {ratio:.1f} x, gate {gate:g} {'kept' if ratio >= gate else 'MISSED'}\n")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return int(not passes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=sorted(LOADS), default="cnn")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each system but Flower; 0: those of the load")
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


def _row(name: str, engine: Sequence[str], load: Load, folder: Path, environments: Path) -> Row:
    if name in FEW_ROUNDS:
        load = replace(load, rounds=min(load.rounds, FEW_ROUNDS[name] + 1))
    python = _python(name, environments) if name in PACKAGES else Path(sys.executable)
    command = [str(python), str(SCRIPTS / f"{name}_rounds.py"), str(folder), json.dumps(asdict(load)), *engine]
    # One thread for each process, as the tests and the devices have.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), "RAY_DEDUP_LOGS": "0"}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if completed.returncode:
        raise RuntimeError(f"{name} exits with status {completed.returncode}:\n{completed.stderr[-4000:]}")
    measurement = json.loads(
        next(line for line in reversed(completed.stdout.splitlines()) if line.startswith('{"seconds"'))
    )
    return Row(
        seconds_per_round=statistics.median(measurement["seconds"]),
        accuracy=measurement["accuracy"],
        rounds=load.rounds,
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

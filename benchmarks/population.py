"""A million simulated clients: seconds of a Round, and the peak memory of the process.

    python benchmarks/population.py --json FILE                              # 1,000,000 clients, 1,000 in each Round
    python benchmarks/population.py --clients 100000 --cohort 100 --rounds 20

The clients train a logistic regression of 16 features on four examples each, with the coordinator, the round machine
and the sessions of a real Run. The baseline is the same Run with as many clients as a Round needs, so the ratio is the
cost of all the others. Each Run has a process of its own. The first Round, which opens the graphs, is not counted.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Iid, SimulationSettings, partition, simulate

FEATURES: Final = 16
CLASSES: Final = 4
SAMPLES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One Run.

    Attributes:
        clients: Its clients.
        seconds_per_round: Median over the Rounds after the first.
        peak_memory_bytes: Peak resident memory of the process, with data, torch and the export.
        data_bytes: Bytes of the examples of all clients.
        accuracy: Share of the examples of 1,000 clients that the last Version predicts.
    """

    clients: int
    seconds_per_round: float
    peak_memory_bytes: int
    data_bytes: int
    accuracy: float


def main(argv: Sequence[str]) -> int:
    """Run both federations, each in a process of its own."""
    options = _parser().parse_args(argv)
    if options.child:
        json.dump(asdict(_run(options.clients, options.cohort, options.rounds)), sys.stdout)
        return 0
    shared = ["--cohort", str(options.cohort), "--rounds", str(options.rounds), "--child"]
    rows = []
    for clients in (options.cohort, options.clients):
        command = [sys.executable, __file__, "--clients", str(clients), *shared]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        rows.append(row)
        sys.stdout.write(
            f"{clients:>9,} clients, {options.cohort:,} a round: {row['seconds_per_round']:.2f} s a round, "
            f"{row['peak_memory_bytes'] / 1e9:.2f} GB at most, accuracy {row['accuracy']:.3f}\n"
        )
    result = {
        "cohort": options.cohort,
        "rounds": options.rounds,
        "rows": rows,
        "seconds_ratio": rows[1]["seconds_per_round"] / rows[0]["seconds_per_round"],
    }
    sys.stdout.write(f"a round of all clients / of the cohort alone: {result['seconds_ratio']:.2f} x\n")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(clients: int, cohort: int, rounds: int) -> Row:
    """Simulate one federation in this process."""
    examples = _examples(clients * SAMPLES)
    app = App(
        name="logistic",
        module=nn.Linear(FEATURES, CLASSES),
        calibration=torch.from_numpy(examples.inputs["x"][:64]),
        batch_size=2,
        num_classes=CLASSES,
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
    )
    times: list[float] = []
    settings = SimulationSettings(
        plan={"training.learning_rate": 0.5, "training.epochs": 1},
        on_round=lambda row: times.append(time.perf_counter()),
        quiet=True,
    )
    result = simulate(app, partition(examples, clients, Iid()), cohort=cohort, rounds=rounds, settings=settings)
    seconds = np.diff(times)[1:]
    with torch.no_grad():
        seen = torch.from_numpy(examples.inputs["x"][: 1000 * SAMPLES])
        accuracy = float((result.module(seen).argmax(1).numpy() == examples.y[: len(seen)]).mean())
    return Row(
        clients=clients,
        seconds_per_round=statistics.median(seconds),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        data_bytes=examples.inputs["x"].nbytes + examples.y.nbytes,
        accuracy=accuracy,
    )


def _examples(num: int) -> Examples:
    """Return examples of a linear rule."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num, FEATURES), dtype=np.float32)
    y = (x @ rng.standard_normal((FEATURES, CLASSES), dtype=np.float32)).argmax(1).astype(np.int32)
    return Examples(inputs={"x": x}, y=y)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

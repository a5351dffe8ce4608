"""Accuracy by epsilon of private Runs on Fashion-MNIST, simulated with the production coordinator and devices.

    FANIN_DATA=FOLDER python benchmarks/private_accuracy.py --plot FILE.svg --json FILE

Each client takes part in each Round, so no amplification is claimed. The noise multiplier of each epsilon is the one of
``fanin privacy plan``. The last row has no privacy: the same Plan without clipping and noise.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fanin.edge.export import App
from fanin.server.privacy.planning import PrivacyBudget, plan_mechanism
from fanin.simulation import Dirichlet, SimulationSettings, load_data, partition, simulate

DELTA = 1e-5
LEARNING_RATE = 0.05
CLIP_NORM = 0.5


def net() -> torch.nn.Module:
    """Return logistic regression: fewer values have less noise together."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))


def accuracy(epsilon: float | None, num_clients: int, num_rounds: int) -> dict[str, float]:
    """Return the accuracy of a Run with this epsilon; None: without privacy."""
    data = load_data("fashion-mnist")
    app = App(name="fashion", module=net(), calibration=data.train.inputs["x"][:256], batch_size=16, num_classes=10)
    clients = partition(data.train, num_clients, Dirichlet(alpha=1.0))
    plan: dict[str, object] = {
        "training.learning_rate": LEARNING_RATE,
        "aggregation.max_examples": 1,
        "evaluation.every": num_rounds,
    }
    multiplier = 0.0
    if epsilon is not None:
        budget = PrivacyBudget(
            epsilon=epsilon, delta=DELTA, num_rounds=num_rounds, cohort=num_clients, population=num_clients
        )
        multiplier = plan_mechanism("central", budget).noise_multiplier
        plan |= {
            "privacy.mechanism": "central",
            "privacy.clip_norm": CLIP_NORM,
            "privacy.noise_multiplier": multiplier,
            "privacy.epsilon": epsilon,
            "privacy.delta": DELTA,
            "privacy.population": "clients",
            "privacy.population_size": num_clients,
        }
    settings = SimulationSettings(test=data.test, plan=plan, validation_fraction=0.0, engine="vmap", quiet=True)
    result = simulate(app, clients, cohort=num_clients, rounds=num_rounds, settings=settings)
    return {"noise_multiplier": multiplier, "accuracy": result.rounds[-1].test_accuracy}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table and write a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epsilons", default="0.5,1,2,4,8,16")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    rows = []
    for epsilon in [*map(float, arguments.epsilons.split(",")), None]:
        row = {"epsilon": epsilon, **accuracy(epsilon, arguments.clients, arguments.rounds)}
        print(row, flush=True)
        rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        _plot(rows, arguments.plot)


def _plot(rows: list[dict[str, float | None]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    private = [row for row in rows if row["epsilon"] is not None]
    axes.plot([row["epsilon"] for row in private], [row["accuracy"] for row in private], "o-", label="central noise")
    axes.axhline(rows[-1]["accuracy"], linestyle="--", color="gray", label="no privacy")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["epsilon"] for row in private], [f"{row['epsilon']:g}" for row in private])
    axes.set_xlabel(f"epsilon at delta {DELTA:g}")
    axes.set_ylabel("test accuracy")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""Buffered Rounds (FedBuff) against synchronous ones, in virtual time, on devices of very different speeds.

    python examples/simulation/buffered.py [FIGURE]

A synchronous Round waits for its slowest device. A buffered one closes after some Updates, and the others count in a
later Round, for less.

Reference:
    Nguyen et al. 2022, arXiv 2106.06639, section 5.
"""

import sys
from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from torch import nn

from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import (
    DeviceModel,
    Dirichlet,
    Pareto,
    Result,
    SimulationSettings,
    load_data,
    partition,
    simulate,
)

CONCURRENCY, TARGET = 20, 0.85
DEVICES = DeviceModel(examples_per_s=Pareto(least=1.0, alpha=0.8))
PLANS: dict[str, tuple[int, dict[str, object]]] = {
    "synchronous": (50, {}),
    "buffer of 5": (120, {"cohort.buffer": 5, "cohort.quorum": 5, "aggregation.max_staleness": 20}),
}


def run(rounds: int, plan: Mapping[str, object]) -> Result:
    """Train with these keys of the Plan."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    app = App(
        name="digits",
        module=module,
        calibration=torch.from_numpy(data.train.inputs["x"][:200]),
        batch_size=8,
        num_classes=10,
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
    )
    common: dict[str, object] = {"training.learning_rate": 0.1, "training.epochs": 2, "cohort.deadline_s": 86400.0}
    settings = SimulationSettings(test=data.test, plan=common | dict(plan), devices=DEVICES)
    return simulate(app, clients, cohort=CONCURRENCY, rounds=rounds, settings=settings)


def seconds_to(result: Result, accuracy: float) -> float:
    """Return the virtual time of the first Version with this accuracy."""
    return next((row.time_s for row in result.rounds if row.test_accuracy >= accuracy), float("inf"))


if __name__ == "__main__":
    data = load_data("digits")
    clients = partition(data.train, 100, Dirichlet(alpha=0.5))
    results = {name: run(rounds, plan) for name, (rounds, plan) in PLANS.items()}
    times = {name: seconds_to(result, TARGET) for name, result in results.items()}
    for name, seconds in times.items():
        print(f"{name}: accuracy {TARGET} after {seconds:.0f} virtual seconds")
    print(f"speed-up: {times['synchronous'] / times['buffer of 5']:.1f}")
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, result in results.items():
        axes.plot([row.time_s for row in result.rounds], [row.test_accuracy for row in result.rounds], label=name)
    axes.axhline(TARGET, color="grey", linestyle=":")
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("test accuracy")
    axes.legend()
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "buffered.png")

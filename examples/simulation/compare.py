"""FedAvg against FedProx on clients with few labels each: a CNN, 50 clients, 5 of them in a Round.

    python examples/simulation/compare.py [FIGURE]

Reference:
    Li et al. 2020, arXiv 1812.06127, section 5.
"""

import sys

import torch
from torch import nn

from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Pathological, Result, SimulationSettings, load_data, partition, plot_results, simulate

ROUNDS = 30


def app(proximal: bool) -> App:
    """Return the App, with the anchor of FedProx as inputs of its train graph or without."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)
    )
    images = torch.from_numpy(data.train.inputs["x"][:200])
    recipe = Recipe(optimizer=Sgd(momentum=0.0), proximal=proximal)
    return App(name="digits", module=module, calibration=images, batch_size=8, num_classes=10, recipe=recipe)


def run(weight: float) -> Result:
    """Train with this weight of the proximal term; 0 is FedAvg."""
    plan = {"training.learning_rate": 0.1, "training.epochs": 10, "training.proximal_weight": weight}
    settings = SimulationSettings(test=data.test, plan=plan)
    return simulate(app(proximal=weight > 0.0), clients, cohort=5, rounds=ROUNDS, settings=settings)


if __name__ == "__main__":
    data = load_data("digits")
    clients = partition(data.train, 50, Pathological(num_labels=2))
    results = {"FedAvg": run(0.0), "FedProx, weight 0.1": run(0.1)}
    for name, result in results.items():
        print(f"{name}: accuracy {result.rounds[-1].test_accuracy:.3f} after {ROUNDS} rounds")
    plot_results(results, sys.argv[1] if len(sys.argv) > 1 else "compared.png")

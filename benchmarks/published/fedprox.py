"""FedProx on synthetic data with stragglers: figures 1 and 2 of Li et al. 2020, arXiv 1812.06127.

    python benchmarks/published/fedprox.py --folder FOLDER --plot FILE.svg --json FILE

30 devices with a logistic regression of 60 inputs and 10 classes, 10 a Round, 20 epochs with batches of 10. In each
Round 0, 50 or 90 % of the devices are stragglers: they do 1 to 20 epochs, drawn for each Round. FedAvg drops them,
FedProx keeps their partial work. The number of a curve is the loss of each Version on the training examples of all
devices.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tuning import RATE, Comparison, Entry, Score, draw, final_loss, numbers, parser_of, record, report, row_of

from fanin.clients import Examples
from fanin.edge.export import App, Recipe
from fanin.simulation import ClientWork, Partition, SimulationSettings
from fanin.simulation.grids.results import StudyCurve

NUM_DEVICES: Final = 30
COHORT: Final = 10
DIM: Final = 60
NUM_CLASSES: Final = 10
EPOCHS: Final = 20
BATCH_SIZE: Final = 10
MU: Final = "training.proximal_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """How the devices of a synthetic data set differ.

    Attributes:
        alpha: Standard deviation of the mean of a device's model. The paper calls it a variance, its program
            (github.com/litian96/FedProx) uses it as a deviation; so does this one. They differ for 0.5 alone.
        beta: The same of the mean of a device's inputs.
        is_iid: Whether all devices have one model, and inputs of one distribution.
    """

    alpha: float = 0.0
    beta: float = 0.0
    is_iid: bool = False


DATA: Final[Mapping[str, Synthetic]] = {
    "iid": Synthetic(is_iid=True),
    "0,0": Synthetic(),
    "0.5,0.5": Synthetic(alpha=0.5, beta=0.5),
    "1,1": Synthetic(alpha=1.0, beta=1.0),
}


def devices_of(kind: Synthetic, mean_size: float, seed: int = 0) -> Partition:
    """Draw the devices and their examples.

    The sizes follow a power law, with the smallest and the mean in the ratio of the paper's program.
    A device k has u_k ~ N(0, alpha), B_k ~ N(0, beta), W_k and b_k ~ N(u_k, 1) and v_k ~ N(B_k, 1). Its inputs are
    x ~ N(v_k, diag(j^-1.2)), and its labels argmax(x W_k + b_k).
    """
    rng = np.random.default_rng(seed)
    tails = rng.lognormal(0.0, 1.0, NUM_DEVICES)
    sizes = (mean_size * (0.3 + 0.7 * tails / tails.mean())).astype(int)
    deviations = np.arange(1, DIM + 1) ** -0.6
    common = rng.normal(size=(DIM, NUM_CLASSES)), rng.normal(size=NUM_CLASSES)
    xs, ys = [], []
    for size in sizes:
        mean_model, mean_input = rng.normal(0.0, kind.alpha), rng.normal(0.0, kind.beta)
        weight, bias = rng.normal(mean_model, 1.0, (DIM, NUM_CLASSES)), rng.normal(mean_model, 1.0, NUM_CLASSES)
        center = rng.normal(mean_input, 1.0, DIM)
        if kind.is_iid:
            (weight, bias), center = common, np.zeros(DIM)
        x = rng.normal(center, deviations, (size, DIM)).astype(np.float32)
        xs.append(x)
        ys.append((x @ weight + bias).argmax(1).astype(np.int32))
    ends = np.cumsum(sizes)
    indices = tuple(np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True))
    return Partition(examples=Examples(inputs={"x": np.concatenate(xs)}, y=np.concatenate(ys)), indices=indices)


def entries_of(stragglers: float, mus: Sequence[float]) -> dict[str, Entry]:
    """Return the methods. Without stragglers, FedAvg is FedProx with mu = 0."""
    partial_work = ClientWork(stragglers=stragglers)
    proximal = Entry(work=partial_work, grid={MU: mus}, cohort=COHORT)
    if not stragglers:
        return {"FedAvg": Entry(work=partial_work, cohort=COHORT), "FedProx": proximal}
    # Of 10 devices, so many are left without the stragglers.
    num_left = max(1, round(COHORT * (1.0 - stragglers)))
    return {
        "FedAvg": Entry(work=ClientWork(stragglers=stragglers, drop=True), cohort=num_left),
        "FedProx-mu0": Entry(work=partial_work, cohort=COHORT),
        "FedProx": proximal,
    }


def app_of(clients: Partition, recipe: Recipe) -> App:
    """Return the logistic regression. It starts from zeros."""
    net = torch.nn.Linear(DIM, NUM_CLASSES)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    return App(
        name="synthetic",
        module=net,
        calibration=clients.examples.inputs["x"][:256],
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        recipe=recipe,
    )


def panel(name: str, stragglers: float, options: Any, folder: Path) -> dict[str, StudyCurve]:
    """Return the tuned curve of each method for a data set and a share of stragglers."""
    clients = devices_of(DATA[name], options.examples)
    plan = {"training.epochs": options.epochs, "aggregation.max_examples": max(clients.sizes), "evaluation.every": 2}
    comparison = Comparison(
        folder=folder / f"{name}-{stragglers:g}",
        app=partial(app_of, clients),
        clients=clients,
        rounds=options.rounds,
        settings=SimulationSettings(test=clients.examples, plan=plan, validation_fraction=0.0),
        rates=options.rates,
        seeds=range(options.seeds),
        score=Score(of=final_loss, is_rounds=False),
    )
    return {method: comparison.tuned(method, entry) for method, entry in entries_of(stragglers, options.mus).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the methods in each panel, print a line for each, and write the curves and the figure."""
    parser = parser_of(str(__doc__), rounds=20, rates=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    parser.add_argument("--mus", type=numbers, default=(0.01, 0.1, 1.0), help="values of mu above 0")
    parser.add_argument("--data", default=list(DATA), nargs="+", choices=list(DATA))
    parser.add_argument("--stragglers", type=numbers, default=(0.0, 0.5, 0.9))
    parser.add_argument("--examples", type=float, default=40.0, help="mean number of examples of a device")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args(argv)
    panels, rows = dict[str, dict[str, StudyCurve]](), []
    print("| data | stragglers | method | rate | mu | training loss, last three evaluated Versions, each seed |")
    print("|---|---|---|---|---|---|")
    with record(options) as folder:
        for stragglers in options.stragglers:
            for name in options.data:
                title = f"{name}, {stragglers:.0%} stragglers"
                panels[title] = panel(name, stragglers, options, folder)
                for method, curve in panels[title].items():
                    losses = ", ".join(f"{final_loss(point):.3f}" for point in curve.points)
                    rate, mu = curve.values[RATE], curve.values.get(MU, 0)
                    print(f"| {name} | {stragglers:.0%} | {method} | {rate} | {mu} | {losses} |", flush=True)
                    rows.append(row_of(title, method, curve))
    report(options, rows)
    if options.plot:
        draw(panels, "test_loss", options.plot, num_wide=len(options.data), label="training loss of all devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())

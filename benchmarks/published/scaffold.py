"""Rounds to an accuracy by epochs and similarity of the devices: table 3 of Karimireddy et al. 2020, arXiv 1910.06378.

    FANIN_DATA=FOLDER python benchmarks/published/scaffold.py --folder FOLDER --plot FILE.svg --json FILE

A logistic regression on Fashion-MNIST (the paper: EMNIST), 100 devices, 20 a Round. A similarity of 10 % gives each
device 10 % of its examples at random, and the others in the order of their labels. A batch is a fifth of a device's
examples, so an epoch has 5 steps. SGD does one step of all examples a Round. mu of FedProx is 1, as in the paper.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from fashion import Data, fashion
from tuning import (
    ACCURACY,
    RATE,
    Comparison,
    Entry,
    figure_of,
    numbers,
    parser_of,
    record,
    report,
    rounds_score,
    rounds_text,
    row_of,
    shares,
)

from fanin.clients import Examples
from fanin.edge.export import App, Recipe
from fanin.edge.tensors import Int64s
from fanin.simulation import SimulationSettings, partition
from fanin.simulation.grids.results import StudyCurve

NUM_DEVICES: Final = 100
COHORT: Final = 20
STEPS_AN_EPOCH: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """A partitioner of equal sizes: a share of each device's examples at random, the others by their labels."""

    share: float

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        """Return the indices of the examples of each device."""
        order = rng.permutation(len(examples))
        num_shared = round(self.share * len(examples))
        shared, sorted_ = order[:num_shared], order[num_shared:]
        sorted_ = sorted_[np.argsort(examples.y[sorted_], kind="stable")]
        pairs = zip(np.array_split(shared, num_clients), np.array_split(sorted_, num_clients), strict=True)
        return [np.concatenate(pair) for pair in pairs]


KEYS: Final[Mapping[str, Mapping[str, object]]] = {
    "FedAvg": {},
    "FedProx": {"training.proximal_weight": 1.0},
    "SCAFFOLD": {"stages": [{"name": "scaffold", "options": {"num_devices": NUM_DEVICES}}]},
}


def entries_of(names: Sequence[str], epochs: Sequence[int], num_examples: int) -> dict[str, Entry]:
    """Return each method with each number of epochs."""
    sgd = {"SGD": Entry(plan={"training.batch_size": num_examples}, cohort=COHORT)}
    local = {
        f"{name}-{number}": Entry(
            plan={**KEYS[name], "training.epochs": number}, is_controlled=name == "SCAFFOLD", cohort=COHORT
        )
        for name in names
        if name != "SGD"
        for number in epochs
    }
    return {**(sgd if "SGD" in names else {}), **local}


def app_of(data: Data, num_examples: int, recipe: Recipe) -> App:
    """Return the logistic regression. It starts from zeros."""
    net = torch.nn.Linear(data.train.inputs["x"].shape[1], 10)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    return App(
        name="fashion",
        module=net,
        calibration=data.train.inputs["x"][:256],
        batch_size=num_examples // STEPS_AN_EPOCH,
        other_batch_sizes=(num_examples,),
        num_classes=10,
        recipe=recipe,
    )


def draw_rounds(panels: Mapping[str, Mapping[str, StudyCurve]], epochs: Sequence[int], options: Namespace) -> None:
    """Draw the median Rounds of each method by epochs, with the range of its seeds. SGD has no epochs."""
    figure, axes = figure_of(len(panels), len(panels))
    handles = dict[str, Any]()
    for place, (title, curves) in zip(axes, panels.items(), strict=True):
        for index, name in enumerate(options.methods):
            several = [curves[name]] * 2 if name == "SGD" else [curves[f"{name}-{number}"] for number in epochs]
            # A seed that does not reach the accuracy is drawn at the top.
            counts = [
                [
                    min(point.first_round(ACCURACY, options.target, higher_is_better=True), options.rounds + 1)
                    for point in curve.points
                ]
                for curve in several
            ]
            xs = [epochs[0], epochs[-1]] if name == "SGD" else epochs
            style = "--" if name == "SGD" else "o-"
            (handles[name],) = place.plot(xs, [median(each) for each in counts], style, color=f"C{index}", markersize=3)
            place.fill_between(
                xs, [min(each) for each in counts], [max(each) for each in counts], color=f"C{index}", alpha=0.15
            )
        place.set_title(title, fontsize="small")
        place.set_yscale("log")
        place.set_ylim(0.9, 1.15 * options.rounds)
    figure.supxlabel("epochs of a Round", fontsize="small")
    figure.supylabel(f"Rounds to {options.target:.0%}", fontsize="small")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), fontsize="small")
    figure.savefig(options.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Count the Rounds of each method, print a row for each, and write the curves and the figure."""
    parser = parser_of(str(__doc__), rounds=100, rates=(0.3, 1.0, 0.1, 0.03))
    parser.add_argument("--target", type=float, default=0.7, help="the test accuracy")
    parser.add_argument("--similarities", type=shares, default=(0.0, 0.1, 1.0), help="shares from 0 to 1")
    parser.add_argument("--epochs", type=numbers, default=(1, 5, 10, 20))
    parser.add_argument("--examples", type=int, default=50, help="examples of a device")
    parser.add_argument("--methods", nargs="+", default=["SGD", *KEYS], choices=["SGD", *KEYS])
    options = parser.parse_args(argv)
    epochs = [int(number) for number in options.epochs]
    data = fashion(NUM_DEVICES * options.examples, 2000)
    plan = {"stop.target": options.target, "evaluation.best": "accuracy"}
    panels, rows = dict[str, dict[str, StudyCurve]](), []
    print("| similarity | method and epochs | learning rate | Rounds: median (each seed) |\n|---|---|---|---|")
    with record(options) as folder:
        for share in options.similarities:
            comparison = Comparison(
                folder=folder / f"{share:g}",
                app=partial(app_of, data, options.examples),
                clients=partition(data.train, NUM_DEVICES, Similarity(share=share)),
                rounds=options.rounds,
                settings=SimulationSettings(test=data.test, plan=plan, validation_fraction=0.0),
                rates=options.rates,
                seeds=range(options.seeds),
                score=rounds_score(options.target),
            )
            title = f"similarity {share:.0%}"
            panels[title] = {}
            for name, entry in entries_of(options.methods, epochs, options.examples).items():
                panels[title][name] = curve = comparison.tuned(name, entry)
                text = rounds_text(curve, options.target, options.rounds)
                print(f"| {share:.0%} | {name} | {curve.values[RATE]} | {text} |", flush=True)
                rows.append(row_of(title, name, curve))
    report(options, rows)
    if options.plot:
        draw_rounds(panels, epochs, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

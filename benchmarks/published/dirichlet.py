"""Rounds to 75 % on Fashion-MNIST by Dirichlet(0.1): FedAvg, FedAdam, FedYogi, SCAFFOLD, FedNova and FedDyn.

    FANIN_DATA=FOLDER python benchmarks/published/dirichlet.py --folder FOLDER --plot FILE.svg --json FILE

A perceptron on 100 devices of equal sizes, 10 a Round. In each Round a device does 1 to 5 epochs, drawn at random: with
equal numbers of steps, FedNova (Wang et al. 2020, arXiv 2007.07481) is FedAvg. The rate of the outer optimizer is tuned
as in Reddi et al. 2021, arXiv 2003.00295, and alpha of FedDyn as in Acar et al. 2021, arXiv 2111.04263.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from fashion import Data, fashion
from tuning import RATE, Comparison, Entry, draw, parser_of, record, report, rounds_score, rounds_text, row_of

from fanin.edge.export import App, Recipe
from fanin.simulation import ClientWork, Dirichlet, SimulationSettings, partition

NUM_DEVICES: Final = 100
COHORT: Final = 10
ALL: Final = {"num_devices": NUM_DEVICES}
OUTER: Final = "aggregation.outer_optimizer"
OPTIONS: Final = "aggregation.outer_options"
OUTER_RATES: Final = tuple({"learning_rate": rate} for rate in (0.03, 0.01, 0.1))
ALPHAS: Final = (0.01, 0.03, 0.1)
ENTRIES: Final = {
    "FedAvg": Entry(cohort=COHORT),
    "FedAdam": Entry(plan={OUTER: "fedadam"}, grid={OPTIONS: OUTER_RATES}, cohort=COHORT),
    "FedYogi": Entry(plan={OUTER: "fedyogi"}, grid={OPTIONS: OUTER_RATES}, cohort=COHORT),
    "SCAFFOLD": Entry(plan={"stages": [{"name": "scaffold", "options": ALL}]}, is_controlled=True, cohort=COHORT),
    "FedNova": Entry(plan={"stages": [{"name": "fednova"}], "aggregation.rule": "fednova"}, cohort=COHORT),
    "FedDyn": Entry(
        plan={"stages": [{"name": "feddyn", "options": ALL}], OUTER: "feddyn"},
        grid={"training.proximal_weight": ALPHAS},
        is_controlled=True,
        cohort=COHORT,
    ),
}


def app_of(data: Data, recipe: Recipe) -> App:
    """Return a perceptron with 32 hidden units: 6,634 parameters."""
    torch.manual_seed(1)
    return App(
        name="fashion",
        module=torch.nn.Sequential(torch.nn.Linear(196, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)),
        calibration=data.train.inputs["x"][:256],
        batch_size=20,
        num_classes=10,
        recipe=recipe,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Count the Rounds of each method, print a row for each, and write the curves and the figure."""
    parser = parser_of(str(__doc__), rounds=60, rates=(0.3, 1.0, 0.1, 0.03))
    parser.add_argument("--target", type=float, default=0.75, help="the test accuracy")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet partition")
    parser.add_argument("--examples", type=int, default=100, help="examples of a device")
    parser.add_argument("--methods", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    options = parser.parse_args(argv)
    data = fashion(NUM_DEVICES * options.examples, 2000)
    plan = {"training.epochs": 5, "stop.target": options.target, "evaluation.best": "accuracy"}
    settings = SimulationSettings(test=data.test, plan=plan, validation_fraction=0.0, work=ClientWork(stragglers=1.0))
    curves, rows = {}, []
    print("| method | learning rate | own parameter | Rounds | best accuracy of each seed |\n|---|---|---|---|---|")
    with record(options) as folder:
        comparison = Comparison(
            folder=folder,
            app=partial(app_of, data),
            clients=partition(data.train, NUM_DEVICES, Dirichlet(alpha=options.alpha)),
            rounds=options.rounds,
            settings=settings,
            rates=options.rates,
            seeds=range(options.seeds),
            score=rounds_score(options.target),
        )
        for name in options.methods:
            curves[name] = curve = comparison.tuned(name, ENTRIES[name])
            own = ", ".join(str(value) for key, value in curve.values.items() if key != RATE)
            best = ", ".join(f"{max(point.table['test_accuracy']):.3f}" for point in curve.points)
            text = rounds_text(curve, options.target, options.rounds)
            print(f"| {name} | {curve.values[RATE]} | {own} | {text} | {best} |", flush=True)
            rows.append(row_of("Dirichlet", name, curve))
    report(options, rows)
    if options.plot:
        draw(
            {f"Dirichlet({options.alpha:g})": curves}, "test_accuracy", options.plot, num_wide=1, label="test accuracy"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Accuracy by codec and bytes on Fashion-MNIST, simulated with the production coordinator, devices and codecs.

    FANIN_DATA=FOLDER python benchmarks/codecs.py --plot FILE.svg --json FILE

All Runs have the same model, clients, Rounds and seeds of the training. The bytes are those of one Update, with its
header. The learning rate falls to zero over all steps of a Run, as a cosine: else the accuracy of the last Version
depends more on the last batches than on the codec.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fanin.edge.export import App
from fanin.simulation import Dirichlet, SimulationSettings, load_data, partition, simulate

LEARNING_RATE: Final = 0.1
DECAY: Final = "cosine"
ALPHA: Final = 1.0
FEEDBACK: Final = "error_feedback"
GATE: Final = {"ratio": 40, "points": 0.5}
ROWS: Final[Mapping[str, tuple[str, Mapping[str, float], bool]]] = {
    "fixed32": ("fixed32", {}, False),
    "int16": ("int16", {}, False),
    "int8": ("int8", {}, False),
    "int4": ("int4", {}, False),
    "top 1 %, 8 bits, error feedback": ("topk", {"fraction": 0.01, "bits": 8}, True),
    "top 2 %, 2 bits, error feedback": ("topk", {"fraction": 0.02, "bits": 2}, True),
    "top 3 %, 8 bits, error feedback": ("topk", {"fraction": 0.03, "bits": 8}, True),
    "top 3 %, 4 bits, error feedback": ("topk", {"fraction": 0.03, "bits": 4}, True),
    "top 1 %, 8 bits, no error feedback": ("topk", {"fraction": 0.01, "bits": 8}, False),
}
"""For each row the codec, its options, and whether the Plan has error feedback."""


def net() -> torch.nn.Module:
    """Return a network with one hidden layer: 101,770 parameters."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def curve(row: str, arguments: argparse.Namespace, seed: int) -> tuple[list[float], float]:
    """Return the test accuracy after each evaluated Round of a Run, and the bytes of one Update."""
    name, options, has_feedback = ROWS[row]
    data = load_data("fashion-mnist")
    app = App(
        name="fashion",
        module=net(),
        calibration=data.train.inputs["x"][:256],
        batch_size=arguments.batch_size,
        num_classes=10,
    )
    chosen = np.random.default_rng(0).permutation(len(data.train))[: arguments.examples]
    clients = partition(data.train.take(chosen), arguments.clients, Dirichlet(alpha=ALPHA))
    plan: dict[str, object] = {
        "training.learning_rate": arguments.learning_rate,
        **(
            {"training.step_decay": arguments.decay, "training.schedule_rounds": arguments.rounds}
            if arguments.decay
            else {}
        ),
        "evaluation.every": arguments.every,
        "codec.name": name,
        **{f"codec.options.{key}": value for key, value in options.items()},
        **({"stages": [{"name": FEEDBACK}]} if has_feedback else {}),
    }
    settings = SimulationSettings(
        test=data.test, plan=plan, validation_fraction=0.0, engine="vmap", seed=seed, quiet=True
    )
    result = simulate(app, clients, cohort=arguments.clients, rounds=arguments.rounds, settings=settings)
    num_updates = arguments.clients * arguments.rounds
    size = sum(each.bytes_up for each in result.rounds) / num_updates
    # A Round that is not evaluated has NaN.
    return [each.test_accuracy for each in result.rounds if np.isfinite(each.test_accuracy)], size


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table and write a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--examples", type=int, default=16_000, help="training examples of all clients together")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--decay", default=DECAY, help="`training.step_decay` over all Rounds; empty: none")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--only", help="rows that contain this text")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rows: list[dict[str, object]] = []
    dense = 4 * sum(value.numel() for value in net().parameters())
    for row in (each for each in ROWS if (arguments.only or "") in each):
        runs = [curve(row, arguments, seed) for seed in seeds]
        accuracies, sizes = [run[0] for run in runs], [run[1] for run in runs]
        rows.append(
            {
                "row": row,
                "bytes_per_update": sizes[0],
                "times_fewer_bytes": round(dense / sizes[0], 1),
                "accuracy": float(np.mean([each[-1] for each in accuracies])),
                "accuracies": accuracies,
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "accuracies"}, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"gate": GATE, "rows": rows}, indent=1))
    if arguments.plot:
        _plot(rows, arguments.every, arguments.plot)


def _plot(rows: Sequence[Mapping[str, object]], every: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        means = np.mean(np.array(row["accuracies"]), axis=0)
        label = f"{row['row']} ({row['times_fewer_bytes']}x)"
        axes.plot(np.arange(means.size) * every, 100 * means, label=label)
    axes.set_xlabel("Round")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(bottom=75)
    axes.legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()

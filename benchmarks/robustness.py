"""Attacks on aggregation rules: the accuracy of each pair, and the seconds and the memory of each rule.

    FANIN_DATA=FOLDER python benchmarks/robustness.py --json FILE --plot FILE.svg

Accuracy: Fashion-MNIST on 20 simulated devices, 5 of which attack, with the production coordinator. Each Round has all
devices. ``backdoor`` has a second test set: the test examples with the trigger. Its column is the share that the model
classifies as the attackers' target. A row has the mean over the seeds, and the values of each seed.

Cost: one fold of 64 Updates of 16 MB from files, each rule in a process of its own. Memory is the peak of the process
above what it had before the fold. The gate is 3 models + 64 MB.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from fanin.clients.data.examples import Examples
from fanin.edge.export import App
from fanin.edge.tensors import TensorTable
from fanin.protos.plans import AggregationPlan, CodecSpec, CohortPlan, Plan, StopPlan, Training
from fanin.server.aggregation.checked import rule_of
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.sets import SetFold
from fanin.simulation import (
    Alie,
    Attack,
    Attackers,
    Backdoor,
    DeviceModel,
    Dirichlet,
    GridManipulation,
    InnerProduct,
    LabelFlip,
    Partition,
    Scaling,
    SignFlip,
    SimulationSettings,
    load_data,
    partition,
    simulate,
)

NUM_DEVICES, NUM_ATTACKERS = 20, 5
MEGABYTE: Final = 1 << 20
GATE_MODELS, GATE_BYTES = 3, 64 * MEGABYTE
BACKDOOR_SET: Final = "backdoor"
"""The test set with the trigger."""
SLICE_VALUES: Final = 1 << 16
"""Values of a slice of the outer step."""
BACKDOOR: Final = Backdoor(target=0, size=4, factor=NUM_DEVICES / NUM_ATTACKERS)
ATTACKS: Final[dict[str, Attack | None]] = {
    "none": None,
    "sign flip x 4": SignFlip(factor=4.0),
    "scaling x 10": Scaling(factor=10.0),
    "label flip": LabelFlip(),
    "ALIE z = 1.5": Alie(z=1.5),
    "IPM 0.5": InnerProduct(epsilon=0.5),
    "backdoor x 4": BACKDOOR,
    "grid": GridManipulation(),
}
RADIUS: Final = 1.0
"""Below the norm of the honest Updates: 2.5 to 3.1 in Round 1, 1.1 to 1.7 in Round 8."""
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "weighted_mean": {},
    "trimmed_mean": {"trim": NUM_ATTACKERS / NUM_DEVICES},
    "median": {},
    "meamed": {"f": NUM_ATTACKERS},
    "krum": {"f": NUM_ATTACKERS},
    "multi_krum": {"f": NUM_ATTACKERS},
    # It needs 4 f + 3 Updates, so five attackers of 20 are one more than it withstands.
    "bulyan": {"f": 4},
    "geometric_median": {},
    "centred_clipping": {"radius": RADIUS},
    "norm_bounding": {"radius": RADIUS},
}


def net() -> torch.nn.Module:
    """Return a perceptron with 32 hidden units."""
    torch.manual_seed(1)
    layers = (torch.nn.Flatten(), torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    return torch.nn.Sequential(*layers)


def accuracy(rule: str, attack: Attack | None, clients: Partition, test: Examples, num_rounds: int) -> dict[str, float]:
    """Return the accuracy after the last Round, and that on the test set with the trigger."""
    x = clients.examples.inputs["x"]
    app = App(name="fashion", module=net(), calibration=x[:256], batch_size=16, num_classes=10)
    plan = {
        "training.learning_rate": 0.05,
        "aggregation.rule": rule,
        "aggregation.rule_options": OPTIONS[rule],
        "aggregation.max_examples": max(clients.sizes),
        "cohort.quorum": NUM_DEVICES,
        "evaluation.every": num_rounds,
    }
    attackers = None if attack is None else Attackers(clients=range(NUM_ATTACKERS), attack=attack)
    devices = DeviceModel(attackers=attackers)
    tests = {"test": test} | ({BACKDOOR_SET: attack.triggered(test)} if isinstance(attack, Backdoor) else {})
    settings = SimulationSettings(test=tests, plan=plan, validation_fraction=0.0, devices=devices, quiet=True)
    result = simulate(app, clients, cohort=NUM_DEVICES, rounds=num_rounds, settings=settings)
    last = result.rounds[-1]
    row = {"accuracy": last.test_accuracy}
    if BACKDOOR_SET in tests:
        row["backdoor_accuracy"] = last.metrics[f"{BACKDOOR_SET}.accuracy"]
    return row


def table(options: argparse.Namespace, rules: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each pair of a rule and an attack. The seed decides who has which examples."""
    data = load_data("fashion-mnist")
    train = data.train.take(np.arange(options.examples))
    partitions = [
        partition(train, NUM_DEVICES, Dirichlet(alpha=options.alpha), seed=seed + 1) for seed in range(options.seeds)
    ]
    attacks = options.attacks.split(",") if options.attacks else list(ATTACKS)
    rows = []
    for rule in rules:
        for name in attacks:
            runs = [accuracy(rule, ATTACKS[name], clients, data.test, options.rounds) for clients in partitions]
            values = {column: [run[column] for run in runs] for column in runs[0]}
            means = {column: float(np.mean(each)) for column, each in values.items()}
            row = {"rule": rule, "attack": name, **means, "seeds": values}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def cost(rule: str, num_updates: int, megabytes: float) -> dict[str, Any]:
    """Return the cost of one fold, measured in a new process."""
    with TemporaryDirectory() as folder:
        write_updates(Path(folder), min(num_updates, 64), megabytes)
        command = [sys.executable, __file__, "--fold", rule, "--updates", str(num_updates), "--folder", folder]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row = {"rule": rule, "updates": num_updates, "megabytes": megabytes, **json.loads(output)}
    row["passes"] = row["bytes_above_idle"] <= GATE_MODELS * megabytes * MEGABYTE + GATE_BYTES
    print(json.dumps(row), flush=True)
    return row


def write_updates(folder: Path, num_files: int, megabytes: float) -> None:
    """Write the payloads of Updates: values of ``fixed32`` with the deviation of a usual change."""
    rng = np.random.default_rng(1)
    for index in range(num_files):
        values = rng.integers(-(1 << 26), 1 << 26, int(megabytes * MEGABYTE) // 4, np.int32)
        values.tofile(folder / str(index))


def fold_once(rule: str, num_updates: int, folder: Path) -> dict[str, float]:
    """Fold the Updates of a folder, and read the aggregate in slices, as the outer step does."""
    files = sorted(folder.iterdir())
    num_values = files[0].stat().st_size // 4
    options = {**OPTIONS[rule], **({"f": num_updates // 5} if "f" in OPTIONS[rule] else {})}
    plan = Plan(
        name="fold",
        cohort=CohortPlan(concurrency=num_updates, buffer=num_updates, quorum=num_updates),
        training=Training(learning_rate=0.1),
        codec=CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(rule=rule, rule_options=options),
        stop=StopPlan(),
    )

    def source(device: str, _scale: int) -> Contribution:
        path = files[int(device) % len(files)]

        def read(first: int, last: int) -> np.ndarray:
            return np.fromfile(path, np.int32, last - first, offset=4 * first)

        firsts = range(0, num_values, SLICE_VALUES)
        pieces = (read(first, min(first + SLICE_VALUES, num_values)) for first in firsts)
        one = Contribution(
            weights=(7,), fresh_weights=(7,), shifts=(0,), bits=32, max_shift=0, counts={}, pieces=pieces
        )
        return replace(one, read=read)

    layout = TensorTable.of({"w": (num_values,)})
    Path("/proc/self/clear_refs").write_text("5")
    idle, begin = peak_bytes(), time.perf_counter()
    devices = [f"{index:04}" for index in range(num_updates)]
    aggregate = SetFold(rule_of(plan), layout, (-30,), source).complete(devices)
    for first in range(0, num_values, SLICE_VALUES):
        part = aggregate.part(first, min(first + SLICE_VALUES, num_values))
        assert np.isfinite(part).all(), "an aggregate is finite"
    return {"seconds": time.perf_counter() - begin, "bytes_above_idle": peak_bytes() - idle}


def peak_bytes() -> int:
    """Return the largest resident set of this process since ``clear_refs``."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the accuracies as a table of colours."""
    from matplotlib.figure import Figure

    rules = list(dict.fromkeys(row["rule"] for row in rows))
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    values = np.array([row["accuracy"] for row in rows]).reshape(len(rules), len(attacks))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, vmin=0.1, vmax=0.9, cmap="viridis")
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white")
    axes.set_xticks(range(len(attacks)), attacks, rotation=40, ha="right")
    axes.set_yticks(range(len(rules)), rules)
    figure.colorbar(image, label="test accuracy")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each result, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=6000, help="training examples of all devices")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet partition")
    parser.add_argument("--rules", default=",".join(OPTIONS))
    parser.add_argument("--attacks", default="", help="of the columns, comma-separated; all if empty")
    parser.add_argument("--seeds", type=int, default=3, help="partitions of the examples")
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--only", choices=("accuracy", "cost"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fold", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.fold:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(json.dumps(fold_once(options.fold, options.updates, options.folder)))
        return 0
    rules, report = options.rules.split(","), dict[str, Any]()
    if options.only != "accuracy":
        report["cost"] = [cost(rule, options.updates, options.megabytes) for rule in rules]
    if options.only != "cost":
        report["accuracy"] = table(options, rules)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.plot and "accuracy" in report:
        plot(report["accuracy"], options.plot)
    return 0 if all(row["passes"] for row in report.get("cost", [])) else 1


if __name__ == "__main__":
    sys.exit(main())

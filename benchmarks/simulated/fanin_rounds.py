"""The same with fanin: ``simulate`` with the engine of ``--engine``."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from load import Load, accuracy, arrays, module, report

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, Sgd
from fanin.simulation import Iid, SimulationSettings, partition, simulate


def main() -> None:
    """Run all rounds: ``SCRIPT FOLDER LOAD-AS-JSON ENGINE PROCESSES``."""
    folder, text, engine, processes = sys.argv[1:]
    load = Load(**json.loads(text))
    data = arrays(Path(folder))
    examples = Examples(inputs={"x": data["x"].reshape(-1, 1, 28, 28)}, y=data["y"].reshape(-1).astype(np.int32))
    app = App(
        name="fashion",
        module=module(load.model),
        calibration=torch.from_numpy(examples.inputs["x"][:256]),
        batch_size=load.batch_size,
        num_classes=10,
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
    )
    times: list[float] = []
    settings = SimulationSettings(
        plan={"training.learning_rate": load.learning_rate, "training.epochs": 1},
        # The peers hold nothing out either.
        validation_fraction=0.0,
        engine=engine,
        processes=int(processes),
        on_round=lambda row: times.append(time.perf_counter()),
        quiet=True,
    )
    result = simulate(
        app, partition(examples, load.users, Iid()), cohort=load.cohort, rounds=load.rounds, settings=settings
    )
    report(np.diff(times).tolist(), accuracy(result.module, data))


if __name__ == "__main__":
    main()

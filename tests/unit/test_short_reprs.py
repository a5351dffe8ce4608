"""The ``repr`` of a large result is one line: a notebook and a debugger print it."""

import re

import numpy as np
import pytest
from support.round_rows import ROW

from fanin.clients.data.digits import load_digits
from fanin.edge.tensors import TensorTable
from fanin.simulation import BestVersion, Iid, Result, partition

MEASURED = "round=2, train_loss=0.5, test_loss=0.25, test_accuracy=0.75, balanced_accuracy=0.625"


def test_a_simulation_prints_its_app_and_its_last_round() -> None:
    result = Result(
        app=None,
        engine="flower",
        selection="uniform",
        table=TensorTable.of({"w": (1000,)}),
        rounds=(ROW,) * 100,
        parameters=np.zeros(1000, np.float32),
        best=None,
        digests=("00",) * 100,
        is_complete=True,
        clients=(),
        failures=(),
        events=(),
    )
    assert repr(result) == f"Result(app=None, {MEASURED}; see .rounds, .clients, .failures, .events and .arrays)"


@pytest.mark.heavy
def test_the_best_version_prints_its_round() -> None:
    import torch
    from torch import nn

    from fanin.edge.export import App

    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    app = App(name="digits", module=module, calibration=torch.zeros(4, 1, 8, 8), batch_size=4, num_classes=10)
    best = BestVersion(app=app, table=TensorTable.of({"w": (9,)}), row=ROW, parameters=np.zeros(9, np.float32))
    assert repr(best) == f"BestVersion(app='digits', {MEASURED}; see .row, .parameters and .module)"


def test_a_partition_prints_its_examples_and_sizes() -> None:
    data = load_digits()
    clients = partition(data, 6, Iid(), seed=2)
    few, many = min(clients.sizes), max(clients.sizes)
    examples = "Examples(x=float32 (1797, 1, 8, 8), y=int32 (1797,))"
    assert repr(clients) == f"Partition({examples}, clients=6, {few} to {many} each; see .sizes and .indices)"


@pytest.mark.heavy
def test_a_ranking_of_layouts_prints_the_best_one() -> None:
    from fanin.datacenter.planner.options import PlanOptions, plan

    result = plan(PlanOptions(model="125m", world=2, device="h100"))
    assert re.fullmatch(r"PlanResult\(\d+ layouts, best: mesh .*, \S+ s a step; see .choices\)", repr(result))

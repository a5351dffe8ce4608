"""``simulate``: arguments that it refuses before the export, its output, and its cleanup. No test here exports."""

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from support.stored import committed_update
from support.values import assignment, plan, update
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Recipe, Sgd, squared_error
from fanin.edge.runtimes.evaluations import loss_count
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import VersionPublished
from fanin.server.evaluation.metrics import VersionMetrics, unknown_values
from fanin.simulation import Iid, Partition, SimulationSettings, partition, simulate
from fanin.simulation.host import exits_at_sigterm
from fanin.simulation.progress import SimulationProgress, line_of
from fanin.simulation.rows import cells, client_rows, initial_row, round_row


def regression(targets: tuple[int, ...]) -> tuple[App, Partition]:
    """Return a model with outputs (n, 1), and clients with targets of this shape."""
    x = np.ones((12, 3), np.float32)
    app = App(name="values", module=nn.Linear(3, 1), calibration=torch.ones(4, 3), batch_size=2, loss=squared_error)
    return app, partition(Examples(inputs={"x": x}, y=np.ones((12, *targets), np.float32)), 2, Iid())


@pytest.mark.parametrize(
    ("targets", "error"),
    [
        ((), "(n,), expected (n, 1) as the module returns values for it; reshape it with y.reshape(-1, 1)"),
        (
            (2,),
            "(n, 2), expected (n, 1) as the module returns values for it; give the module an output for each target",
        ),
    ],
)
def test_targets_of_another_shape_are_refused_before_the_export(targets: tuple[int, ...], error: str) -> None:
    with raises(InvalidInput, f"simulate: clients: got y of shape {error}"):
        simulate(*regression(targets), cohort=2, rounds=1)


def test_a_module_that_fails_has_no_target_shape() -> None:
    app = App(name="wrong", module=nn.Linear(5, 1), calibration=torch.ones(4, 3), batch_size=2)
    assert app.target_shape is None


@pytest.mark.parametrize(
    ("plan", "cohort", "error"),
    [
        (
            {"training.learning_rate": 0.0},
            2,
            "simulate: plan: training.learning_rate: got 0.0, expected a number from 1.2e-38 to 1.7e+38",
        ),
        ({}, 0, "simulate: cohort: cohort.concurrency: got 0, expected an integer from 1 to 1000000"),
        (
            {"stages": "error_feedback"},
            2,
            (
                "simulate: plan: stages: got 'error_feedback', expected a list of mappings, as in "
                '{"stages": [{"name": "error_feedback"}]}'
            ),
        ),
        ({"name.x": 1}, 2, "simulate: plan: name.x: name is not a section; set name as a whole"),
    ],
)
def test_an_error_in_the_plan_names_the_argument(plan: dict[str, object], cohort: int, error: str) -> None:
    settings = SimulationSettings(plan={"training.learning_rate": 0.1} | plan)
    with pytest.raises(InvalidPlan) as excinfo:
        simulate(*regression((1,)), cohort=cohort, rounds=1, settings=settings)
    assert str(excinfo.value).startswith(error)
    assert "--set" not in str(excinfo.value)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (
            {"training.proximal_weight": 0.1},
            "got training.proximal_weight 0.1, but the train graph has no such input; export",
        ),
        ({"training.batch_size": 5}, "got training.batch_size 5, but the bundle's train graphs are for 2; choose"),
        ({"training.optimizer": {"beta1": 0.5}}, "got training.optimizer beta1, but the settings in the train graph"),
        (
            {"schedule": [{"from_round": 2}, {"from_round": 3, "proximal_weight": 0.1}]},
            r"got schedule\.1\.proximal_weight 0.1, but the train graph has no such input; export",
        ),
        (
            {"schedule": [{"from_round": 2, "optimizer": {"beta1": 0.5}}]},
            r"got schedule\.0\.optimizer beta1, but the settings in the train graph are: momentum; export",
        ),
        (
            {"training.optimizer": {"momentun": 0.5}},
            r".*: momentum; for momentun, did you mean momentum\? \(docs/howto/recipe",
        ),
        (
            {"training.optimizer": {"learning_rate": 0.5}},
            ".*; the optimizers of fanin have momentum, weight_decay, beta1, beta2, decay; remove learning_rate",
        ),
        (
            {"training.optimizer": {"weight_decay": 0.1}},
            r".* has the field settable=\('weight_decay',\) \(docs/howto/recipe",
        ),
        (
            {"schedule": [{"from_round": 2, "optimizer": {"momentum": 1.5}}]},
            r"got schedule\.0\.optimizer\.momentum 1.5, expected at least 0 and below 1",
        ),
        ({"schedule": [{"from_round": 2, "batch_size": 5}]}, r"got schedule\.0\.batch_size 5, but the bundle's train"),
        (
            {"flower.config": {"mu": 1}, "schedule": [{"from_round": 2, "flower": {"config": {"mu": 2}}}]},
            r"got flower.config, schedule\.0\.flower\.config, but the bundle has graphs, which read no such values; ",
        ),
        (
            {"stages": [{"name": "scaffold", "options": {"num_devices": 2}}]},
            "got the stage 'scaffold', but the train graph has no",
        ),
        ({"cohort.selection": "unifrom"}, "cohort.selection: got 'unifrom', .*; did you mean uniform?"),
        ({"aggregation.rule": "weighted_men"}, "aggregation.rule: got 'weighted_men', .*; did you mean weighted_mean?"),
        ({"aggregation.outer_optimizer": "adamm"}, "aggregation.outer_optimizer: got 'adamm'"),
        ({"statistics": [{"name": "evaluate.absolut_error", "bound": 9}]}, ".*did you mean absolute_error?"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_the_export(
    plan: dict[str, object], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SimulationSettings(plan={"training.learning_rate": 0.1} | plan)
    with pytest.raises(InvalidPlan, match=error):
        simulate(*regression((1,)), cohort=2, rounds=1, settings=settings)
    assert "exporting" not in capsys.readouterr().err


@pytest.mark.parametrize("num_devices", [1, 3, 300])
def test_scaffold_of_another_number_of_clients_is_refused_before_the_export(num_devices: int) -> None:
    app, clients = regression((1,))
    app = replace(app, recipe=Recipe(optimizer=Sgd(momentum=0.0), scaffold=True))
    stages = [{"name": "scaffold", "options": {"num_devices": num_devices}}]
    settings = SimulationSettings(plan={"training.learning_rate": 0.1, "stages": stages})
    text = f"simulate: plan: stages: scaffold: got num_devices {num_devices} and 2 clients, expected num_devices 2: it "
    with raises(InvalidPlan, f"{text}counts all clients"):
        simulate(app, clients, cohort=1, rounds=1, settings=settings)


@pytest.mark.parametrize("metric", [3, "none.onnx", lambda predictions, targets: 0.0])
def test_a_metric_that_cannot_be_computed_is_refused_before_the_export(metric: object) -> None:
    settings = SimulationSettings(plan={"training.learning_rate": 0.1}, metrics={"mine": metric}, quiet=True)  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match=r"metric"):
        simulate(*regression((1,)), cohort=2, rounds=1, settings=settings)


def test_an_unknown_best_metric_is_refused_before_the_export(capsys: pytest.CaptureFixture[str]) -> None:
    app, clients = regression((1,))
    settings = SimulationSettings(
        plan={"training.learning_rate": 0.1, "evaluation.best": "accuracy"},
        test=clients.examples,
        metrics={"mine": lambda predictions, targets: 0.0},
    )
    names = ["loss", "mine", "mine_int8", "squared_error", "squared_error_int8"]
    with raises(InvalidPlan, f"plan: evaluation.best: got 'accuracy', expected one of {names}"):
        simulate(app, clients, cohort=2, rounds=1, settings=settings)
    assert "exporting" not in capsys.readouterr().err


def test_a_plan_with_sets_needs_test_examples_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    app, clients = regression((1,))
    keys = {"evaluation.data": "test", "evaluation.sets": [{"name": "other", "data": "letters"}]}
    plan = {"training.learning_rate": 0.1} | keys
    for test in (clients.examples, {"test": clients.examples, "letters": clients.examples}):
        with pytest.raises(InvalidInput, match=r"got a plan with evaluation\.sets other") as refused:
            simulate(app, clients, cohort=2, rounds=1, settings=SimulationSettings(plan=plan, test=test))
        assert refused.value.code == "FN-1846"
    assert "exporting" not in capsys.readouterr().err


def test_a_plan_with_evaluations_needs_test_examples() -> None:
    settings = SimulationSettings(plan={"training.learning_rate": 0.1, "evaluation.data": "digits"})
    with pytest.raises(InvalidInput, match="FN-1181"):
        simulate(*regression((1,)), cohort=2, rounds=1, settings=settings)


def test_a_statistic_of_the_plan_has_a_column() -> None:
    event = VersionPublished(number=1, version_sha256="", parent=0, round=1, statistics={"words": 7})
    row = round_row(event, 1.0, 2, None, ("words", "lines"))
    assert cells(row)["statistics.words"] == 7
    assert np.isnan(cells(row)["statistics.lines"])
    assert list(cells(initial_row(None, ("words", "lines")))) == list(cells(row))


@pytest.mark.parametrize(
    ("counts", "num_classes", "has_diverged"),
    [
        ({m.TRAIN_LOSS: loss_count(3e30, 3, 10)}, 10, True),
        ({m.TRAIN_LOSS: loss_count(3 * 65535.0, 3, 10)}, 10, False),
        ({m.TRAIN_LOSS: loss_count(3e30, 3, 0)}, 0, True),
        ({m.TRAIN_LOSS: loss_count(3e6, 3, 0)}, 0, False),
        ({m.EVAL_EXAMPLES: 2, m.EVAL_LOSS: loss_count(-2e30, 2, 10)}, 10, True),
        ({m.EVAL_EXAMPLES: 0, m.EVAL_LOSS: 0}, 10, False),
    ],
)
def test_a_loss_that_was_cut_is_reported(counts: dict[str, int], num_classes: int, has_diverged: bool) -> None:
    header, _ = update(assignment())
    statistics = m.Statistics(counts={m.EXAMPLES: 3} | counts)
    update_of_loss = replace(committed_update("client-4"), header=replace(header, statistics=statistics))
    (row,) = client_rows([update_of_loss], 1, plan(), num_classes)
    assert row.has_diverged is has_diverged
    version_row = round_row(VersionPublished(number=1, version_sha256="", parent=0, round=1), 1.0, 2, None)
    assert "cut" not in line_of(version_row)
    assert "(cut: num_diverged 2, lower the learning rate)" in line_of(replace(version_row, num_diverged=2))


def test_a_metric_of_the_plan_has_columns_also_for_a_version_that_is_not_evaluated() -> None:
    event = VersionPublished(number=1, version_sha256="", parent=0, round=1)
    values = {"loss": 0.5, "accuracy": 0.75, "accuracy_int8": 0.25, "macro_f1": 0.6, "macro_f1_int8": 0.2}
    row = cells(round_row(event, 1.0, 2, VersionMetrics(num_examples=4, values=values)))
    assert (row["test_loss"], row["test_accuracy"], row["test_accuracy_int8"]) == (0.5, 0.75, 0.25)
    assert (row["metrics.macro_f1"], row["metrics.macro_f1_int8"]) == (0.6, 0.2)
    unknown = cells(initial_row(unknown_values(["macro_f1"])))
    assert list(unknown) == list(row)
    assert np.isnan([unknown["test_loss"], unknown["metrics.macro_f1_int8"]]).all()


def test_progress_is_one_line_for_the_export_and_one_for_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SimulationProgress(quiet=False)
    with progress.exporting("digits"):
        pass
    progress.row(initial_row(None))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(" s: exporting digits: tracing, converting and verifying its graphs, once")
    assert lines[1].endswith(line_of(initial_row(None)))
    slow = SimulationProgress(quiet=False, every_s=0.01)
    with slow.exporting("gru"):
        logging.getLogger("fanin.edge.export").info("onnx: tracing")
        time.sleep(0.1)
    assert "still exporting gru: onnx: tracing" in capsys.readouterr().err
    quiet = SimulationProgress(quiet=True)
    with quiet.exporting("digits"):
        quiet.row(initial_row(None))
    assert capsys.readouterr().err == ""


SCRIPT = """
import asyncio, tempfile
from pathlib import Path
from fanin.simulation import run_virtual
from fanin.simulation.host import exits_at_sigterm

async def work():
    while True:
        await asyncio.sleep(1.0)

with exits_at_sigterm(), tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
    print(folder, flush=True)
    run_virtual(work())
"""


@pytest.mark.parametrize("prefix", ["", "trap '' INT; "], ids=["terminal", "background"])
def test_sigterm_leaves_no_folder(tmp_path: Path, prefix: str) -> None:
    # A shell script starts a process with "&" with SIGINT ignored.
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = ["sh", "-c", f'{prefix}exec "$0" -c "$1"', sys.executable, SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().decode().strip())
        assert folder.is_dir()
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_handlers_of_a_caller_are_kept_and_restored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with exits_at_sigterm():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with exits_at_sigterm():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_ctrl_c_stays_ctrl_c_and_a_thread_sets_no_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), exits_at_sigterm():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    def enter() -> None:
        with exits_at_sigterm():
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter).result()

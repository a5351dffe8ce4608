"""A Flower app as a Trainer: arrays that are uploaded, state that stays on the device, and errors of apps."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.errors import raises
from support.flower_apps import MESSAGE_APP, NUMPY_APP, write_app
from support.linear import linear_graphs
from support.values import PUBLISHER

from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.flower.app import FlowerApp, load_arrays
from fanin.clients.flower.states import FlowerState, FlowerStates
from fanin.clients.flower.task import AppFailed, FlowerReply, FlowerReport, FlowerRunner, FlowerSettings, FlowerTask
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.arrays import ArrayChoices, read_layout, write_arrays
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.tensors import Array
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.protos.plans import FlowerPlan, Statistic

INITIAL: Final[Mapping[str, Array]] = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "norm.num_batches_tracked": np.array(3, np.int64),
    "layer.bias": np.ones(2, np.float32),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_arrays(INITIAL, tmp_path / "bundle", PUBLISHER, "tiny", ArrayChoices(kept=["*.num_batches_tracked"]))


@pytest.fixture
def runner(tmp_path: Path) -> FlowerApp:
    """A runner of the app in this process."""
    folder = write_app(tmp_path / "app", "tiny_message_app", MESSAGE_APP)
    return FlowerApp(FlowerSettings(app="tiny_message_app:app", folder=folder, partition=1))


def work(bundle: Bundle, number: int = 1, after: int = 0) -> m.Assignment:
    """Return the Assignment of a Round; the state is that after the Round ``after``."""
    statistics = (
        *example_assignment(bundle).statistics,
        *(Statistic(name=name, bound=m.MAX_COUNT) for name in STATISTIC_NAMES),
    )
    return replace(
        example_assignment(bundle, m.Training(learning_rate=0.5, seed=1)),
        round=number,
        state=m.StageState(lineage=0, round=after),
        statistics=statistics,
        flower=FlowerPlan(config={"local-epochs": 2, "mu": 0.5, "key": b"\x00", "deep": True}),
    )


STATISTIC_NAMES: Final = ("train.rounds", "evaluate.eval_acc")


class Recorder:
    """A runner that records the tasks of another, and changes its replies."""

    name = "recorder 1"
    warnings = ()

    def __init__(self, runner: FlowerRunner, **changes: object) -> None:
        self._runner = runner
        self._changes = changes
        self.tasks: list[FlowerTask] = []

    def run(self, task: FlowerTask, should_continue: Countdown) -> FlowerReply:
        self.tasks.append(task)
        return replace(self._runner.run(task, should_continue), **self._changes)  # type: ignore[arg-type]


def train_once(bundle: Bundle, runner: FlowerRunner, folder: Path, work: m.Assignment) -> dict[str, int]:
    """Train once. Return the counts."""
    counts = FlowerTrainer(runner, FlowerStates(folder)).train(example_model(bundle), work, Countdown()).counts
    return dict(counts)


def test_a_bundle_without_graphs_keeps_the_order_and_the_local_arrays(bundle: Bundle) -> None:
    layout = read_layout(bundle)
    assert layout.names == tuple(INITIAL)
    assert {name: (value.dtype, value.tolist()) for name, value in layout.local.items()} == {
        "norm.num_batches_tracked": (np.int64, 3)
    }
    assert bundle.manifest.graph_formats == (NO_GRAPHS,)
    views = bundle.manifest.table.views(bundle.initial_parameters())
    assert {name: value.tolist() for name, value in views.items()} == {
        "layer.bias": [1.0, 1.0],
        "layer.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    }


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"w": np.array([True])},
            (
                "arrays: got 1 of ['bool'], of which none travels, expected at least one of floats, or of whole "
                "numbers up to 16777216; convert them, or keep fewer"
            ),
        ),
        (
            {"w": np.array([1e39])},
            ("array 'w': got 1e+39, expected values of float32, because arrays travel as float32; scale it"),
        ),
        (
            {"w": np.array([np.nan], np.float32)},
            ("array 'w': got float32 (1,), expected finite numbers of a numpy dtype; convert it"),
        ),
        (
            {"w": np.array(["a"])},
            ("array 'w': got <U1 (1,), expected finite numbers of a numpy dtype; convert it"),
        ),
    ],
)
def test_arrays_that_no_bundle_can_have_are_refused(tmp_path: Path, arrays: dict[str, Array], message: str) -> None:
    with raises(InvalidInput, message):
        write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "tiny")


def test_a_bundle_with_graphs_is_no_bundle_of_an_app(tmp_path: Path, runner: FlowerApp) -> None:
    graphs = assemble(linear_graphs(), tmp_path / "graphs", PUBLISHER)
    with pytest.raises(InvalidBundle, match="FN-0360"):
        train_once(graphs, runner, tmp_path / "states", work(graphs))


def test_an_app_is_a_trainer(bundle: Bundle, runner: FlowerApp, tmp_path: Path) -> None:
    trainer = FlowerTrainer(runner, FlowerStates(tmp_path / "states"), partition=1)
    assert (trainer.graph_format, trainer.runtime) == (NO_GRAPHS, "flwr 1.41.0")
    change = check_trainer(trainer, example_model(bundle), work(bundle))
    views = bundle.manifest.table.views(change.values)
    assert views["layer.bias"].tolist() == [-0.25, -0.25]
    assert change.counts == {
        m.EXAMPLES: 20,
        m.TRAIN_LOSS: 10 * m.LOSS_UNIT,
        m.EVAL_EXAMPLES: 6,
        m.EVAL_LOSS: 12 * m.LOSS_UNIT,
        "train.rounds": 20 << 16,
        "evaluate.eval_acc": round(0.75 * 6 * (1 << 16)),
    }


def test_the_message_has_the_version_the_config_and_the_devices_own_arrays(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path
) -> None:
    recorder = Recorder(runner)
    train_once(bundle, recorder, tmp_path / "states", work(bundle))
    (task,) = recorder.tasks
    assert list(task.arrays) == list(INITIAL)
    plan_config = {"local-epochs": 2, "mu": 0.5, "key": b"\x00", "deep": True}
    assert dict(task.config) == {
        "lr": 0.5,
        **plan_config,
        "server_round": 1,
        "current_round": 1,
        "round": 1,
        "server-round": 1,
    }
    assert [type(task.config[name]) for name in plan_config] == [int, float, bytes, bool]
    assert task.arrays["norm.num_batches_tracked"].tolist() == 3


def test_state_and_local_arrays_follow_the_rounds_that_counted(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path
) -> None:
    folder, recorder = tmp_path / "states", Recorder(runner)
    rounds = [(1, 0), (2, 1), (3, 1), (4, 3)]
    counts = [train_once(bundle, recorder, folder, work(bundle, number, after)) for number, after in rounds]
    # Round 2 failed: round 3 begins with the state after round 1.
    assert [count["train.rounds"] / count[m.EXAMPLES] / (1 << 16) for count in counts] == [1, 2, 2, 3]
    assert [task.arrays["norm.num_batches_tracked"].tolist() for task in recorder.tasks] == [3, 4, 4, 5]
    assert sorted(path.name for path in folder.iterdir()) == ["run.0.3.flower", "run.0.4.flower"]


def test_a_damaged_state_is_logged_and_the_app_starts_without_it(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "states"
    train_once(bundle, runner, folder, work(bundle))
    path = folder / "run.0.1.flower"
    path.write_bytes(path.read_bytes()[:-1])
    assert train_once(bundle, runner, folder, work(bundle, 2, 1))["train.rounds"] == 20 << 16
    assert "state of run run, round 1: cannot be read" in caplog.text


def test_states_of_the_last_four_runs_are_stored(bundle: Bundle, tmp_path: Path) -> None:
    states = FlowerStates(tmp_path / "states")
    for index in range(6):
        states.put(replace(work(bundle), run_id=f"run-{index}"), FlowerState(context=b"x"))
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == [
        f"run-{index}.0.1.flower" for index in range(2, 6)
    ]


def test_a_state_that_grows_without_end_is_refused() -> None:
    text = f"context.state: got {(64 << 20) + 1} bytes, expected at most {64 << 20}; let the app remove records"
    with raises(InvalidInput, f"{text} that it no longer needs"):
        FlowerState(context=bytes((64 << 20) + 1))


def test_arrays_and_metrics_that_stay_on_the_device_are_logged_once(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = FlowerTrainer(runner, FlowerStates(tmp_path / "states"))
    assignment = replace(work(bundle), statistics=())
    for _ in range(2):
        trainer.train(example_model(bundle), assignment, Countdown())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "arrays that do not travel: norm.num_batches_tracked (int64)",
        # The losses of the training and of the evaluation travel with each Update.
        ("metrics without [[statistics]] of these names in the plan are not sent: evaluate.eval_acc, train.rounds"),
    ]


ARRAYS: Final = dict(INITIAL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arrays": {"layer.weight": ARRAYS["layer.weight"], "other": ARRAYS["layer.bias"]}},
            (
                "flower app: returned 2 arrays, ['layer.bias', 'norm.num_batches_tracked'] missing and ['other'] new, "
                "expected the 3 of the message; correct train"
            ),
        ),
        (
            {"arrays": ARRAYS | {"layer.bias": np.ones(3, np.float32)}},
            (
                "flower app: array 'layer.bias': returned float32 (3,), expected float32 (2,) as in the message; "
                "correct train. The arrays of a Run have fixed shapes (docs/howto/flower.md#the-arrays)"
            ),
        ),
        (
            {"arrays": ARRAYS | {"norm.num_batches_tracked": np.array(4.0)}},
            (
                "flower app: array 'norm.num_batches_tracked': returned float64 (), expected int64 () as in the "
                "message; correct train. The arrays of a Run have fixed shapes (docs/howto/flower.md#the-arrays)"
            ),
        ),
        (
            {"arrays": ARRAYS | {"layer.bias": np.array([1, np.inf], np.float32)}},
            "flower app: array 'layer.bias': returned NaN or infinity, expected finite values; lower the learning rate",
        ),
        (
            {"training": FlowerReport(num_examples=-1)},
            "flower app: train: got num-examples -1, expected a whole number from 0 to 1099511627776",
        ),
        (
            {"training": FlowerReport(num_examples=2.5)},
            "flower app: train: got num-examples 2.5, expected a whole number from 0 to 1099511627776",
        ),
    ],
)
def test_a_wrong_result_has_one_error_and_leaves_no_state(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with raises(AppFailed, message):
        train_once(bundle, Recorder(runner, **changes), tmp_path / "states", work(bundle))
    assert list((tmp_path / "states").iterdir()) == []


def test_a_metric_that_is_no_number_is_omitted(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = FlowerReport(num_examples=1, metrics={"rounds": float("nan"), "train_loss": float("inf")})
    counts = train_once(bundle, Recorder(runner, training=training), tmp_path / "states", work(bundle))
    assert "train.rounds" not in counts and m.TRAIN_LOSS not in counts
    assert "metric train.rounds: got nan, expected a finite number; it is left out" in caplog.text
    assert "metric train.train_loss: got inf, expected a finite loss; it is left out" in caplog.text


def test_a_loss_of_the_evaluation_that_is_no_number_is_omitted_with_a_warning(
    bundle: Bundle, runner: FlowerApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = FlowerReport(num_examples=1, metrics={"eval_loss": float("nan")})
    counts = train_once(bundle, Recorder(runner, evaluation=evaluation), tmp_path / "states", work(bundle))
    assert m.EVAL_LOSS not in counts and counts[m.EVAL_EXAMPLES] > 0
    assert "metric evaluate.eval_loss: got nan, expected a finite loss; it is left out" in caplog.text


def test_a_numpy_client_participates_by_position(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "tiny_numpy_app", NUMPY_APP)
    app = FlowerApp(FlowerSettings(app="tiny_numpy_app:app", folder=folder))
    arrays = app.initial()
    assert list(arrays) == [str(index) for index in range(12)]
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "list")
    change = FlowerTrainer(app, FlowerStates(tmp_path / "states")).train(
        example_model(bundle), work(bundle), Countdown()
    )
    views = bundle.manifest.table.views(change.values)
    # "10" precedes "2" among the parameters, but not in the app's list.
    changed_values = {name: value.tolist() for name, value in views.items() if value.any()}
    assert changed_values == {"0": [2.0, 2.0, 2.0], "2": [3.0]}
    assert change.counts == {
        m.EXAMPLES: 7,
        m.TRAIN_LOSS: round(7 * 0.25 * m.LOSS_UNIT),
        m.EVAL_EXAMPLES: 4,
        m.EVAL_LOSS: 6 * m.LOSS_UNIT,
    }


@pytest.mark.parametrize("name", ["Client", "client_fn", "instance"])
def test_forms_of_an_app(tmp_path: Path, name: str) -> None:
    text = NUMPY_APP + "\ninstance = Client()\n"
    folder = write_app(tmp_path / "app", "tiny_forms_app", text)
    assert len(FlowerApp(FlowerSettings(app=f"tiny_forms_app:{name}", folder=folder)).initial()) == 12


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("tiny_broken", "flower app tiny_broken: import: ValueError: got 'tiny_broken', expected package.mod"),
        ("no_such:app", "flower app no_such:app: import: ModuleNotFoundError: No module named 'no_such'"),
        ("tiny_broken:app", "flower app tiny_broken:app: import: RuntimeError: no data"),
        ("math:pi", "flower app math:pi: import: TypeError: got float, expected a ClientApp, a NumPyClient or a "),
    ],
)
def test_an_app_that_cannot_be_imported_is_reported(tmp_path: Path, app: str, message: str) -> None:
    folder = write_app(tmp_path / "app", "tiny_broken", "raise RuntimeError('no data')\n")
    with pytest.raises(AppFailed, match=re.escape(message)):
        FlowerApp(FlowerSettings(app=app, folder=folder))


def test_a_folder_that_does_not_exist_is_named_before_the_import(tmp_path: Path) -> None:
    message = rf"got the folder {tmp_path}/no-such, which does not exist; name the one with math"
    with pytest.raises(AppFailed, match=message):
        FlowerApp(FlowerSettings(app="math:pi", folder=tmp_path / "no-such"))


def test_a_message_app_has_no_initial_arrays(runner: FlowerApp) -> None:
    with pytest.raises(AppFailed, match="FN-0901"):
        runner.initial()


def test_initial_arrays_of_a_function(tmp_path: Path) -> None:
    text = "import numpy as np\n\ndef initial():\n    return {'w': np.ones(2, 'float32'), 'n': np.array(1)}\n"
    folder = write_app(tmp_path / "app", "tiny_initial", text)
    arrays = load_arrays("tiny_initial:initial", folder)
    assert {name: value.tolist() for name, value in arrays.items()} == {"w": [1.0, 1.0], "n": 1}
    with pytest.raises(AppFailed, match="FN-0905"):
        load_arrays("tiny_initial:np", folder)


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    text = "import numpy as np\n\ndef initial():\n    return {'w': np.ones(2, 'float32')}\n"
    folder = write_app(tmp_path / "app", "tiny_file", text)
    for where, start in (
        (f"{folder.name}/tiny_file.py:initial", tmp_path),
        (f"{folder}/tiny_file.py:initial", tmp_path),
    ):
        assert load_arrays(where, start)["w"].tolist() == [1.0, 1.0]
    error = (
        f"no_such.py:initial: import: FileNotFoundError: got the file {folder}/no_such.py, which does not exist; name"
    )
    with pytest.raises(AppFailed, match=re.escape(error)):
        load_arrays("no_such.py:initial", folder)


def test_the_seed_depends_on_the_round_and_the_partition(bundle: Bundle, runner: FlowerApp, tmp_path: Path) -> None:
    recorder = Recorder(runner)
    for partition, number in [(0, 1), (1, 1), (0, 2), (0, 1)]:
        trainer = FlowerTrainer(recorder, FlowerStates(tmp_path / f"states-{partition}"), partition)
        trainer.train(example_model(bundle), work(bundle, number), Countdown())
    seeds = [task.seed for task in recorder.tasks]
    first, other_partition, other_round, repeat = seeds[:1] + seeds[len(seeds) // 4 :: len(seeds) // 4]
    assert first == repeat
    assert len({first, other_partition, other_round}) == 3

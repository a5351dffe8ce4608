"""Flower apps on a coordinator of fanin, over TLS: a list of arrays, and the PyTorch quickstart of the docs."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from house.tree import ROOT
from support.commands import Fanin, fanin_in_process, one_line, uncoded, usage_line
from support.flower_apps import NUMPY_APP, write_app
from support.flower_reference import Setting, by_flower
from support.hosted import Hosted
from support.linear import linear_graphs
from support.values import PUBLISHER, plan

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.contract import example_assignment, example_model
from fanin.clients.flower.app import FlowerApp, arrays_of
from fanin.clients.flower.states import FlowerStates
from fanin.clients.flower.task import FlowerSettings
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.bundles.bundle import open_folder, read_signed_manifest
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import CohortPlan, FlowerPlan, StopPlan

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "flower"
APP: Final = "."
RUN_CONFIG: Final = "batch-size=256 local-epochs=3"
"""One batch of all examples: the order that a device draws from its secret changes no result."""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator, and the files of its operator and its devices."""
    host = Hosted(tmp_path).start()
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "device.token").write_text(host.device_token)
    (tmp_path / "operator.token").write_text(host.operator_token)
    yield host
    host.stop()


def operator_options(host: Hosted) -> list[object]:
    """Return the options of an operator's command."""
    folder = host.folder
    return ["--server", host.address, "--ca", folder / "ca.pem", "--token-file", folder / "operator.token"]


def join(host: Hosted, project: Path, partition: int, *words: str) -> "subprocess.Popen[str]":
    """Start ``fanin join`` in a process of its own, in the folder of the app."""
    folder = host.folder
    command = [sys.executable, "-m", "fanin.commands.main", "join", "--server", host.address, "--ca", folder / "ca.pem"]
    command += ["--token-file", folder / "device.token", "--publisher", folder / "publisher.pub"]
    command += ["--state", folder / f"device-{partition}", "--partition", str(partition), *words]
    return subprocess.Popen(list(map(str, command)), cwd=project, stderr=subprocess.PIPE, text=True)


def fetch_parameters(host: Hosted, fanin: Fanin) -> dict[str, np.ndarray]:
    """Return the parameters of the newest Version."""
    folder = host.folder
    words = ("--out", folder / "version.npz", "--publisher", folder / "publisher.pub")
    outcome = fanin("fetch", "run", *words, *operator_options(host))
    assert outcome.status == 0, outcome.err
    with np.load(folder / "version.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.nightly
def test_the_quickstart_runs_unchanged(
    host: Hosted, fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "quickstart"
    shutil.copytree(EXAMPLE, project)
    monkeypatch.chdir(project)
    key = tmp_path / "publisher.key"
    bundle_outcome = fanin("bundle", "--flower", ".", "--out", project / "flower-bundle", "--key", key)
    assert (bundle_outcome.status, bundle_outcome.err) == (0, "")
    run_outcome = fanin(
        "run", "plan.toml", "--run-id", "run", "--set", "stop.max_rounds=1", "--key", key, *operator_options(host)
    )
    assert run_outcome.status == 0, run_outcome.err
    flower = ("--flower", APP, "--node-config", "num-partitions=2", "--run-config", RUN_CONFIG, "--max-updates", "1")
    with ExitStack() as stack:
        devices = [stack.enter_context(join(host, project, partition, *flower)) for partition in range(2)]
        logs = [device.communicate(timeout=200)[1] for device in devices]
    assert [device.returncode for device in devices] == [0, 0], logs
    for log in logs:
        assert "update accepted (1 so far)" in log
    (event,) = host.published_versions()
    assert event.total_examples == 256 + 256
    assert event.evaluation is not None and event.evaluation.num_examples == 64 + 64
    watch_outcome = fanin("watch", "run", "--verbose", *operator_options(host))
    assert "validated on 128: loss " in watch_outcome.out and "int8" not in watch_outcome.out
    version = fetch_parameters(host, fanin)
    expected = weighted_mean(project, tmp_path / "states")
    assert set(version) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(version[name], value, rtol=0, atol=1e-6, err_msg=name)


SCALED_APP: Final = NUMPY_APP.replace("return parameters, 7,", "return parameters, self.weight,").replace(
    "return Client().to_client()",
    "client = Client()\n    client.weight = 1 + 2 * context.node_config['partition-id']\n"
    "    if context.node_config.get('fails'):\n        raise RuntimeError('no data here')\n"
    "    return client.to_client()",
)


def test_two_numpy_clients_publish_their_weighted_mean(host: Hosted, fanin: Fanin, tmp_path: Path) -> None:
    project = write_app(tmp_path / "app", "client", SCALED_APP)
    arrays = FlowerApp(FlowerSettings(app="client:app", folder=project)).initial()
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "numbers")
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    host.start_run(plan(buffer=2, max_rounds=2), bundle, PUBLISHER)
    with ExitStack() as stack:
        words = ("--flower", "client:app", "--max-updates", "2")
        devices = [stack.enter_context(join(host, project, partition, *words)) for partition in range(2)]
        logs = [device.communicate(timeout=120)[1] for device in devices]
    assert [device.returncode for device in devices] == [0, 0], logs
    events = host.published_versions()
    assert [event.total_examples for event in events] == [4, 4]
    assert events[0].train_loss == 0.25
    # One array was doubled twice, and another was increased by 3 twice. The two clients agree, so the mean is exact on
    # the grid.
    views = fetch_parameters(host, fanin)
    assert views["0"].tolist() == [8.0, 8.0, 8.0]
    assert views["2"].tolist() == [7.0]


def test_two_devices_that_name_one_partition_are_a_warning_of_the_run(
    host: Hosted, fanin: Fanin, tmp_path: Path
) -> None:
    project = write_app(tmp_path / "app", "client", SCALED_APP)
    arrays = FlowerApp(FlowerSettings(app="client:app", folder=project)).initial()
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "numbers")
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    host.start_run(plan(buffer=2, max_rounds=1), bundle, PUBLISHER)
    words = ("--flower", "client:app", "--max-updates", "1", "--node-config", "num-partitions=2 partition-id=1")
    with ExitStack() as stack:
        devices = [stack.enter_context(join(host, project, partition, *words)) for partition in range(2)]
        logs = [device.communicate(timeout=120)[1] for device in devices]
    assert [device.returncode for device in devices] == [0, 0], logs
    outcome = fanin("describe", "run", *operator_options(host))
    assert "both report partition 1: if both have its examples, these count twice" in outcome.out, outcome


def test_a_plan_that_needs_graphs_and_a_bundle_without_them_are_refused_together(
    host: Hosted, fanin: Fanin, tmp_path: Path
) -> None:
    arrays = write_arrays({"w": np.ones(2, np.float32)}, tmp_path / "arrays", PUBLISHER, "ones")
    graphs = assemble(linear_graphs(), tmp_path / "graphs", PUBLISHER)
    graph_plan = replace(plan(), stop=StopPlan(max_rounds=1, max_int8_drop=1.0))
    with pytest.raises(InvalidPlan, match="FN-0260"):
        host.start_run(graph_plan, arrays, PUBLISHER)
    with pytest.raises(InvalidPlan, match="FN-0260"):
        host.start_run(replace(plan(), flower=FlowerPlan(config={"lr": 1.0})), graphs, PUBLISHER)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    outcome = fanin("inspect", tmp_path / "arrays", "--publisher", tmp_path / "publisher.pub")
    assert "arrays without graphs; code on the device trains them" in outcome.out, outcome.err
    np.savez(tmp_path / "data.npz", x=np.ones((2, 2), np.float32))
    text = one_line(fanin("infer", tmp_path / "arrays", "--data", tmp_path / "data.npz"), "infer")
    assert text == (
        f"{tmp_path / 'arrays'}: the bundle has no graphs, expected an infer graph; run its model in your own "
        "framework, with the parameters of fanin fetch"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "d.npz"), "--flower: got it with --data, --serve or --runtime, expected it alone"),
        (("--serve",), "--flower: got it with --data, --serve or --runtime, expected it alone"),
    ],
)
def test_options_of_join_that_do_not_fit_an_app(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(write_app(tmp_path / "app", "client", NUMPY_APP))
    files = ("--server", "localhost:1", "--ca", "ca.pem", "--publisher", "publisher.pub")
    assert message in usage_line(fanin("join", *files, "--flower", "client:app", *words), "join")


def test_a_node_config_that_cannot_be_read_is_an_error_of_the_app(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_app(tmp_path / "app", "client", NUMPY_APP))
    files = ("--server", "localhost:1", "--ca", "ca.pem", "--publisher", "publisher.pub")
    outcome = fanin("join", *files, "--flower", "client:app", "--node-config", "nonsense")
    error = "flower app client:app: node_config: ValueError: got 'nonsense', expected key"
    assert error in one_line(outcome, "join")


def test_a_bundle_of_an_app_or_of_a_file(fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_app(tmp_path / "app", "bundled", NUMPY_APP))
    outcome = fanin("bundle", "--flower", "bundled:app", "--out", "one", "--key", "p.key", "--json")
    assert json.loads(outcome.out)["num_parameters"] == 14
    np.savez("arrays.npz", w=np.ones(2, np.float32), d=np.ones(2), n=np.array(3), b=np.array(True))
    outcome = fanin("bundle", "--initial", "arrays.npz", "--out", "two", "--key", "p.key", "--json")
    assert json.loads(outcome.out)["local_arrays"] == ["b"]
    outcome = fanin("bundle", "--initial", "arrays.npz", "--out", "noted", "--key", "p.key")
    assert outcome.err == (
        "note: d (float64): travels as float32, and is that dtype in apps\n"
        "note: n (int64): travels as float32, and each mean is rounded to whole numbers; see --keep\n"
        "note: b (bool): does not travel, and each device has its own\n"
    )
    outcome = fanin("bundle", "--initial", "arrays.npz", "--keep", "[nd]", "--out", "kept", "--key", "p.key", "--json")
    assert json.loads(outcome.out)["local_arrays"] == ["b", "d", "n"]
    Path("no.npz").write_bytes(b"x")
    text = one_line(fanin("bundle", "--initial", "no.npz", "--out", "three", "--key", "p.key"), "bundle")
    assert text.startswith("--initial: no.npz: not a readable .npz file of plain arrays")
    text = usage_line(fanin("bundle", "--out", "three", "--key", "p.key"), "bundle")
    assert text.startswith("--initial and --flower: got neither, expected one")


@pytest.mark.nightly
def test_an_app_that_raises_gives_its_assignment_up_and_ends_the_device(
    host: Hosted, fanin: Fanin, tmp_path: Path
) -> None:
    project = write_app(tmp_path / "app", "client", SCALED_APP)
    arrays = {str(index): np.ones(1, np.float32) for index in range(12)}
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "ones")
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    host.start_run(plan(buffer=1, max_rounds=1), bundle, PUBLISHER)
    words = ("--flower", "client:app", "--node-config", "fails=true", "--max-failures", "2")
    with join(host, project, 0, *words) as device:
        log = device.communicate(timeout=120)[1]
    assert device.returncode == 1
    reason = "flower app client:app: train: RuntimeError: no data here [FN-0905]"
    assert log.count("in client_fn") == 1, "the traceback is in the device's log, once"
    assert uncoded(log).endswith(
        f"fanin join: 2 trainings failed in a row, the last with: {reason}; correct the cause, then start this device "
        "again\n"
    )
    row = json.loads(fanin("runs", "--json", *operator_options(host)).out)["runs"][0]
    assert row["reason"] == f"round 1 waits: 1 device gave up, the last with: '{reason}'"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["logistic", "mixed", "convolution"])
def test_devices_publish_the_arrays_of_flower_in_their_dtypes(
    host: Hosted, fanin: Fanin, tmp_path: Path, name: str
) -> None:
    module = importlib.import_module(f"support.flower_forms.{name}")
    arrays, config = arrays_of(module.initial), {"lr": 0.05}
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, name)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    host.start_run(replace(plan(buffer=2, max_rounds=2), flower=FlowerPlan(config=config)), bundle, PUBLISHER)
    with ExitStack() as stack:
        words = ("--flower", f"support.flower_forms.{name}:app", "--max-updates", "2")
        devices = [stack.enter_context(join(host, ROOT / "tests", partition, *words)) for partition in range(2)]
        logs = [device.communicate(timeout=200)[1] for device in devices]
    assert [device.returncode for device in devices] == [0, 0], logs
    record = ArrayRecord({each: Array(value) for each, value in arrays.items()})
    setting = Setting(num_clients=2, num_rounds=2, config=config, run_config={}, evaluates=False)
    expected, version = by_flower(module.app, record, setting).arrays, fetch_parameters(host, fanin)
    assert {each: value.dtype for each, value in version.items()} == {each: arrays[each].dtype for each in arrays}
    for each, value in version.items():
        atol = 1e-6 if value.dtype.kind == "f" else 2
        np.testing.assert_allclose(value.astype(float), expected[each], rtol=1e-5, atol=atol, err_msg=each)


BLOCKED_APP: Final = SCALED_APP.replace(
    "parameters[0] = parameters[0] * 2",
    "parameters[0] = parameters[0] * 2\n        if self.weight > 1:\n            import time\n\n            "
    "print('blocked', flush=True)\n            time.sleep(3600)",
)


def test_an_app_that_blocks_ends_with_its_round_and_harms_no_other(host: Hosted, tmp_path: Path) -> None:
    project = write_app(tmp_path / "app", "client", BLOCKED_APP)
    arrays = FlowerApp(FlowerSettings(app="client:app", folder=project)).initial()
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "numbers")
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    cohort = CohortPlan(concurrency=2, buffer=2, quorum=1, deadline_s=30.0)
    host.start_run(replace(plan(buffer=2, max_rounds=1), cohort=cohort), bundle, PUBLISHER)
    with ExitStack() as stack:
        words = ("--flower", "client:app", "--max-updates", "1")
        blocked = stack.enter_context(join(host, project, 1, *words))
        assert blocked.stderr is not None
        lines = iter(blocked.stderr)
        assert "blocked\n" in lines
        trained = stack.enter_context(join(host, project, 0, *words))
        log = trained.communicate(timeout=120)[1]
        assert trained.returncode == 0, log
        last = next(line for line in lines if "the assignment is over" in line)
        blocked.terminate()
        blocked.communicate(timeout=60)
    assert last.endswith("the assignment is over: the round has closed, or does not need this update\n")
    (event,) = host.published_versions()
    assert event.total_examples == 1


def weighted_mean(project: Path, states: Path) -> dict[str, np.ndarray]:
    """Return the mean that Flower's FedAvg computes from the results of the two apps. The same apps run here."""
    bundle = open_folder(
        project / "flower-bundle", trusted=(read_signed_manifest(project / "flower-bundle").public_key,)
    )
    work = example_assignment(bundle, m.Training(learning_rate=0.05, seed=0))
    sums, total = np.zeros(bundle.manifest.table.num_values), 0

    def should_continue() -> bool:
        return True

    condition: ShouldContinue = should_continue
    for partition in range(2):
        settings = FlowerSettings(
            app=APP, folder=project, partition=partition, node_config="num-partitions=2", run_config=RUN_CONFIG
        )
        trainer = FlowerTrainer(FlowerApp(settings), FlowerStates(states / str(partition)), partition)
        change = trainer.train(example_model(bundle), work, condition)
        sums += change.counts[m.EXAMPLES] * (bundle.initial_parameters() + change.values.astype(np.float64))
        total += change.counts[m.EXAMPLES]
    return dict(bundle.manifest.table.views((sums / total).astype(np.float32)))

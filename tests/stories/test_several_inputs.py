"""A federation with a model of several inputs and dropout, over gRPC, on devices with different runtimes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pytest
from house.tree import ROOT
from support import padded
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.models import PUBLISHER, app_of, bundle_of, export_bundle
from support.nightly import in_ci
from support.remote_runtime import PYTHON, SOURCES
from support.several import BATCH_SIZE, several_examples
from support.tags import NUM_TAGS, SIZES, tags_examples
from support.values import plan

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import write_npz
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.protos.messages import Training

Device: TypeAlias = "subprocess.Popen[str]"


class Data(Protocol):
    """A function that returns a number of examples for a seed."""

    def __call__(self, num: int, *, seed: int) -> Examples: ...


PYTHONS = {"tflite": str(PYTHON)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator, and the files that a device needs to join it."""
    host = Hosted(tmp_path).start()
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "token").write_text(host.device_token)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    yield host
    host.stop()


def join(host: Hosted, index: int, runtime: str, num_rounds: int, data: Data = several_examples) -> Device:
    """Start a device with its own examples, in a process of its own."""
    write_npz(host.folder / f"data-{index}.npz", data(60, seed=10 + index))
    options = {
        "--server": host.address,
        "--ca": "ca.pem",
        "--token-file": "token",
        "--publisher": "publisher.pub",
        "--data": f"data-{index}.npz",
        "--partition": str(index),
        "--state": f"device-{index}",
        "--runtime": runtime,
        "--max-updates": str(num_rounds),
    }
    words = [word for option in options.items() for word in option]
    command = [PYTHONS.get(runtime, sys.executable), "-m", "fanin.commands.main", "join", *words, "--serve"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in SOURCES)}
    return subprocess.Popen(command, cwd=host.folder, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("runtimes", in_ci([("onnx",), ("onnx", "litert", "tflite")], [("onnx",)]))
def test_devices_with_several_inputs_learn_together_and_serve(
    host: Hosted, runtimes: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rounds = 2 * len(runtimes)
    bundle = bundle_of("several") if runtimes == ("onnx",) else export_bundle(app_of("several"), tuple(FORMATS))
    host.start_run(plan(buffer=len(runtimes), max_rounds=num_rounds), bundle, PUBLISHER)
    devices = [join(host, index, runtime, num_rounds) for index, runtime in enumerate(runtimes)]
    for device in devices:
        _, log = device.communicate(timeout=300)
        assert device.returncode == 0, log
    versions = host.published_versions()
    assert [event.number for event in versions] == list(range(1, num_rounds + 1))
    assert len(versions[-1].runtimes) == len(runtimes)
    with host.operator() as operator:
        parameters = operator.parameters(operator.version("run").version)
    examples = list(batches_in_order(several_examples(80, seed=5), BATCH_SIZE))
    first, last = (
        measure(open_runtime("onnx"), bundle, VersionValues(parameters=values), examples)
        for values in (bundle.initial_parameters(), parameters)
    )
    assert last.loss_sum < 0.9 * first.loss_sum
    fanin = fanin_in_process(capsys, monkeypatch)
    row = _predictions(fanin, host, runtimes[0])
    assert len(row["predictions"]) == 60


def shorter_rows(num: int, *, seed: int) -> Examples:
    """Return rows that are shorter than the length of the model."""
    return padded.padded_examples(num, padded.LONGEST - 2, seed=seed)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [("tags", tags_examples, SIZES[-1]), ("padded", shorter_rows, padded.LONGEST)])
def test_a_device_with_sequences_of_any_length_learns_and_serves(
    host: Hosted, case: tuple[str, Data, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, rows, longest = case
    bundle = bundle_of(name)
    gentle_plan = replace(plan(buffer=1, max_rounds=2), training=Training(epochs=2, learning_rate=0.05, seed=7))
    host.start_run(gentle_plan, bundle, PUBLISHER)
    device = join(host, 0, "onnx", 2, rows)
    _, log = device.communicate(timeout=300)
    assert device.returncode == 0, log
    assert [event.number for event in host.published_versions()] == [1, 2]
    with host.operator() as operator:
        parameters = operator.parameters(operator.version("run").version)
    examples = list(batches_in_order(rows(80, seed=5), bundle.manifest.batch_size, bundle.manifest.lengths))
    first, last = (
        measure(open_runtime("onnx"), bundle, VersionValues(parameters=values), examples)
        for values in (bundle.initial_parameters(), parameters)
    )
    assert last.loss_sum < 0.9 * first.loss_sum
    outputs: Any = _predictions(fanin_in_process(capsys, monkeypatch), host, "onnx")["outputs"]
    assert outputs["logits"]["shape"] == [60, longest, NUM_TAGS]


def _predictions(fanin: Fanin, host: Hosted, runtime: str) -> dict[str, list[object]]:
    """Return the predictions of the first device for its own examples."""
    words = ("--publisher", host.folder / "publisher.pub", "--data", host.folder / "data-0.npz", "--runtime", runtime)
    row: dict[str, list[object]] = json.loads(fanin("infer", host.folder / "device-0", *words, "--json").out)
    return row

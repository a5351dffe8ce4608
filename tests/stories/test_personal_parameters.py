"""Personal parameters of devices in a Run over gRPC: they persist over a restart, serve, and never leave the device."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.models import PUBLISHER, export_bundle
from support.remote_runtime import PYTHON, ROOT, SOURCES
from support.values import plan
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import write_npz
from fanin.clients.data.stores import memory_store
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.contract import Countdown, example_assignment
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import local_values
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.transport import Connection, GrpcTransport
from fanin.datacenter.jobs.publish import parent_version, publish_vector
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.protos.messages import RunState

NUM_DEVICES, NUM_ROUNDS, NUM_CLASSES = 2, 2, 3


class Network(nn.Module):
    """A shared body and a personal head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(torch.relu(self.body(x)))


def app() -> App:
    torch.manual_seed(1)
    recipe = Recipe(optimizer=Sgd(momentum=0.0), local=["head.*"])
    x = torch.randn(32, 6)
    return App(name="personal", module=Network(), calibration=x, batch_size=8, num_classes=NUM_CLASSES, recipe=recipe)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export_bundle(app())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def examples(device: int) -> Examples:
    """Return examples of a device. The same label means another class on each device."""
    x = np.random.default_rng(device).standard_normal((60, 6)).astype(np.float32)
    return Examples(inputs={"x": x}, y=((x[:, :3].argmax(1) + device) % NUM_CLASSES).astype(np.int32))


def trainer(device: int) -> RuntimeTrainer:
    return RuntimeTrainer(open_runtime("onnx"), memory_store(examples(device), device, 0.2))


def cache(host: Hosted, device: int) -> Cache:
    return Cache(host.folder / f"device-{device}")


def send_update(host: Hosted, device: int) -> None:
    """Run a device until one of its Updates is accepted."""
    with closing(Connection(host.address, host.ca)) as connection:
        device_cache = cache(host, device)
        parts = ClientParts(
            transport=GrpcTransport(connection, device_cache.key()),
            cache=device_cache,
            trainer=trainer(device),
            trusted=(PUBLISHER.public,),
            rng=Random(device),
            serving=Serving(open_runtime("onnx"), device_cache, (PUBLISHER.public,)),
        )
        Client(parts, ClientOptions(token=host.device_token, max_updates=1)).run()


def take_part(host: Hosted) -> None:
    """Run a Round with new clients. Everything that a device keeps is in its folder."""
    with ThreadPoolExecutor(NUM_DEVICES) as pool:
        list(pool.map(lambda device: send_update(host, device), range(NUM_DEVICES)))


def train_in_datacenter(bundle: Bundle, values: Float32s) -> Float32s:
    """Train in the datacenter, from the initial personal parameters."""
    np.testing.assert_array_equal(bundle.manifest.split(values)[1], bundle.initial_local())
    return values + np.float32(1.0)


def personal_values(host: Hosted, bundle: Bundle, device: int, before: int | None = None) -> Float32s:
    values = local_values(cache(host, device).locals, bundle, "run", before)
    assert values is not None
    return values


def test_personal_parameters_persist_serve_and_never_leave_the_device(
    host: Hosted, bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_plan = plan(buffer=NUM_DEVICES, max_rounds=NUM_ROUNDS)
    host.start_run(run_plan, bundle, PUBLISHER)
    for _ in range(NUM_ROUNDS):
        take_part(host)
    assert [event.number for event in host.published_versions()] == [1, 2]
    with host.operator() as operator:
        assert operator.run("run").state is RunState.FINISHED
        # The datacenter trains all parameters, and publishes the shared ones. One more Round follows.
        parent = parent_version(operator, "run", PUBLISHER)
        trained = train_in_datacenter(bundle, bundle.completed(parent.parameters))
        publish_vector(operator, parent, bundle.manifest.split(trained)[0], PUBLISHER, 1)
    take_part(host)
    assert [event.number for event in host.published_versions()] == [1, 2, 3, 4]
    with host.operator() as operator:
        versions = [operator.parameters(operator.version("run", number).version) for number in range(5)]
    assert {version.size for version in versions} == {6 * 8 + 8}
    np.testing.assert_array_equal(versions[3], versions[2] + 1)
    # The personal parameters before and after each Round, bit by bit. Each Round began with the result of the last one.
    for device in range(NUM_DEVICES):
        local = None
        for number, version in ((1, 0), (2, 1), (3, 3)):
            model = OpenedModel(bundle=bundle, parameters=versions[version], local=local)
            work = replace(example_assignment(bundle, run_plan.training_in(number)), round=number)
            local = trainer(device).train(model, work, Countdown()).local
            assert local is not None
            if number > 1:
                np.testing.assert_array_equal(personal_values(host, bundle, device, before=number + 1), local)
    heads = [personal_values(host, bundle, device) for device in range(NUM_DEVICES)]
    assert not np.array_equal(heads[0], heads[1])
    _check_no_personal_values(host, bundle)
    _check_inference(host, bundle, versions[3])
    _check_commands(host, fanin_in_process(capsys, monkeypatch))


NOTE = (
    "note: head.bias, head.weight have the initial values of the bundle; they are personal, and each device has "
    "trained its own\n"
)


def _check_commands(host: Hosted, fanin: Fanin) -> None:
    """Check that a device predicts with its own head, and a fetched Version with the initial head.

    Each command prints a note about it.
    """
    (host.folder / "publisher.pub").write_text(PUBLISHER.public)
    write_npz(host.folder / "data.npz", examples(0))
    words = ("--publisher", host.folder / "publisher.pub", "--data", host.folder / "data.npz", "--json")
    outcomes = [fanin("infer", host.folder / f"device-{device}", *words) for device in range(NUM_DEVICES)]
    assert [outcome.err for outcome in outcomes] == ["", ""]
    assert json.loads(outcomes[0].out)["outputs"] != json.loads(outcomes[1].out)["outputs"]
    folder, model = host.folder / "version", host.folder / "model.onnx"
    (host.folder / "token").write_text(host.operator_token)
    (host.folder / "ca.pem").write_bytes(host.ca)
    coordinator = ("--server", host.address, "--ca", host.folder / "ca.pem", "--token-file", host.folder / "token")
    fetch = fanin("fetch", "run", *coordinator, "--out", folder, "--bundle", "--onnx", model, "--json")
    assert fetch.err == NOTE, fetch
    initial_inference = fanin("infer", folder / "bundle", "--version", folder / "parameters", *words)
    assert initial_inference.err == NOTE, initial_inference
    file_inference = fanin("infer", model, "--data", host.folder / "data.npz", "--json")
    assert json.loads(file_inference.out)["outputs"] == json.loads(initial_inference.out)["outputs"]
    description = fanin("inspect", folder / "bundle").out
    assert (
        "\n  parameters  56 values in 2 tensors\n  personal    27 values in head.bias, head.weight, never sent\n"
        in description
    )
    row = json.loads(fanin("inspect", folder / "bundle", "--json").out)
    assert row["local"] == {"head.bias": [3], "head.weight": [3, 8]}


def _check_no_personal_values(host: Hosted, bundle: Bundle) -> None:
    """Check that no file of the coordinator has a personal value that a device has trained."""
    files = [path.read_bytes() for path in (host.folder / "state").rglob("*") if path.is_file()]
    assert any(bundle.initial_local().tobytes() in data for data in files), "the initial ones are in the Bundle"
    for device in range(NUM_DEVICES):
        for before in (3, 4):
            values = personal_values(host, bundle, device, before)
            for start in range(0, values.size - 3, 3):
                piece = values[start : start + 3].tobytes()
                assert not any(piece in data for data in files)


def _check_inference(host: Hosted, bundle: Bundle, parameters: Float32s) -> None:
    """Check that a device predicts with the newest Version that it has, and with its own head."""
    runtime, inputs = open_runtime("onnx"), examples(5).inputs
    for device in range(NUM_DEVICES):
        serving = Serving(runtime, cache(host, device), (PUBLISHER.public,))
        assert serving.version == ("run", 3)
        complete = bundle.manifest.join(parameters, personal_values(host, bundle, device))
        np.testing.assert_array_equal(serving.predict(inputs), runtime.open_predict(bundle, complete)(inputs))


def _start(host: Hosted, *words: str) -> "subprocess.Popen[str]":
    """Start a command in the environment that has tflite-runtime, numpy 1 and no torch."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in SOURCES)}
    command = [str(PYTHON), "-m", "fanin.commands.main", *words]
    return subprocess.Popen(
        command, cwd=host.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _join(host: Hosted, device: int) -> "subprocess.Popen[str]":
    options = {
        "--server": host.address,
        "--ca": "ca.pem",
        "--token-file": "token",
        "--publisher": "publisher.pub",
        "--data": f"data-{device}.npz",
        "--state": f"device-{device}",
        "--runtime": "tflite",
        "--max-updates": "1",
    }
    return _start(host, "join", *(word for pair in options.items() for word in pair), "--serve", "--quiet")


@pytest.mark.nightly
def test_personal_parameters_on_tflite_runtime(host: Hosted) -> None:
    bundle = export_bundle(app(), ("tflite",))
    host.start_run(plan(buffer=NUM_DEVICES, max_rounds=NUM_ROUNDS), bundle, PUBLISHER)
    (host.folder / "ca.pem").write_bytes(host.ca)
    (host.folder / "token").write_text(host.device_token)
    (host.folder / "publisher.pub").write_text(PUBLISHER.public)
    for device in range(NUM_DEVICES):
        write_npz(host.folder / f"data-{device}.npz", examples(device))
    for _ in range(NUM_ROUNDS):
        # Each Round is another process, because personal parameters are in the device's folder.
        processes = [_join(host, device) for device in range(NUM_DEVICES)]
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    assert [event.number for event in host.published_versions()] == [1, 2]
    with host.operator() as operator:
        versions = [operator.parameters(operator.version("run", number).version) for number in (1, 2)]
    assert {version.size for version in versions} == {6 * 8 + 8}
    outputs = list[Float32s]()
    for device in range(NUM_DEVICES):
        first, second = (personal_values(host, bundle, device, before=number + 1) for number in (1, 2))
        initial = bundle.initial_local()
        assert not np.array_equal(first, initial) and not np.array_equal(second, first)
        for path in (path for path in host.state.rglob("*") if path.is_file()):
            assert first.tobytes() not in path.read_bytes() and second.tobytes() not in path.read_bytes(), path
        words = ("--publisher", "publisher.pub", "--data", "data-0.npz", "--runtime", "tflite", "--out", "logits.npy")
        process = _start(host, "infer", f"device-{device}", *words)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        logits = np.load(host.folder / "logits.npy")
        complete = bundle.manifest.join(versions[0], second)
        expected = open_runtime("litert").open_predict(bundle, complete)(examples(0).inputs)
        # The two libraries round a few activations differently.
        np.testing.assert_allclose(logits, expected, rtol=0, atol=0.05 * np.ptp(expected))
        outputs.append(logits)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1 * np.ptp(outputs[0])

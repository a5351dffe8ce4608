"""A ``fanin join`` fine-tunes the last Version once its Run has finished, over kills, and serves the result."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.hosted import Hosted
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.processes import Running, start
from support.values import PUBLISHER, plan

from fanin.clients.data.npz import open_npz
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.site.record import read_record
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import tuned_model
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Float32s
from fanin.protos.messages import Training, Version

NUM_EXAMPLES, BATCH_SIZE, RATE, WAIT_S = 200, 4, 0.02, 60.0
TUNED, SEED = "fine-tuned for", 1


def labelled() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((NUM_EXAMPLES, NUM_INPUTS)).astype(np.float32)
    return x, x[:, :NUM_CLASSES].argmin(1).astype(np.int32)


class Place:
    """A coordinator with a Run of one Round for one device, and the files of the device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        training = Training(epochs=1, learning_rate=0.001, seed=SEED)
        self.bundle: Bundle = assemble(linear_graphs(), folder / "bundle", PUBLISHER)
        self.host = Hosted(folder).start()
        self.host.start_run(replace(plan(buffer=1, max_rounds=1), training=training), self.bundle, PUBLISHER)
        (folder / "ca.pem").write_bytes(self.host.ca)
        (folder / "token").write_text(self.host.device_token)
        (folder / "publisher.pub").write_text(PUBLISHER.public)
        x, y = labelled()
        np.savez(folder / "data.npz", x=x, y=y)

    def join(self, epochs: int) -> Running:
        files = {"--ca": "ca.pem", "--token-file": "token", "--publisher": "publisher.pub", "--data": "data.npz"}
        words = [word for option, name in files.items() for word in (option, str(self.folder / name))]
        tuning = ["--serve", "--fine-tune", str(epochs), "--fine-tune-rate", str(RATE), "--save-s", "0"]
        state = ["--state", str(self.folder / "device"), "--runtime", "onnx"]
        command = ["-m", "fanin.commands.main", "join", "--server", self.host.address, *words, *state, *tuning]
        return start(command, self.folder / "device.log")

    def last(self) -> tuple[Version, Float32s]:
        with self.host.operator() as operator:
            version = operator.version("run", 1).version
            return version, operator.parameters(version)

    def tuned(self) -> Float32s:
        """Return the parameters that the device has stored for itself."""
        version, parameters = self.last()
        model = OpenedModel(bundle=self.bundle, parameters=parameters)
        own = tuned_model(Cache(self.folder / "device").tuned, version, model)
        assert own is not None
        return own.parameters


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.host.stop()


def until(condition: Callable[[], object], device: Running) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s and device.process.poll() is None, device.text()
        time.sleep(0.01)


def plain_program(place: Place, epochs: int) -> Float32s:
    """Train the last Version by plain SGD in numpy, over the device's training examples in their order."""
    version, parameters = place.last()
    views = place.bundle.manifest.table.views(parameters.astype(np.float64).astype(np.float32))
    w, b = views["w"].astype(np.float64), views["b"].astype(np.float64)
    train = open_npz(place.folder / "data.npz", 0, 0.2).train
    rng = np.random.default_rng(np.random.SeedSequence((SEED, 0, version.number + 1)))
    for _ in range(epochs):
        order = rng.permutation(len(train))
        for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            x, wanted = train.inputs["x"][rows].astype(np.float64), np.eye(NUM_CLASSES)[train.y[rows]]
            shares = np.exp(x @ w + b)
            errors = (shares / shares.sum(1, keepdims=True) - wanted) / len(rows)
            w, b = w - RATE * x.T @ errors, b - RATE * errors.sum(0)
    return place.bundle.manifest.table.flatten({"w": w.astype(np.float32), "b": b.astype(np.float32)})


def test_the_device_has_the_parameters_of_the_plain_program_and_serves_them(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    from fanin.commands.infer import main as infer
    from fanin.commands.site.status import main as status

    device, state = place.join(4), place.folder / "device"
    until(lambda: TUNED in device.text(), device)
    until(lambda: (record := read_record(state)) is not None and record.tuned.run == "run", device)
    device.kill()
    np.testing.assert_allclose(place.tuned(), plain_program(place, 4), rtol=0, atol=2e-6)
    # The comparison can fail: the fine-tuning has changed the Version.
    assert np.abs(place.tuned() - place.last()[1]).max() > 1e-2
    # The coordinator has one Update of the one Round: the fine-tuning has sent nothing.
    assert [event.number for event in place.host.published_versions()] == [1]
    record = read_record(state)
    assert record is not None
    assert (record.tuned.version, record.tuned.epochs, record.tuned.num_examples) == (1, 4, 40)
    assert record.tuned.personal_model > record.tuned.global_model
    capsys.readouterr()
    status(["--state", str(state)])
    assert f"own model {record.tuned.personal_model:.4f}" in capsys.readouterr().out
    # A restart serves the stored parameters, without the coordinator.
    output = place.folder / "logits.json"
    files = ["--publisher", str(place.folder / "publisher.pub"), "--data", str(place.folder / "data.npz")]
    assert infer([str(state), *files, "--json", str(output)]) == 0
    x, y = labelled()
    views = place.bundle.manifest.table.views(place.tuned())
    share = float(((x @ views["w"] + views["b"]).argmax(1) == y).mean())
    assert json.loads(output.read_text())["accuracy"] == pytest.approx(share)


@pytest.mark.nightly
def test_a_device_killed_in_its_fine_tuning_resumes_it(place: Place) -> None:
    epochs, trainings = 300, place.folder / "device" / "trainings"
    seen: set[int] = set()
    for _ in range(2):
        device = place.join(epochs)

        def has_saved(before: frozenset[int] = frozenset(seen)) -> bool:
            now = {path.stat().st_mtime_ns for path in trainings.glob("fine-tuning.*.training")}
            seen.update(now)
            return bool(now - before)

        until(has_saved, device)
        device.kill()
    device = place.join(epochs)
    until(lambda: TUNED in device.text(), device)
    device.kill()
    assert "training resumes after step" in device.text()
    assert list(trainings.iterdir()) == []
    np.testing.assert_allclose(place.tuned(), plain_program(place, epochs), rtol=0, atol=1e-4)
    # A device that has fine-tuned does not do it again.
    device = place.join(epochs)
    until(lambda: "enrolled" in device.text().rpartition(TUNED)[2], device)
    time.sleep(1.0)
    device.kill()
    assert device.text().count(TUNED) == 1

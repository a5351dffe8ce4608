"""FedRep and Ditto in ``fanin join``: killed within each of its two passes, a device sends and keeps the same bits."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hosted import Hosted
from support.models import PUBLISHER, export_bundle
from support.processes import Running, start
from support.values import plan
from torch import nn

from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import local_values
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.protos.messages import Training
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline

WAIT_S, EPOCHS, ROUNDS = 120.0, 150, 2
TRAINING = Training(epochs=EPOCHS, personal_epochs=EPOCHS, learning_rate=0.001, seed=1)
METHODS = {
    "fedrep": (Recipe(optimizer=Sgd(momentum=0.9), local=["1.*"]), TRAINING),
    "ditto": (Recipe(optimizer=Sgd(momentum=0.9), proximal=True), replace(TRAINING, ditto_weight=0.5)),
}


@dataclass
class Outcome:
    """What a Run and its device have at the end."""

    versions: list[str]
    local: Float32s
    served: Float32s


def bundle_of(recipe: Recipe) -> Bundle:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    return export_bundle(
        App(name="passes", module=module, calibration=torch.randn(32, 6), batch_size=4, num_classes=3, recipe=recipe)
    )


def join(host: Hosted) -> Running:
    files = {"--ca": "ca.pem", "--token-file": "token", "--publisher": "publisher.pub", "--data": "data.npz"}
    words = [word for option, name in files.items() for word in (option, str(host.folder / name))]
    options = ["--state", str(host.folder / "device"), "--max-updates", "1", "--runtime", "onnx", "--save-s", "0"]
    command = ["-m", "fanin.commands.main", "join", "--server", host.address, *words, *options, "--serve"]
    return start(command, host.folder / "device.log")


def saved(folder: Path) -> tuple[int, int] | None:
    """Return the number of passes that have ended, and of steps, of the saved training."""
    for path in (folder / "device" / "trainings").glob("*.training"):
        data = path.read_bytes()
        row = json.loads(data[data.index(b'{"digest"') : data.index(b"}\n") + 1])
        return row["num_passes"], row["num_steps"]
    return None


def until(condition: Callable[[], bool], device: Running) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s and device.process.poll() is None, device.text()
        time.sleep(0.005)


def outcome(folder: Path, bundle: Bundle, training: Training, kills: bool) -> Outcome:
    """Run two Rounds with one device, each by a process of its own. Kill it in both passes of each."""
    host = Hosted(folder).start()
    host.start_run(replace(plan(buffer=1, max_rounds=ROUNDS), training=training), bundle, PUBLISHER)
    (folder / "ca.pem").write_bytes(host.ca)
    (folder / "token").write_text(host.device_token)
    (folder / "publisher.pub").write_text(PUBLISHER.public)
    rng = np.random.default_rng(1)
    np.savez(folder / "data.npz", x=rng.standard_normal((80, 6), np.float32), y=np.arange(80, dtype=np.int32) % 3)
    try:
        for _ in range(ROUNDS):
            for number in (0, 1) if kills else ():
                device = join(host)
                until(lambda number=number: (saved(folder) or (-1, 0))[0] == number, device)
                device.kill()
            device = join(host)
            assert device.wait(WAIT_S) == 0, device.text()
            assert not kills or "training resumes after step" in device.text()
        versions = [event.version_sha256 for event in host.published_versions()]
    finally:
        host.stop()
    state = open_state(host.state, Durability.PROCESS, (inline, inline), lambda: 0.0)
    assert [verdict.problem for verdict in verify_run(state, "run") if verdict.problem] == []
    cache = Cache(folder / "device")
    local = local_values(cache.locals, bundle, "run")
    assert local is not None
    inputs = {"x": np.ones((2, 6), np.float32)}
    served = Serving(open_runtime("onnx"), cache, (PUBLISHER.public,)).predict(inputs)
    if training.ditto_weight:
        # The device predicts with its copy, and not with a Version.
        expected = open_runtime("onnx").open_predict(bundle, local)(inputs)
        np.testing.assert_array_equal(served, expected)
        assert not np.array_equal(
            served, open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())(inputs)
        )
    return Outcome(versions=versions, local=local, served=served)


@pytest.mark.parametrize("method", ["fedrep", pytest.param("ditto", marks=pytest.mark.nightly)])
def test_a_device_killed_in_both_passes_sends_and_keeps_the_same_bits(tmp_path: Path, method: str) -> None:
    recipe, training = METHODS[method]
    bundle = bundle_of(recipe)
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    calm = outcome(tmp_path / "calm", bundle, training, kills=False)
    killed = outcome(tmp_path / "killed", bundle, training, kills=True)
    assert killed.versions == calm.versions and len(calm.versions) == ROUNDS
    np.testing.assert_array_equal(killed.local, calm.local)
    np.testing.assert_array_equal(killed.served, calm.served)

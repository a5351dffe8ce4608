"""A ``fanin join`` that is killed by SIGKILL in the middle of its training resumes it, and publishes the same bits."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.hosted import Hosted
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.processes import Running, start
from support.values import PUBLISHER, plan

from fanin.edge.assembly.assemble import assemble
from fanin.protos.messages import Training

EPOCHS = 300
NUM_STEPS = EPOCHS * 40
WAIT_S = 60.0


def host_in(folder: Path, epochs: int = EPOCHS) -> Hosted:
    """Return a coordinator with a Run of one Round for one device, and the device's files."""
    training = Training(epochs=epochs, learning_rate=0.001, seed=1)
    bundle = assemble(linear_graphs(), folder / "bundle", PUBLISHER)
    host = Hosted(folder).start()
    host.start_run(replace(plan(buffer=1, max_rounds=1), training=training), bundle, PUBLISHER)
    (folder / "ca.pem").write_bytes(host.ca)
    (folder / "token").write_text(host.device_token)
    (folder / "publisher.pub").write_text(PUBLISHER.public)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200, NUM_INPUTS)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=rng.integers(0, NUM_CLASSES, 200).astype(np.int32))
    return host


def join(host: Hosted) -> Running:
    files = {"--ca": "ca.pem", "--token-file": "token", "--publisher": "publisher.pub", "--data": "data.npz"}
    words = [word for option, name in files.items() for word in (option, str(host.folder / name))]
    options = ["--state", str(host.folder / "device"), "--max-updates", "1", "--runtime", "onnx", "--save-s", "0"]
    return start(
        ["-m", "fanin.commands.main", "join", "--server", host.address, *words, *options], host.folder / "device.log"
    )


def until(condition: Callable[[], object], device: Running) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s and device.process.poll() is None, device.text()
        time.sleep(0.01)


def saved_at(trainings: Path) -> set[int]:
    """Return the time of the saved state in nanoseconds, if there is one."""
    return {path.stat().st_mtime_ns for path in trainings.glob("*.training")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the Version without a kill."""
    host = host_in(tmp_path_factory.mktemp("calm"))
    try:
        assert join(host).wait(WAIT_S) == 0
        (event,) = host.published_versions()
        return event.version_sha256
    finally:
        host.stop()


def test_a_device_killed_twice_in_its_training_publishes_the_same_version(tmp_path: Path, expected: str) -> None:
    host, trainings = host_in(tmp_path), tmp_path / "device" / "trainings"
    try:
        for _ in range(2):
            before = saved_at(trainings)
            device = join(host)
            until(lambda seen=before: saved_at(trainings) - seen, device)
            device.kill()
        device = join(host)
        assert device.wait(WAIT_S) == 0, device.text()
        (event,) = host.published_versions()
        assert event.version_sha256 == expected
        assert device.text().count(f"of {NUM_STEPS}") == 2, device.text()
        assert "training resumes after step" in device.text()
        assert list(trainings.iterdir()) == []
    finally:
        host.stop()


def test_the_progress_of_fanin_join_is_described(tmp_path: Path) -> None:
    host = host_in(tmp_path, 10 * EPOCHS)
    device = join(host)
    try:
        with host.operator() as operator:
            until(lambda: any(each.step for each in operator.describe("run", 1).live.progress.values()), device)
            (progress,) = operator.describe("run", 1).live.progress.values()
        assert (progress.num_steps, progress.num_epochs) == (10 * NUM_STEPS, 10 * EPOCHS)
        assert progress.epoch == progress.step // 40 + 1
    finally:
        device.kill()
        host.stop()

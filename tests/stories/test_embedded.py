"""The app of docs/howto/app.md, unchanged: it joins over TLS, trains when it may, and requests the newest Version."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from support.hosted import Hosted
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.outside import python_blocks
from support.values import PUBLISHER, plan

from fanin.clients.data.npz import open_npz
from fanin.clients.device.embed import DeviceSettings, join
from fanin.edge.assembly.assemble import assemble
from fanin.protos.errors import Conflict
from fanin.protos.messages import RunState
from fanin.server.access.authority import local_identity

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "app.md"
WAIT_S = 60.0


def example() -> str:
    """Return the text of the app."""
    (code,) = python_blocks(PAGE.read_text())
    return code


@contextmanager
def app_output(folder: Path, address: str) -> Iterator[Path]:
    """Run the app in a process of its own, and yield the file with its output."""
    (folder / "app.py").write_text(example())
    out = folder / "out"
    environment = os.environ | {"FANIN_SERVER": address, "OMP_NUM_THREADS": "1"}
    with out.open("w") as file, (folder / "err").open("w") as errors:
        app = subprocess.Popen([sys.executable, "app.py"], cwd=folder, env=environment, stdout=file, stderr=errors)
        try:
            yield out
            assert app.poll() is None, (folder / "err").read_text()
        finally:
            app.kill()
            app.wait()


def await_line(out: Path, expected: str) -> str:
    """Wait for the first line that matches, and return it."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for line in out.read_text().splitlines():
            if re.fullmatch(expected, line):
                return line
        time.sleep(0.05)
    raise AssertionError(f"got {out.read_text()!r}, {(out.parent / 'err').read_text()!r}, expected {expected!r}")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with a Run of two Rounds for one device, and the files that README's walk-through leaves."""
    host = Hosted(tmp_path).start()
    bundle = assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER)
    host.start_run(plan(buffer=1, max_rounds=2), bundle, PUBLISHER)
    (tmp_path / "fanin-state" / "tls").mkdir(parents=True)
    (tmp_path / "fanin-state" / "tls" / "ca.pem").write_bytes(host.ca)
    (tmp_path / "fanin-state" / "tokens").mkdir()
    (tmp_path / "fanin-state" / "tokens" / "device.token").write_text(host.device_token + "\n")
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public + "\n")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, NUM_INPUTS)).astype(np.float32)
    np.savez(tmp_path / "device-0.npz", x=x, y=rng.integers(0, NUM_CLASSES, 50).astype(np.int32))
    yield host
    host.stop()


def test_the_documented_app_waits_for_permission_trains_and_predicts_without_a_coordinator(
    tmp_path: Path, host: Hosted
) -> None:
    (tmp_path / "on-battery").touch()
    with app_output(tmp_path, host.address) as out, host.operator() as operator:
        time.sleep(1.5)
        assert operator.run("run").version == 0 and out.read_text() == ""
        (tmp_path / "on-battery").unlink()
        assert [event.number for event in host.published_versions()] == [1, 2]
        assert operator.run("run").state is RunState.FINISHED
        # The second Round began from Version 1 and was the last. No Assignment brings Version 2, so the coordinator
        # names it.
        line = await_line(out, r"version \('run', 2\): 0\.\d{3} of 10 right")
    host.stop()
    with app_output(tmp_path, host.address) as out:
        assert await_line(out, r"version .*") == line


def test_the_app_refuses_a_bundle_without_a_trusted_publisher(tmp_path: Path, host: Hosted) -> None:
    (tmp_path / "publisher.pub").write_text("5a" * 32 + "\n")
    with app_output(tmp_path, host.address) as out, host.operator() as operator:
        deadline = time.monotonic() + WAIT_S
        while "fetch: " not in (tmp_path / "err").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "publisher" in (tmp_path / "err").read_text()
        assert operator.run("run").version == 0 and out.read_text() == ""


def test_a_permanent_refusal_of_the_coordinator_is_logged(
    tmp_path: Path, host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    settings = DeviceSettings(
        server=host.address, ca=host.ca, token="wrong", publisher=PUBLISHER.public, folder=tmp_path / "device-0"
    )
    with join(settings, open_npz(tmp_path / "device-0.npz", 0, 0.2)) as client:
        deadline = time.monotonic() + WAIT_S
        while "the client stopped" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert re.search(r"the client stopped: 127\.0\.0\.1:\d+: .*token", caplog.text)
        assert client.served_version is None
        assert isinstance(client.failure, Conflict)


def test_a_coordinator_without_trust_ends_the_device_with_the_reason(
    tmp_path: Path, host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = local_identity(tmp_path / "foreign", ("127.0.0.1",), datetime.now(UTC)).ca_certificate
    settings = DeviceSettings(
        server=host.address, ca=foreign, token="", publisher=PUBLISHER.public, folder=tmp_path / "device-0"
    )
    with join(settings, open_npz(tmp_path / "device-0.npz", 0, 0.2)) as client:
        deadline = time.monotonic() + WAIT_S
        while client.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert isinstance(client.failure, Conflict)
        assert "its certificate is not by the authority" in str(client.failure)
        assert caplog.text.count("the client stopped: 127.0.0.1:") == 1


def test_an_app_whose_code_raises_still_takes_part(
    tmp_path: Path, host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    settings = DeviceSettings(
        server=host.address,
        ca=host.ca,
        token=host.device_token,
        publisher=PUBLISHER.public,
        folder=tmp_path / "device-0",
    )
    faults = [RuntimeError("no battery service")]

    def may_work() -> bool:
        if faults:
            raise faults.pop()
        return True

    with join(settings, open_npz(tmp_path / "device-0.npz", 0, 0.2), may_work) as client:
        assert [event.number for event in host.published_versions()] == [1, 2]
        assert client.failure is None
    assert "may_work: RuntimeError: no battery service" in caplog.text

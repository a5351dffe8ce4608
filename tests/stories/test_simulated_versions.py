"""One Plan in a simulation and in a Run over TLS, with devices that train: the same Versions, bit for bit."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.hosted import Hosted
from support.models import PUBLISHER, app_of, bundle_of, samples
from support.processes import START_S, Running, Site, start
from support.values import plan

from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import write_npz
from fanin.clients.device.embed import DeviceSettings, join
from fanin.protos.messages import CodecSpec, Training, VersionPublished
from fanin.protos.plans import StageSpec
from fanin.simulation import Partition, SimulationSettings, simulate

ROUNDS: Final = 2
FRACTION: Final = 0.2
"""The validation part of a device that joins."""
PLAN: Final = replace(
    plan(buffer=3, max_rounds=ROUNDS),
    training=Training(epochs=2, learning_rate=0.05, seed=7),
    codec=CodecSpec(name="int8", max_shift=0),
    stages=(StageSpec(name="error_feedback"),),
)


def clients() -> Partition:
    """Return three clients with 40, 20 and 30 examples."""
    x, y = samples(90, seed=10)
    return Partition(examples=Examples(inputs={"x": x}, y=y), indices=tuple(np.split(np.arange(90), (40, 60))))


@pytest.fixture(scope="module")
def expected() -> tuple[str, ...]:
    """The digests of the Versions of a simulation."""
    settings = SimulationSettings(plan=PLAN, validation_fraction=FRACTION, quiet=True)
    return simulate(app_of("mlp"), clients(), settings=settings).digests


def test_embedded_devices_publish_the_versions_of_a_simulation(tmp_path: Path, expected: tuple[str, ...]) -> None:
    host = Hosted(tmp_path).start()
    try:
        host.start_run(PLAN, bundle_of("mlp"), PUBLISHER)
        with ExitStack() as devices:
            for client in range(len(clients())):
                settings = DeviceSettings(
                    server=host.address,
                    ca=host.ca,
                    token=host.device_token,
                    publisher=PUBLISHER.public,
                    folder=tmp_path / f"device-{client}",
                    runtime="onnx",
                )
                devices.enter_context(join(settings, clients().store(client, FRACTION)))
            versions = host.published_versions()
    finally:
        host.stop()
    assert tuple(event.version_sha256 for event in versions) == expected[1:]
    assert len(set(expected)) == ROUNDS + 1


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator of ``fanin serve``, and the files that a device needs to join it."""
    site = Site(tmp_path)
    words = ("serve", "--state", str(site.state), "--listen", "127.0.0.1:0", "--no-web")
    site.started.append(start(("-m", "fanin.commands.main", *words), tmp_path / "coordinator.log"))
    until = time.monotonic() + START_S
    while not (site.state / "address").exists():
        assert time.monotonic() < until, site.started[0].text()
        time.sleep(0.05)
    yield site
    site.close()


def join_by_command(site: Site, client: int) -> Running:
    """Start ``fanin join`` with the examples of a client, until its last Round."""
    data = site.folder / f"data-{client}.npz"
    write_npz(data, clients()[client])
    options = {
        "--server": site.address,
        "--ca": site.state / "tls" / "ca.pem",
        "--token-file": site.state / "tokens" / "device.token",
        "--publisher": site.folder / "publisher.pub",
        "--state": site.folder / f"device-{client}",
        "--data": data,
        "--partition": client,
        "--runtime": "onnx",
        "--max-updates": ROUNDS,
    }
    words = [str(word) for pair in options.items() for word in pair]
    running = start(("-m", "fanin.commands.main", "join", *words), site.folder / f"device-{client}.log")
    site.started.append(running)
    return running


@pytest.mark.nightly
def test_processes_of_serve_and_join_publish_the_versions_of_a_simulation(
    site: Site, expected: tuple[str, ...]
) -> None:
    site.start_run(PLAN, bundle_of("mlp"), PUBLISHER)
    devices = [join_by_command(site, client) for client in range(len(clients()))]
    assert [device.wait(120.0) for device in devices] == [0, 0, 0], [device.text() for device in devices]
    events = [entry.event for entry in site.events()]
    versions = [event.version_sha256 for event in events if isinstance(event, VersionPublished)]
    assert tuple(versions) == expected[1:]

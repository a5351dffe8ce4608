"""A client without work downloads the Version that a check-in names, and serves it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.scripted import LosingRuntime, NoPauses, Script, Store, scripted_coordinator
from support.values import PUBLISHER

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import (
    FaninError,
    NotFound,
    StorageFull,
    Unavailable,
)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return scripted_coordinator(tmp_path)


@dataclass
class IdleCoordinator(Script):
    """A coordinator without work: it names a Version, and records the served Version of each check-in."""

    newest: m.Publication | None = None
    served_versions: list[m.ServedVersion | None] = field(default_factory=list)

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        self.served_versions.append(check_in.served)
        newest, self.newest = self.newest, None
        if newest is None:
            self.stop()
        return m.Wait(retry_min_s=0.0, retry_max_s=0.0, newest=newest)


def refresh(script: Script, folder: Path, infer: Float32s | None = None) -> tuple[Client, IdleCoordinator]:
    """Run a serving client without work until it learns of a Version; ``infer`` is its model's prediction."""
    publication = replace(script.work.publication, download_id="run.v0.device")
    coordinator = IdleCoordinator(bundle=script.bundle, work=script.work, newest=publication, faults=script.faults)
    cache, runtime = Cache(folder / "device"), LosingRuntime(0.0, infer=infer)
    parts = ClientParts(
        transport=coordinator,
        cache=cache,
        trainer=RuntimeTrainer(runtime, Store()),
        trusted=(PUBLISHER.public,),
        rng=NoPauses(),
        serving=Serving(runtime, cache, (PUBLISHER.public,)),
    )
    client = Client(parts, ClientOptions(token="token"))
    coordinator.stop = client.stop
    client.run()
    return client, coordinator


NO_VERSION, VERSION_0 = m.ServedVersion(), m.ServedVersion(run_id="run", epoch=1, number=0)


def test_a_client_without_work_serves_the_version_that_a_check_in_names(script: Script, tmp_path: Path) -> None:
    client, coordinator = refresh(script, tmp_path)
    assert client.served_version == ("run", 0)
    assert coordinator.served_versions == [NO_VERSION, VERSION_0]
    assert coordinator.calls["report"] == 0
    # The Version is durable: after a restart the client serves it, and downloads newer ones only.
    restarted = Serving(LosingRuntime(0.0), Cache(tmp_path / "device"), (PUBLISHER.public,))
    assert (restarted.version, restarted.latest) == (("run", 0), VERSION_0)


def test_a_refused_version_is_not_downloaded_again(script: Script, tmp_path: Path) -> None:
    client, coordinator = refresh(script, tmp_path, infer=np.full((1, 1), np.nan, np.float32))
    assert client.served_version is None
    assert coordinator.served_versions == [NO_VERSION, VERSION_0]


def test_a_named_version_that_does_not_verify_is_not_requested_again(script: Script, tmp_path: Path) -> None:
    script.work = replace(script.work, version=replace(script.work.version, signature=bytes(64)))
    client, coordinator = refresh(script, tmp_path)
    assert client.served_version is None
    assert coordinator.served_versions == [NO_VERSION, VERSION_0]
    assert coordinator.failures == []


@pytest.mark.parametrize("fault", [Unavailable("line"), StorageFull("disk"), NotFound("gone")], ids=repr)
def test_a_download_that_fails_leaves_the_version_to_the_next_answer(
    script: Script, tmp_path: Path, fault: FaninError
) -> None:
    script.faults = {"download": fault}
    client, coordinator = refresh(script, tmp_path)
    assert client.served_version is None
    assert coordinator.served_versions == [NO_VERSION, NO_VERSION]

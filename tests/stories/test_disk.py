"""A Run leaves on a coordinator's disk only the files that ``fanin verify`` reads."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer, pieces
from support.snapshot import snapshot

from fanin.edge.bundles.bundle import Bundle
from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import Command, Resume, Stop

NUM_ROUNDS = 3


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator."""
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def needed_files(host: Hosted, bundle: Bundle, payloads: set[str]) -> set[str]:
    """Return the files of all Versions of a Run, and the files from which they are computed."""
    artifacts = set(bundle.manifest.artifacts.values())
    with host.operator() as operator:
        newest = operator.version("run")
        artifacts |= {operator.version("run", number).version.parameters for number in range(newest.version.number + 1)}
    artifacts.add(newest.bundle.manifest)
    chunks = {ref.sha256 for artifact in artifacts for ref in artifact.chunks}
    return payloads | {f"blobs/{sha256[:2]}/{sha256}" for sha256 in chunks}


def upload_update(device: Peer, round_number: int) -> str:
    """Take part in a Round, and return the coordinator's file of the Update."""
    device.begin()
    assert device.work.round == round_number
    header, payload = device.update()
    assert device.upload(header, payload).update_state is m.UpdateState.ACCEPTED
    return f"updates/run/{round_number}/{device.device_id}.{header.payload.sha256[:16]}.payload"


@pytest.mark.nightly
def test_a_run_leaves_only_the_files_of_its_versions(host: Hosted) -> None:
    bundle = f.bundle_in(host.folder)
    host.start_run(f.plan(NUM_ROUNDS), bundle, f.PUBLISHER)
    devices = f.peers(host, bundle, host.folder)
    # A Round that fails, with an accepted Update, a half-sent one and a wrong one.
    failed_file = upload_update(devices[0], 1)
    assert failed_file in snapshot(host.state).files
    for device in devices[1:]:
        device.begin()
    header, payload = devices[1].update()
    devices[1].send(header, pieces(payload, 0, len(payload) // 2))
    with pytest.raises(InvalidUpdate):
        devices[2].send(devices[2].update()[0], pieces(payload))
    # The pause of a device whose Update was refused.
    time.sleep(10.5)
    with host.operator() as operator:
        operator.command(Command(command_id="stop", run_id="run", what=Stop()))
        operator.command(Command(command_id="resume", run_id="run", what=Resume(rounds=NUM_ROUNDS)))
    payloads = set()
    for number in range(2, 2 + NUM_ROUNDS):
        host.await_round("run", number)
        payloads |= {upload_update(device, number) for device in devices}
    assert len(host.published_versions()) == NUM_ROUNDS
    # A file that a process left because it died while it wrote.
    host.stop()
    (blob, *_) = (host.state / "blobs").glob("*/*")
    blob.with_name(f"{blob.name}.0123abcd.new").write_bytes(b"half")
    host.start()
    assert set(snapshot(host.state).files) == needed_files(host, bundle, payloads)

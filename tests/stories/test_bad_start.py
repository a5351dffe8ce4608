"""Environments in which a coordinator or a device cannot work: no port, no trust, no space, no runtime.

Each problem is reported in one clear line. Durable state does not change, and the Round ends with the bits of an
undisturbed Round.
"""

import errno
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import federations as f
from support.commands import uncoded
from support.hosted import Hosted
from support.peers import Peer
from support.processes import Running, Site, limit_files, start
from support.snapshot import snapshot

from fanin.clients.operator import Operator
from fanin.clients.transport import Connection
from fanin.edge.files import DISK_PROBLEMS
from fanin.protos.errors import StorageFull, Unavailable
from fanin.protos.messages import VersionPublished

NO_SPACE = "the coordinator has no space left; try again later"
FILE_LIMIT = DISK_PROBLEMS[errno.EFBIG]
"""The limit on file sizes of a process takes the place of a full disk."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator's process, which is killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator in this process, with an open Round for three devices."""
    host = Hosted(tmp_path_factory.mktemp("start")).start()
    host.start_run(f.plan(), f.bundle_in(host.folder, f.SMALL_SHAPES), f.PUBLISHER)
    yield host
    host.stop()


@contextmanager
def working_device(peer: Peer, log: pytest.LogCaptureFixture, text: str) -> Iterator[None]:
    """Run a device's production client on a thread.

    The device must log ``text`` before the block, and its Update must be accepted after it.
    """
    log.set_level("INFO")
    thread = threading.Thread(target=peer.take_part)
    thread.start()
    try:
        wait_for(lambda: text in log.text, f"{text!r} in the device's log")
        yield
    finally:
        thread.join(60.0)
    assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], description: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {description}"
        time.sleep(0.02)


def fanin(*words: str, setup: str = "") -> list[str]:
    """Return the arguments of a Python process that runs a subcommand after a line of Python."""
    return ["-c", f"{setup}\nimport sys\nfrom fanin.commands.main import main\nsys.exit(main({list(words)!r}))"]


def digests(site: Site) -> list[str]:
    """Return the digests of the Versions that the Run published."""
    events = [entry.event for entry in site.events()]
    return [event.version_sha256 for event in events if isinstance(event, VersionPublished)]


# The port and the folder.


def test_two_coordinators_on_one_port_or_folder(site: Site) -> None:
    coordinator = site.serve()
    site.start_run(f.plan(), f.bundle_in(site.folder), f.PUBLISHER)
    wait_for(lambda: len(snapshot(site.state).rows["rounds"]) == 1, "an open round")
    before = snapshot(site.state)
    same_port = start(
        fanin("serve", "--state", str(site.folder / "other"), "--listen", site.address), site.folder / "a.log"
    )
    same_folder = start(
        fanin("serve", "--state", str(site.state), "--listen", "127.0.0.1:0", "--no-web"), site.folder / "b.log"
    )
    site.started += [same_port, same_folder]
    assert same_port.wait(30.0) == same_folder.wait(30.0) == 1
    assert uncoded(same_port.text()) == (
        f"fanin serve: {site.address}: cannot be listened on (Address already in use); is another coordinator "
        "running? choose another --listen\n"
    )
    assert not (site.folder / "other").exists()
    assert uncoded(same_folder.text()) == (
        f"fanin serve: {site.state}: in use by process {coordinator.process.pid}; stop this coordinator, or give "
        "another --state\n"
    )
    assert coordinator.process.poll() is None
    assert snapshot(site.state) == before
    for peer in f.peers(site, f.bundle_in(site.folder), site.folder):
        peer.take_part()
    assert digests(site) == f.expected_digests(site.folder / "undisturbed")


# The connection.


def unused_address() -> str:
    """Return an address of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_an_operator_without_a_coordinator_gets_an_error(host: Hosted) -> None:
    address = unused_address()
    connection = Connection(address, host.ca)
    with pytest.raises(Unavailable, match=rf"{address}: cannot be reached \(Connection refused\); is the coord"):
        Operator(connection, "token").runs()
    connection.close()


def test_a_device_keeps_trying_until_there_is_a_coordinator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Hosted(tmp_path).start()
    bundle = f.bundle_in(tmp_path, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    host.stop()
    before = snapshot(host.state)
    first, *others = f.peers(host, bundle, tmp_path)
    try:
        with working_device(first, caplog, f"enroll: {host.address}: cannot be reached (Connection refused)"):
            assert snapshot(host.state) == before
            host.start()
        for peer in others:
            peer.take_part()
        (version,) = host.published_versions()
    finally:
        host.stop()
    assert [version.version_sha256] == f.expected_digests(tmp_path / "undisturbed", f.SMALL_SHAPES)


def test_a_device_that_has_enrolled_waits_for_a_certificate_that_it_trusts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Hosted(tmp_path).start()
    bundle, tls, ca = f.bundle_in(tmp_path, f.SMALL_SHAPES), host.state / "tls", host.ca
    first, *others = f.peers(host, bundle, tmp_path)
    try:
        with working_device(first, caplog, "enrolled; waiting for work"):
            # A hotel's network answers for every address, too, and the device must take part again at home.
            host.stop()
            tls.rename(tmp_path / "tls")
            host.start()
            assert host.ca != ca
            wait_for(lambda: "its certificate is not by the authority" in caplog.text, "a certificate without trust")
            host.stop()
            shutil.rmtree(tls)
            (tmp_path / "tls").rename(tls)
            host.start()
            host.start_run(f.plan(), bundle, f.PUBLISHER)
            for peer in others:
                peer.take_part()
        assert len(host.published_versions()) == 1
    finally:
        host.stop()


# The disk.


def open_round(site: Site, shapes: dict[str, tuple[int, ...]]) -> tuple[Running, list[Peer]]:
    """Start a coordinator's process with an open Round, and its three devices."""
    coordinator = site.serve()
    bundle = f.bundle_in(site.folder, shapes)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    peers = f.peers(site, bundle, site.folder)
    for peer in peers:
        peer.begin()
    return coordinator, peers


@pytest.mark.nightly
def test_a_full_disk_in_the_spool(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, (first, *others) = open_round(site, f.SHAPES)
    before = snapshot(site.state)
    header, payload = first.update()
    # The disk has space for the first Chunk, but not for the second.
    limit_files(coordinator, (1 << 20) + 10_000)
    with pytest.raises(StorageFull, match=NO_SPACE):
        first.upload(header, payload)
    after = snapshot(site.state)
    assert after.rows == before.rows
    assert after.under("updates") == []
    part = (site.state / "spool" / f"{header.assignment_id}.part").read_bytes()
    assert part[: 1 << 20] == payload[: 1 << 20]
    assert f"spool {header.assignment_id}: cannot be written: {FILE_LIMIT}" in coordinator.text()
    with working_device(first, caplog, f"send: {NO_SPACE}"):
        limit_files(coordinator, 0)
    for peer in others:
        peer.take_part()
    assert digests(site) == f.expected_digests(site.folder / "undisturbed")


def test_a_full_disk_in_the_blobs(site: Site) -> None:
    coordinator = site.serve(kill_at="after:Close:1")
    bundle = f.bundle_in(site.folder)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    *others, last = f.peers(site, bundle, site.folder)
    for peer in others:
        peer.take_part()
    last.begin()
    # The device that closes the Round may learn that it is closed, or lose the connection.
    with suppress(Unavailable):
        last.upload(*last.update())
    assert coordinator.wait(30.0) == -9
    before = snapshot(site.state)
    # The Round is closed, but the disk has no space for the Chunks of its Version.
    successor = site.serve(max_file_bytes=1 << 19)
    wait_for(lambda: "Fold failed: chunk " in successor.text(), "a fold that fails")
    assert FILE_LIMIT in successor.text()
    with site.operator() as operator:
        with pytest.raises(StorageFull, match=NO_SPACE):
            operator.publish_bundle(f.bundle_in(site.folder / "larger", {"a": (600, 501)}))
        info = operator.run("run")
    assert info.version == 0
    assert info.reason == f"Fold is tried again: the coordinator cannot write: {FILE_LIMIT}"
    after = snapshot(site.state)
    assert after.rows == before.rows
    # The Chunks of the larger Bundle that fitted remain, complete and under their digests. No file is half-written.
    assert before.files.items() <= after.files.items()
    assert [Path(name).name for name in after.under("blobs")] == [after.files[name] for name in after.under("blobs")]
    limit_files(successor, 0)
    assert digests(site) == f.expected_digests(site.folder / "undisturbed")


@pytest.mark.nightly
def test_a_full_disk_in_the_database(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, (first, *others) = open_round(site, f.SMALL_SHAPES)
    stranger = Peer(site, first.bundle, 9, site.folder / "stranger")
    with site.operator() as operator:
        before = snapshot(site.state)
        limit_files(coordinator, (site.state / "fanin.db-wal").stat().st_size)
        with pytest.raises(StorageFull, match=NO_SPACE):
            operator.start_run("other", f.plan(), first.bundle, f.PUBLISHER)
        with pytest.raises(StorageFull, match=NO_SPACE):
            stranger.begin()
        with pytest.raises(StorageFull, match=NO_SPACE):
            first.upload(*first.update())
        # The coordinator still serves its data.
        assert [info.run_id for info in operator.runs()] == ["run"]
        after = snapshot(site.state)
        assert after.rows == before.rows
        assert after.under("blobs") == before.under("blobs")
        assert f"fanin.db: cannot be written: {FILE_LIMIT}" in coordinator.text()
        with working_device(first, caplog, f"send: {NO_SPACE}"):
            limit_files(coordinator, 0)
        # Nothing blocks the requests that were refused before.
        for peer in others:
            peer.take_part()
        assert digests(site) == f.expected_digests(site.folder / "undisturbed", f.SMALL_SHAPES)
        assert operator.start_run("other", f.plan(), first.bundle, f.PUBLISHER).run_id == "other"
        stranger.begin()
        assert stranger.work.run_id == "other"


def test_a_coordinator_does_not_start_without_space_and_starts_with_it(site: Site) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))"
    words = fanin("serve", "--state", str(site.state), "--listen", "127.0.0.1:0", "--no-web", setup=limit)
    coordinator = start(words, site.folder / "failing.log")
    site.started.append(coordinator)
    assert coordinator.wait(30.0) == 1
    assert uncoded(coordinator.text()) == f"fanin serve: {site.state}/fanin.db: cannot be written: {FILE_LIMIT}\n"
    site.serve()
    with site.operator() as operator:
        assert operator.runs() == ()


def test_a_folder_with_a_broken_database_is_reported(site: Site) -> None:
    site.state.mkdir()
    (site.state / "fanin.db").write_bytes(b"garbage" * 1000)
    (site.state / "tls").mkdir()
    coordinator = start(
        fanin("serve", "--state", str(site.state), "--listen", "127.0.0.1:0", "--no-web"), site.folder / "failing.log"
    )
    site.started.append(coordinator)
    assert coordinator.wait(30.0) == 1
    assert uncoded(coordinator.text()) == (
        f"fanin serve: {site.state}/fanin.db: not a database of a coordinator (file is not a database); restore a "
        "backup of the folder\n"
    )
    assert (site.state / "fanin.db").read_bytes() == b"garbage" * 1000


# The runtime.


def test_a_device_without_a_runtime_sends_nothing_to_the_coordinator(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        files = [word for option in ("ca", "publisher", "data") for word in (f"--{option}", str(site.folder / option))]
        words = fanin(
            "join", "--server", address, *files, "--state", str(site.folder / "device"),
            setup="import sys; sys.modules |= dict.fromkeys(('onnxruntime', 'ai_edge_litert', 'tflite_runtime'))",
        )  # fmt: skip
        device = start(words, site.folder / "device.log")
        site.started.append(device)
        assert device.wait(30.0) == 1
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert uncoded(device.text()) == (
        "fanin join: runtime: none of ['onnx', 'litert', 'tflite'] is installed here; pip install 'fanin[onnx]'\n"
    )
    # It has not become a device. What has failed is for fanin status.
    assert {path.name for path in (site.folder / "device").iterdir()} == {"lock", "status.json"}

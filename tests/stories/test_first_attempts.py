"""A device that fails before it takes part: ``fanin status`` and ``fanin doctor`` show attempt, cause and fix."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import urlopen

import pytest
from support import doors
from support.commands import Fanin, fanin_in_process
from support.full_disk import FILE_LIMIT
from support.hosted import Hosted
from support.joining import JOIN, WAIT_S, Device, device_of, unused_port
from support.processes import start

from fanin.clients.device.session import events as e
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.record import SitePlace, read_record
from fanin.clients.device.storage.cache import Cache, hold_folder
from fanin.clients.pins import fingerprints_of
from fanin.clients.route import EXCEPTIONS, PROXIES
from fanin.clients.transport import Connection, GrpcTransport
from fanin.protos import messages as m


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*PROXIES, *EXCEPTIONS, "FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator."""
    host = Hosted(tmp_path_factory.mktemp("host")).start()
    yield host
    host.stop()


@pytest.fixture
def device(tmp_path: Path, host: Hosted) -> Device:
    """A device of the coordinator."""
    return device_of(tmp_path, host)


NAMED = """
import socket, sys
known = socket.getaddrinfo
def resolve(host, *rest, **more):
    return known(sys.argv[1] if host == "hospital.test" else host, *rest, **more)
socket.getaddrinfo = resolve
from fanin.commands.main import main
sys.exit(main(sys.argv[2:]))
"""
"""Runs a command where hospital.test has one address."""
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
NOBODY = 65534
LATEST_S = 22.0
"""Seconds for a start, a connection and a probe that are silent."""
FAULTS = {
    "FN-1480": ("--ca-fingerprint", "0" * 64),
    "FN-0407": ("--runtime", "no-such-runtime"),
    "FN-0851": ("--data", "no-such-file.npz"),
}


def join_words(device: Device, server: str, option: str, value: str) -> list[str]:
    """Return the words of ``fanin join`` with one wrong option."""
    files = {"--ca": "ca.pem", "--publisher": "publisher.pub", "--token-file": "token", "--data": "data.npz"}
    words = {name: str(device.folder / file) for name, file in files.items()}
    words |= {"--server": server, "--state": str(device.state), option: value}
    if option == "--ca-fingerprint":
        del words["--ca"]
    return ["join", *(word for pair in words.items() for word in pair)]


@pytest.mark.parametrize("code", FAULTS)
def test_the_last_attempt_is_shown_with_its_cause_and_its_fix(
    fanin: Fanin, device: Device, host: Hosted, code: str
) -> None:
    outcome = fanin(*join_words(device, host.address, *FAULTS[code]))
    assert outcome.status == 1 and f"[{code}]" in outcome.err, outcome
    status = fanin("status", "--state", device.state)
    cause = outcome.err.strip().removeprefix("fanin join: ")
    assert (status.status, status.out.count(cause.removesuffix(f" [{code}]"))) == (3, 1), status
    assert "\nfix " in status.out and f"fanin explain {code}" in status.out and host.address in status.out
    doctor = fanin("doctor", "--state", device.state, "--json")
    findings = json.loads(doctor.out)["findings"]
    assert code in {each["code"] for each in findings}, findings
    shown = [each for each in findings if each["code"] == code and cause.partition(" [")[0] in each["text"]]
    assert len(shown) == 1 and shown[0]["fix"], findings


def test_a_coordinator_that_cannot_be_reached_for_its_authority_is_the_reason_while_the_device_tries(
    fanin: Fanin, device: Device
) -> None:
    server = f"127.0.0.1:{unused_port()}"
    with device.joining(server, None, "--ca-fingerprint", "0" * 64) as running:
        until = time.monotonic() + WAIT_S
        while (record := read_record(device.state)) is None:
            assert time.monotonic() < until and running.process.poll() is None, running.text()
            time.sleep(0.05)
        assert (record.link.code, record.place.server) == ("FN-0811", server)
        status = fanin("status", "--state", device.state)
        assert "not connected" in status.out and "next try" in status.out and "[FN-0811]" in status.out
        assert "stopped" not in fanin("doctor", "--state", device.state).out


def test_the_doctor_examines_a_coordinator_by_the_fingerprint_alone(fanin: Fanin, device: Device, host: Hosted) -> None:
    (fingerprint,) = fingerprints_of(host.ca)
    options = ("--server", host.address, "--token-file", device.folder / "token", "--json")
    for pin, levels in ((fingerprint, ["ok", "ok"]), ("0" * 64, ["fail", "skip"])):
        findings = json.loads(fanin("doctor", *options, "--ca-fingerprint", pin).out)["findings"]
        assert [each["level"] for each in findings if each["check"] in ("tls", "token")] == levels, findings
        assert any("issued by 'CN=fanin local authority'" in each["text"] for each in findings) is (levels[0] == "fail")
    assert fanin("doctor", *options, "--ca-fingerprint", "ab").status == 2


def test_a_banned_device_is_not_told_to_start_again(fanin: Fanin, device: Device, host: Hosted) -> None:
    key = Cache(device.state).key()
    with closing(GrpcTransport(Connection(host.address, host.ca), key)) as transport:
        device_id = transport.enroll(host.device_token)
    with host.administrator() as administrator:
        ban = administrator.change_device(m.DeviceChange(device_id=device_id, what=m.BanDevice())).ban
    assert ban is not None
    since = f"banned since {datetime.fromtimestamp(ban.time, UTC):%Y-%m-%d %H:%M} UTC by an operator"
    assert since in fanin(*join_words(device, host.address, "--token-file", str(device.folder / "token"))).err
    assert since in fanin("status", "--state", device.state).out
    for is_up in (True, False):
        server = host.address if is_up else f"127.0.0.1:{unused_port()}"
        outcome = fanin("doctor", "--state", device.state, "--server", server)
        assert outcome.status == 1 and outcome.out.count(since) == 1 and "ask an operator" in outcome.out
        assert "-> start fanin join" not in outcome.out, outcome.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("door", "code", "check"),
    [
        (lambda: doors.listening(doors.silent), "FN-1510", "tls"),
        (lambda: doors.listening(doors.hanging_up), "FN-0816", "tls"),
        (doors.dropping, "FN-0811", "port"),
    ],
    ids=["silent", "closing", "dropping"],
)
def test_a_network_that_swallows_is_named_within_seconds(
    fanin: Fanin, device: Device, door: Callable[[], AbstractContextManager[str]], code: str, check: str
) -> None:
    with door() as server, device.joining(server) as running:
        began_s = time.monotonic()
        device.await_link(running, is_connected=False)
        assert time.monotonic() - began_s < LATEST_S
        log, status = running.text(), fanin("status", "--state", device.state).out
        outcome = fanin("doctor", "--state", device.state)
    host, _, port = server.rpartition(":")
    for text in (log, status, outcome.out):
        assert f"[{code}]" in text and "firewall" in text and f"port {port}" in text, text
    for text in (log, status):
        assert f"let TCP port {port} of {host} pass, with TLS 1.2 or newer and HTTP/2 (ALPN h2)" in text, text
    assert f"FAIL  {check} " in outcome.out


@pytest.mark.parametrize(("resolved", "listen"), [("::1", "[::]"), ("127.0.0.1", "0.0.0.0")])
def test_a_site_is_sent_to_the_operator_with_the_address_that_its_family_needs(
    device: Device, resolved: str, listen: str
) -> None:
    port = unused_port()
    server = f"hospital.test:{port}"
    options = ("--server", server, "--ca", device.folder / "ca.pem", "--token-file", device.folder / "token")
    for command in ("doctor", "runs"):
        words = [str(word) for word in (resolved, command, *options)]
        running = start(["-c", NAMED, *words], device.folder / f"{command}.log")
        assert running.wait(WAIT_S) == 1
        text = running.text()
        assert "with the join line that the operator of the coordinator has" in text and "fanin serve" not in text, text
        assert ("0.0.0.0" in text) <= (listen == "0.0.0.0"), text
        assert f"--listen {listen}:{port}" in text or command == "runs", text


def test_a_full_disk_is_named_by_the_device_and_by_the_doctor(fanin: Fanin, device: Device, host: Hosted) -> None:
    words = join_words(device, host.address, "--token-file", str(device.folder / "token"))
    command = [sys.executable, "-c", f"{FULL_DISK}\n{JOIN}", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr.count("\n")) == (1, 1), completed
    assert f"{device.state / 'lock'}: cannot be written: {FILE_LIMIT}" in completed.stderr
    status = fanin("status", "--state", device.state)
    assert status.status == 3 and "its state could not be written" in status.out and "fanin doctor" in status.out
    doctor = fanin("doctor", "--state", device.state).out
    assert "its state could not be written, or no device has run here yet; see disk and files" in doctor


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_the_folder_of_another_user_is_a_finding_and_not_the_end_of_the_doctor(
    fanin: Fanin, device: Device, host: Hosted
) -> None:
    device.state.mkdir(mode=0o700)
    os.seteuid(NOBODY)
    try:
        outcome = fanin("doctor", "--state", device.state)
        status = fanin("status", "--state", device.state)
    finally:
        os.seteuid(0)
    assert f"belongs to user 0, and this is user {NOBODY})" in status.err, status
    assert outcome.status == 1 and "belongs to user 0" in outcome.out and "sudo -u '#0' fanin" in outcome.out, outcome


def test_the_doctor_examines_a_coordinator_for_a_folder_without_a_device(
    fanin: Fanin, device: Device, host: Hosted
) -> None:
    folder = device.folder / "no" / "such" / "folder"
    assert fanin("doctor", "--state", folder).status == 2
    options = ("--server", host.address, "--ca", device.folder / "ca.pem", "--token-file", device.folder / "token")
    outcome = fanin("doctor", "--state", folder, *options)
    assert (
        outcome.status == 0 and "[FN-1484]" in outcome.out and "the coordinator accepts this enrollment" in outcome.out
    )


def test_the_doctor_shows_what_the_coordinator_last_told_a_connected_device(
    fanin: Fanin, device: Device, host: Hosted
) -> None:
    device.state.mkdir()
    journal = Journal(device.state, SitePlace(server=host.address, ca_file=str(device.folder / "ca.pem")), "d" * 32)
    with hold_folder(device.state):
        journal.start(lambda _: m.TrainingProgress())
        text = "two processes check in as device dd"
        answer = m.Rejected(reason=m.RejectReason.UNSUITABLE, text=text)
        journal.observe(e.Poll(), e.Answered(answer=answer))
        until = time.monotonic() + WAIT_S
        while text not in (device.state / "status.json").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        outcome = fanin("doctor", "--state", device.state)
        assert re.search(rf"^warn +process +the device runs and is connected, but .*{text}$", outcome.out, re.MULTILINE)
    journal.stop(None)


def test_the_page_of_a_device_that_has_ended_shows_why(fanin: Fanin, device: Device, host: Hosted) -> None:
    assert fanin(*join_words(device, host.address, *FAULTS["FN-1480"])).status == 1
    running = start(["-c", JOIN, "status", "--state", str(device.state), "--web", "0"], device.folder / "page.log")
    try:
        until = time.monotonic() + WAIT_S
        while not (url := re.search(r"http://\S+/", running.text())):
            assert time.monotonic() < until and running.process.poll() is None, running.text()
            time.sleep(0.05)
        with urlopen(f"{url[0]}status.json", timeout=WAIT_S) as reply:
            state = json.load(reply)
        assert (state["state"], state["link"]["code"]) == ("stopped", "FN-1480")
        running.process.send_signal(signal.SIGINT)
        assert running.wait(WAIT_S) == 130
    finally:
        running.kill()
    assert fanin("status", "--state", device.state, "--web", "0.0.0.0:1").status == 2
    assert fanin("status", "--state", device.state, "--web", "0", "--json").status == 2


def test_a_device_says_soon_what_it_tries(fanin: Fanin, device: Device) -> None:
    with doors.listening(doors.silent) as server, device.joining(server) as running:
        until = time.monotonic() + WAIT_S
        while f"{server}: no answer for 3 s; still trying TCP, TLS and HTTP/2" not in running.text():
            assert time.monotonic() < until, running.text()
            time.sleep(0.05)
        assert "no answer yet, for " in fanin("status", "--state", device.state).out


@pytest.mark.parametrize("pin", [(), ("--ca-fingerprint", "0" * 64)], ids=["file", "fingerprint"])
def test_a_device_that_was_stopped_before_its_first_connection_says_so(
    fanin: Fanin, device: Device, pin: tuple[str, ...]
) -> None:
    with device.joining(f"127.0.0.1:{unused_port()}", None, *pin) as running:
        device.await_link(running, is_connected=False)
        running.process.terminate()
        assert running.wait(WAIT_S) == 0
    status, doctor = fanin("status", "--state", device.state), fanin("doctor", "--state", device.state)
    assert status.status == 3 and re.search(r"^reason .*\[FN-0811\]$", status.out, re.MULTILINE), status.out
    assert re.search(r"^connected +never$", status.out, re.MULTILINE), status.out
    assert "is stopped, and has never connected" in doctor.out


@pytest.mark.parametrize(("ahead_s", "level"), [(-200.0, "ok"), (86_400.0, "warn"), (-86_400.0, "warn")])
def test_a_wrong_clock_has_one_verdict(fanin: Fanin, tmp_path: Path, ahead_s: float, level: str) -> None:
    host = Hosted(tmp_path / "host", wall=lambda: time.time() - ahead_s).start()
    try:
        device = device_of(tmp_path, host)
        with device.joining(host.address) as running:
            device.await_link(running, is_connected=True)
        outcome = fanin("doctor", "--state", device.state, "--json")
        (clock,) = (each for each in json.loads(outcome.out)["findings"] if each["check"] == "clock")
        assert (outcome.status, clock["level"]) == (0, level), clock
        assert ("corrects" in clock["text"]) is (level == "warn")
    finally:
        host.stop()


def test_a_device_that_was_connected_remembers_when(fanin: Fanin, device: Device, host: Hosted) -> None:
    for server, is_connected in ((host.address, True), (f"127.0.0.1:{unused_port()}", False)):
        with device.joining(server) as running:
            device.await_link(running, is_connected=is_connected)
            running.process.terminate()
            assert running.wait(WAIT_S) == 0
        assert re.search(r"^connected +last at 20", fanin("status", "--state", device.state).out, re.MULTILINE)


def test_a_device_that_runs_keeps_its_state_when_another_attempt_fails(
    fanin: Fanin, device: Device, host: Hosted
) -> None:
    with device.joining(host.address) as running:
        device.await_link(running, is_connected=True)
        outcome = fanin(*join_words(device, host.address, "--runtime", "no-such-runtime"))
        assert outcome.status == 1
        assert fanin("status", "--state", device.state).status == 0

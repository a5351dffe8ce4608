"""The command line with wrong usage, and ``fanin serve`` and ``fanin join`` with wrong input.

Each command prints one clear line, ends with its exit status and changes nothing. The commands run in this process.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line, uncoded, usage_line
from support.hosted import Hosted
from support.snapshot import snapshot

from fanin.commands.main import SUBCOMMANDS


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator that receives no requests."""
    host = Hosted(tmp_path_factory.mktemp("commands")).start()
    yield host
    host.stop()


# Usage.


def test_an_unknown_subcommand_is_wrong_usage(fanin: Fanin) -> None:
    outcome = fanin("bogus")
    assert outcome.status == 2
    assert uncoded(outcome.err) == f"fanin: got subcommand 'bogus', expected one of {', '.join(SUBCOMMANDS)}\n"


def test_fanin_alone_lists_its_subcommands(fanin: Fanin) -> None:
    outcome = fanin()
    assert outcome == fanin("--help")
    assert outcome.status == 0
    for name, subcommand in SUBCOMMANDS.items():
        assert f"  {name}" in outcome.out
        assert subcommand.summary in outcome.out


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_help_that_reads_well(fanin: Fanin, name: str) -> None:
    outcome = fanin(name, "--help")
    assert (outcome.status, uncoded(outcome.err)) == (0, "")
    usage, *lines = outcome.out.splitlines()
    assert usage.lower().startswith(f"usage: fanin {name} ")
    # The help has no markup that stays unrendered, and no option without an explanation.
    assert "\\" not in outcome.out
    assert re.findall(r"^  (--[a-z-]+)( [A-Z:]+| FILE.npz| \[.*\])?\n(?! {10})", outcome.out, re.MULTILINE) == []
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "words",
    [("run",), ("serve", "--listen"), ("verify",), ("runs", "--bogus"), ("join",), ("serve", "--durability", "x")],
)
def test_wrong_usage_ends_with_status_2(fanin: Fanin, words: tuple[str, ...]) -> None:
    outcome = fanin(*words)
    assert outcome.status == 2
    assert re.search(r"^fanin \w+: .+; see fanin .+ --help \[FN-\d{4}\]$|rror: ", outcome.err, re.MULTILINE)
    assert "Traceback" not in outcome.err


# serve


@pytest.mark.parametrize("listen", [":7443", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"])
def test_serve_on_a_bad_address(fanin: Fanin, tmp_path: Path, listen: str) -> None:
    message = usage_line(fanin("serve", "--state", tmp_path / "state", "--listen", listen), "serve")
    assert message == f"listen: got {listen!r}, expected HOST:PORT, for example 127.0.0.1:7443"
    assert not (tmp_path / "state").exists()


def test_serve_in_a_folder_that_is_a_file(fanin: Fanin, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    message = one_line(fanin("serve", "--state", tmp_path / "state", "--listen", "127.0.0.1:0", "--no-web"), "serve")
    remedy = "expected a folder or no file there: move the file away, or pass another path"
    assert message == f"{tmp_path / 'state'}: File exists; {remedy}"


# join


@pytest.fixture
def device(tmp_path: Path, host: Hosted) -> dict[str, object]:
    """Valid options of a device."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.random((20, 4), np.float32), y=rng.integers(0, 3, 20))
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "publisher.pub").write_text(f.PUBLISHER.public)
    (tmp_path / "token").write_text(host.device_token)
    (tmp_path / "junk").write_bytes(bytes(range(128, 256)))
    (tmp_path / "empty").write_text(" \n")
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 2), np.float32), y=np.zeros(4, np.int64))
    return {
        "server": host.address,
        "ca": tmp_path / "ca.pem",
        "publisher": tmp_path / "publisher.pub",
        "token-file": tmp_path / "token",
        "data": tmp_path / "data.npz",
        "state": tmp_path / "device",
    }


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "data",
            "none.npz",
            "{path}: no such file; expected an .npz file with y and an array for each input, such as x",
        ),
        ("data", "junk", "{path}: not a readable .npz file of plain arrays ("),
        ("data", ".", "{path}: cannot be read (Is a directory)"),
        (
            "data",
            "wide.npz",
            "{path}: got arrays of different lengths (x (3, 2), y (4,)), expected one row of each for every example",
        ),
        ("ca", "none", "--ca: {path} cannot be read (No such file or directory)"),
        ("ca", "junk", "--ca: {path} is no text ("),
        ("ca", "token", "certificate authority (--ca): got no PEM certificate, expected the coordinator's tls/ca.pem"),
        ("ca", "torn.pem", "certificate authority (--ca): got no PEM certificate, expected the coordinator's tls/ca.p"),
        ("publisher", "none", "--publisher: {path} cannot be read (No such file or directory)"),
        ("publisher", ".", "--publisher: {path} cannot be read (Is a directory)"),
        ("publisher", "junk", "--publisher: {path} is no text ("),
        ("publisher", "ca.pem", "--publisher: {path}: got a public key of "),
        ("publisher", "p.key", "--publisher: {path} has the name of a private key, expected a public one; pass "),
        ("token-file", "none", "--token-file: {path} cannot be read (No such file or directory)"),
        ("token-file", "junk", "--token-file: {path} is no text ("),
        ("token-file", "empty", "--token-file: {path}: got 0 characters that are no token, expected one line of "),
        ("token-file", "ca.pem", "--token-file: {path}: got "),
        ("state", "token", "{path}"),
    ],
)
def test_join_with_an_invalid_file(
    fanin: Fanin, device: dict[str, object], tmp_path: Path, host: Hosted, option: str, value: str, message: str
) -> None:
    (tmp_path / "torn.pem").write_bytes(host.ca[:200])
    before = snapshot(host.state)
    path = tmp_path / value
    options = device | {option: path}
    words = [word for name, argument in options.items() for word in (f"--{name}", argument)]
    assert message.format(path=path) in one_line(fanin("join", *words), "join")
    assert not (tmp_path / "device" / "device.key").exists()
    assert snapshot(host.state) == before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("validation", "1", "--validation: got 1, expected a share of at least 0 and less than 1, as in 0.2"),
        ("validation", "-0.1", "--validation: got -0.1, expected a share of at least 0 and less than 1, as in 0.2"),
        ("validation", "nan", "--validation: got nan, expected a share of at least 0 and less than 1, as in 0.2"),
        ("partition", "-1", "--partition: got -1, expected at least 0"),
        ("cache-mb", "0", "--cache-mb: got 0, expected at least 1"),
        ("max-updates", "-3", "--max-updates: got -3, expected at least 0"),
        ("server", "localhost", "--server: got 'localhost', expected HOST:PORT, for example localhost:7443"),
    ],
)
def test_join_with_an_invalid_value(
    fanin: Fanin, device: dict[str, object], tmp_path: Path, host: Hosted, option: str, value: str, message: str
) -> None:
    before = snapshot(host.state)
    words = [word for name, argument in (device | {option: value}).items() for word in (f"--{name}", argument)]
    assert usage_line(fanin("join", *words), "join") == message
    assert not (tmp_path / "device").exists()
    assert snapshot(host.state) == before


def test_join_with_a_runtime_that_is_not_installed(fanin: Fanin, device: dict[str, object], tmp_path: Path) -> None:
    words = [word for name, argument in device.items() for word in (f"--{name}", argument)]
    message = "runtime: got 'abacus', expected one of ['litert', 'onnx', 'reference', 'tflite']"
    assert one_line(fanin("join", *words, "--runtime", "abacus"), "join") == message
    # It has not become a device. What has failed is for fanin status.
    assert {path.name for path in (tmp_path / "device").iterdir()} == {"lock", "status.json"}


def test_join_with_a_broken_key_or_a_wrong_token(
    fanin: Fanin, device: dict[str, object], tmp_path: Path, host: Hosted
) -> None:
    before = snapshot(host.state)
    words = [word for name, argument in device.items() for word in (f"--{name}", argument)]
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "device.key").write_text("abc")
    message = one_line(fanin("join", *words), "join")
    assert message.startswith(
        f"{tmp_path / 'device' / 'device.key'}: got 3 characters, expected a key of 64 hexadecimal ones; restore it "
    )
    (tmp_path / "device" / "device.key").unlink()
    (tmp_path / "token").write_text("wrong")
    assert one_line(fanin("join", *words), "join") == (
        f"{host.address}: enroll: this coordinator has no token with this secret; check that it is of this "
        "coordinator, and that nobody has replaced it (fanin token rotate)"
    )
    assert snapshot(host.state) == before

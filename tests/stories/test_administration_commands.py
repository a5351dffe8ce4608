"""``fanin token``, ``fanin device`` and ``fanin audit`` against a coordinator behind real gRPC and TLS."""

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.peers import Peer


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator whose folder serves the commands."""
    host = Hosted(tmp_path).start()
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


@pytest.fixture
def device(host: Hosted, tmp_path: Path) -> Peer:
    """A device that has enrolled."""
    peer = Peer(host, f.bundle_in(tmp_path), 0, tmp_path / "device")
    with peer.transport() as transport:
        transport.enroll(host.device_token)
    return peer


def output(fanin: Fanin, host: Hosted, *words: object) -> str:
    outcome = fanin(*words, "--state", host.state)
    assert outcome.status == 0, outcome
    return outcome.out


def test_a_secret_is_printed_once_or_written_to_a_private_file(
    fanin: Fanin, host: Hosted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    printed = output(fanin, host, "token", "create", "anna", "--role", "viewer", "--expires", "7d").strip()
    path = tmp_path / "ward.token"
    words = ("--for-devices", "--uses", "2", "--tag", "site=charite", "--label", "<b>cart</b>", "--out", path)
    text = output(fanin, host, "token", "create", "ward", *words, "--json", tmp_path / "token.json")
    assert text == f"secret in {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().strip()
    row = json.loads((tmp_path / "token.json").read_text())["token"]
    assert (row["role"], row["max_uses"], row["num_uses"], row["tags"]) == ("device", 2, 0, {"site": "charite"})
    created = json.loads(output(fanin, host, "token", "create", "ben", "--role", "admin", "--json"))
    listed = output(fanin, host, "token", "list")
    assert "<b>cart</b>" in listed
    rows = json.loads(output(fanin, host, "token", "list", "--json"))["tokens"]
    assert {"anna", "ben", "ward"} <= {row["name"] for row in rows}
    for one in (printed, secret, created["secret"]):
        assert len(one) == 32
        assert one not in listed + json.dumps(rows) + caplog.text + (tmp_path / "token.json").read_text()
    token_file = tmp_path / "anna.token"
    token_file.write_text(printed)
    refused = fanin("token", "list", "--state", host.state, "--token-file", token_file)
    assert refused.status == 1
    assert "FN-1416" in refused.err
    new = output(fanin, host, "token", "rotate", "anna").strip()
    assert fanin("runs", "--state", host.state, "--token-file", token_file).status == 1
    token_file.write_text(new)
    assert fanin("runs", "--state", host.state, "--token-file", token_file).status == 0
    assert output(fanin, host, "token", "revoke", "anna") == "token anna: revoked\n"
    assert fanin("runs", "--state", host.state, "--token-file", token_file).status == 1


def test_an_expired_token_is_renewed_with_a_lifetime_only(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    path = tmp_path / "anna.token"
    output(fanin, host, "token", "create", "anna", "--role", "viewer", "--expires", "1s", "--out", path)
    before = path.read_text()
    time.sleep(1.1)
    refused = fanin("token", "rotate", "anna", "--out", path, "--state", host.state)
    assert (refused.status, "FN-1470" in refused.err, path.read_text()) == (1, True, before)
    output(fanin, host, "token", "rotate", "anna", "--expires", "1h", "--out", path)
    assert fanin("runs", "--state", host.state, "--token-file", path).status == 0


def test_a_refused_token_leaves_no_file_and_no_file_is_overwritten(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    path = tmp_path / "a.token"
    output(fanin, host, "token", "create", "anna", "--role", "viewer", "--out", path)
    words = ("token", "create", "anna", "--role", "viewer", "--state", host.state, "--out")
    refused = fanin(*words, tmp_path / "b.token")
    assert (refused.status, "FN-1406" in refused.err, (tmp_path / "b.token").exists()) == (1, True, False)
    existing = fanin(*words, path)
    assert existing.status == 2
    assert "exists, expected a new file" in existing.err


def test_the_first_token_is_replaced_in_its_file(fanin: Fanin, host: Hosted) -> None:
    path = host.state / "tokens" / "operator.token"
    name = json.loads(output(fanin, host, "token", "list", "--json"))["tokens"]
    (admin,) = [row["name"] for row in name if row["role"] == "admin"]
    before = path.read_text()
    refused = fanin("token", "rotate", "nobody", "--out", path, "--state", host.state)
    assert (refused.status, path.read_text()) == (1, before)
    output(fanin, host, "token", "rotate", admin, "--out", path)
    assert path.read_text() != before
    assert sorted(each.name for each in path.parent.iterdir()) == ["operator.token"]
    assert fanin("runs", "--state", host.state).status == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("token",), "usage: fanin token VERB"),
        (("token", "make"), "got 'make', expected one of create, list, rotate, revoke"),
        (("token", "create", "x"), "--role: got none, expected one of viewer, operator, admin, or --for-devices"),
        (("token", "create", "x", "--role", "root"), "--role: got 'root'"),
        (("token", "create", "x", "--role", "admin", "--for-devices"), "--role: got admin with --for-devices"),
        (("token", "create", "x", "--role", "admin", "--uses", "3"), "expected them for enrollment tokens alone"),
        (("token", "create", "a b", "--role", "admin"), "expected 1 to 128 letters"),
        (("token", "create", "x", "--for-devices", "--expires", "soon"), "--expires: got 'soon'"),
        (("token", "create", "x", "--for-devices", "--expires", "0d"), "got a lifetime of 0.0 s"),
        (("token", "create", "x", "--for-devices", "--tag", "site"), "--tag site: got no value"),
        (("token", "create", "x", "--for-devices", "--tag", "a=\x1b[2J"), "expected 1 to 128 printable characters"),
        (("device", "list", "--only", "asleep"), "--only: got 'asleep', expected one of banned"),
        (("device", "tag", "ab"), "tag: got none, expected NAME=VALUE or --remove NAME"),
        (("device", "label", "ab", "x\ny"), "expected 1 to 128 printable characters"),
        (("audit", "verify", "--head", "5a"), "got a digest of 2 characters"),
    ],
)
def test_wrong_usage_is_one_line_before_any_call(fanin: Fanin, words: tuple[str, ...], text: str) -> None:
    outcome = fanin(*words)
    assert outcome.status == 2
    assert text in outcome.err


def test_a_device_is_labelled_tagged_banned_and_removed(fanin: Fanin, host: Hosted, device: Peer) -> None:
    markup = '<script>alert("1")</script>'
    assert markup in output(fanin, host, "device", "label", device.device_id, markup)
    output(fanin, host, "device", "tag", device.device_id, "site=a", "ward=<3>")
    text = output(fanin, host, "device", "tag", device.device_id, "site=b", "--remove", "ward")
    assert "site=b" in text and "ward" not in text
    banned = output(fanin, host, "device", "ban", device.device_id, "--reason", "stolen")
    assert "stolen" in banned and "state          banned" in banned
    assert device.device_id in output(fanin, host, "device", "list", "--only", "banned", "--tag", "site=b")
    assert device.device_id not in output(fanin, host, "device", "list", "--only", "away")
    row = json.loads(output(fanin, host, "device", "show", device.device_id, "--json"))
    assert (row["label"], row["tags"], row["ban"]["reason"]) == (markup, {"site": "b"}, "stolen")
    assert "state          new" in output(fanin, host, "device", "unban", device.device_id)
    assert output(fanin, host, "device", "remove", device.device_id).startswith(f"device {device.device_id}: removed")
    gone = fanin("device", "show", device.device_id, "--state", host.state)
    assert (gone.status, "FN-1414" in gone.err) == (1, True)
    assert output(fanin, host, "device", "list").startswith("no devices; enroll one with")


def test_devices_are_listed_in_pages(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    bundle = f.bundle_in(tmp_path)
    ids = []
    for number in range(3):
        peer = Peer(host, bundle, number, tmp_path / f"device-{number}")
        with peer.transport() as transport:
            ids.append(transport.enroll(host.device_token))
    first = json.loads(output(fanin, host, "device", "list", "--limit", "2", "--json"))
    assert [row["device_id"] for row in first["devices"]] == sorted(ids)[:2]
    assert (first["next"], first["num_devices"]) == (sorted(ids)[1], 3)
    rest = json.loads(output(fanin, host, "device", "list", "--after", first["next"], "--json"))
    assert ([row["device_id"] for row in rest["devices"]], rest["next"]) == (sorted(ids)[2:], None)
    assert "more devices follow: --after" in output(fanin, host, "device", "list", "--limit", "1")


def test_every_change_is_in_the_audit_log_which_verifies_from_both_sides(
    fanin: Fanin, host: Hosted, device: Peer
) -> None:
    host.start_run(f.plan(), device.bundle, f.PUBLISHER)
    output(fanin, host, "pause", "run")
    assert fanin("resume", "run", "--rounds", "3", "--state", host.state).status == 0
    assert fanin("rollback", "run", "99", "--state", host.state).status == 1
    output(fanin, host, "device", "ban", device.device_id)
    output(fanin, host, "token", "create", "eve", "--role", "viewer")
    entries = json.loads(output(fanin, host, "audit", "list", "--json"))["entries"]
    rows = [(row["call"], row["outcome"]) for row in entries]
    for call in ("Enroll", "CreateToken", "ChangeDevice", "PutChunks"):
        assert (call, "done") in rows
    for call in ("PublishBundle", "PrepareRun", "StartRun", "Command"):
        assert rows.index((call, "begun")) < rows.index((call, "done"))
    (refused,) = [row for row in entries if row["outcome"].startswith("refused")]
    assert refused["subject"].startswith("run run: adopt ")
    assert {row["principal"].split()[0] for row in entries} == {"admin", "coordinator", "device"}
    text = output(fanin, host, "audit", "list", "--last", "2")
    assert f"device {device.device_id}: ban" in text and "token eve: viewer" in text
    head = text.split("head ")[1].strip()
    output(fanin, host, "device", "label", device.device_id, "later")
    remote = ("--server", host.address, "--ca", host.state / "tls" / "ca.pem")
    token = ("--token-file", host.state / "tokens" / "operator.token")
    for words in (("--state", host.state), (*remote, *token)):
        outcome = fanin("audit", "verify", *words, "--head", head)
        assert outcome.status == 0
        assert f"entry {len(entries)} is the given head" in outcome.out
        assert fanin("audit", "verify", *words, "--head", "ab" * 32).status == 1

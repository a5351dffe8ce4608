"""``fanin describe`` and ``fanin fetch``: the coordinator's record of a Run, and its Versions, over real gRPC."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line, usage_line
from support.errors import raises
from support.hosted import Hosted

from fanin.clients.operator import Operator
from fanin.clients.transport import Connection
from fanin.clients.versions import fetch_version
from fanin.commands.control.places import swap
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.tensors import decode_parameters
from fanin.protos.errors import FaninError, InvalidBundle, InvalidInput, InvalidVersion, NotFound
from fanin.protos.messages import (
    MAX_DESCRIBED_ROUNDS,
    MAX_LIVE_DEVICES,
    Command,
    Pause,
    RoundClosed,
    Stop,
    VersionWithBundle,
)

STRANGER = SigningKey(bytes(range(1, 33)))
NOBODY = 65534


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with a Run of three Rounds.

    The first Round is finished. In the second, one device has sent its Update, one is at work, and one place is free.
    """
    host = Hosted(tmp_path_factory.mktemp("described")).start()
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(num_rounds=3), bundle, f.PUBLISHER)
    devices = f.peers(host, bundle, host.folder)
    for device in devices:
        device.take_part()
    host.await_round("run", 2)
    for device in devices[:2]:
        device.begin()
    devices[0].upload(*devices[0].update())
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


def test_a_run_is_described_as_json_and_as_text(fanin: Fanin, host: Hosted) -> None:
    outcome = fanin("describe", "run", "--state", host.state, "--json")
    assert outcome.status == 0, outcome
    row = json.loads(outcome.out)
    device = f.peers(host, f.bundle_in(host.folder, f.SMALL_SHAPES), host.folder)[1]
    assert (row["run_id"], row["state"], row["version"], row["rounds"]) == ("run", "running", 1, 1)
    assert row["plan"]["cohort"] == {
        "concurrency": 3,
        "buffer": 3,
        "quorum": 3,
        "deadline_s": 300.0,
        "min_report_s": 1.0,
        "report_factor": 2.0,
        "max_extension_s": 0.0,
        "selection": "uniform",
        "selection_options": {},
    }
    assert row["plan"]["codec"] == {"name": "fixed32", "max_shift": 0, "options": {}}
    assert (row["num_devices"], row["num_at_work"], row["at_work"]) == (3, 1, [device.device_id])
    # The third device has not come yet. Its Assignment starts the clock.
    assert row["deadline_s"] == 0.0
    assert len(row["grid"]) == len(f.SMALL_SHAPES)
    second, first = row["last_rounds"]
    assert first.pop("opened_at_s") < second.pop("opened_at_s")
    for each in (first, second):
        assert (each.pop("training"), each.pop("flower")) == (row["plan"]["training"], row["plan"]["flower"])
    assert first == {"round": 1, "base_version": 0, "phase": "published", "num_updates": 3, "version": 1}
    assert second == {"round": 2, "base_version": 1, "phase": "selecting", "num_updates": 1, "version": 0}

    lines = fanin("describe", "run", "--state", host.state, "--rounds", "1").out.splitlines()
    assert lines[0] == "run run"
    assert "  state     running" in lines
    assert "  rounds    1 that ended in a version, of 3 planned" in lines
    assert f"            {device.device_id}" in lines
    assert lines[-1].startswith("  round 2: selecting, from version 1, 1 update, opened ")
    assert not any(line.startswith("  round 1:") for line in lines)


def test_the_devices_that_a_round_accepted_are_listed_in_their_order(host: Hosted) -> None:
    with host.operator() as operator:
        devices = tuple(operator.accepted_devices("run", 1))
        rounds = [entry.event for entry in islice(operator.watch("run"), 4) if isinstance(entry.event, RoundClosed)]
        assert [(event.round, event.num_accepted, event.accepted) for event in rounds] == [(1, f.NUM_DEVICES, devices)]
        # The second Round is open.
        assert list(operator.accepted_devices("run", 2)) == []
        with raises(NotFound, "run run: has no round 9"):
            list(operator.accepted_devices("run", 9))


def test_a_description_is_bounded(host: Hosted) -> None:
    with host.operator() as operator:
        assert operator.describe("run", 0).rounds == ()
        assert len(operator.describe("run", MAX_DESCRIBED_ROUNDS).rounds) == 2
        with raises(InvalidInput, "describe: got 1001 rounds, expected at most 1000"):
            operator.describe("run", MAX_DESCRIBED_ROUNDS + 1)


def test_a_paused_run_and_a_stopped_run_are_described(host: Hosted) -> None:
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER, run_id="other")
    host.await_round("other", 1)
    with host.operator() as operator:
        operator.command(Command(command_id="pause-it", run_id="other", what=Pause()))
        (paused_round,) = operator.describe("other").rounds
        operator.command(Command(command_id="stop-it", run_id="other", what=Stop()))
        description = operator.describe("other")
    assert (paused_round.phase, description.rounds[0].phase) == ("paused", "failed")
    assert (description.live.num_at_work, description.live.deadline_s) == (0, 0.0)


def test_at_most_a_hundred_devices_are_named(fanin: Fanin, tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    try:
        bundle = f.bundle_in(tmp_path, f.SMALL_SHAPES)
        host.start_run(f.plan(num_spare=MAX_LIVE_DEVICES), bundle, f.PUBLISHER)
        for device in f.peers(host, bundle, tmp_path, MAX_LIVE_DEVICES + 2):
            device.begin()
        with host.operator() as operator:
            description = operator.describe("run")
    finally:
        host.stop()
    assert (description.live.num_at_work, len(description.live.at_work)) == (MAX_LIVE_DEVICES + 2, MAX_LIVE_DEVICES)


def test_a_version_is_fetched_as_a_file_of_arrays(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    out = tmp_path / "version.npz"
    words = ("fetch", "run", "--state", host.state, "--out", out)
    outcome = fanin(*words)
    assert outcome.status == 0, outcome
    with host.operator() as operator:
        version = operator.version("run", 1).version
        flat = operator.parameters(version)
    assert outcome.out == f"version 1 of run run, {version.sha256}, verified, written to {out}\n"
    with np.load(out) as arrays:
        assert {name: arrays[name].shape for name in arrays} == f.SMALL_SHAPES
        assert np.concatenate([arrays[name].ravel() for name in sorted(f.SMALL_SHAPES)]).tobytes() == flat.tobytes()
    # A second fetch is no error, and writes nothing.
    mtime_ns = out.stat().st_mtime_ns
    row = json.loads(fanin(*words, "--json").out)
    assert (row["version"], row["version_sha256"], row["written"]) == (1, version.sha256, False)
    assert out.stat().st_mtime_ns == mtime_ns
    # Another Version replaces it only with ``--force``.
    message = one_line(fanin(*words, "--version", "0"), "fetch")
    assert message == (
        f"{out}: has another version or another file, which differs; replace it with --force, or name another --out"
    )
    assert out.stat().st_mtime_ns == mtime_ns
    assert json.loads(fanin(*words, "--version", "0", "--force", "--json").out)["written"] is True
    with np.load(out) as arrays:
        assert not any(arrays[name].any() for name in arrays)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_version_is_fetched_as_a_folder_with_its_bundle(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    out, key = tmp_path / "version", tmp_path / "publisher.pub"
    key.write_text(f.PUBLISHER.public)
    words = ("fetch", "run", "--state", host.state, "--out", out, "--version", "1")
    outcome = fanin(*words, "--bundle", "--publisher", key)
    assert outcome.status == 0, outcome
    facts = json.loads((out / "version.json").read_text())
    with host.operator() as operator:
        version = operator.version("run", 1).version
    assert (facts["version_sha256"], facts["signature"]) == (version.sha256, version.signature.hex())
    bundle = open_folder(out / "bundle", trusted=(f.PUBLISHER.public,))
    assert bundle.sha256 == facts["bundle_sha256"]
    assert all(bundle.artifact(name) for name in bundle.manifest.artifacts)
    table, flat = decode_parameters((out / "parameters").read_bytes())
    assert table == bundle.manifest.table
    assert flat.any()
    # A fetch without the Bundle finds the Version there already. A folder with a file of the user's is never replaced.
    assert fanin(*words).out.endswith(f"is there already: {out}\n")
    # Another Version of the Run replaces it only with ``--force``.
    other = ("fetch", "run", "--state", host.state, "--out", out, "--version", "0")
    message = f"{out}: has version 1 of run run, which differs; replace it with --force, or name another --out"
    assert one_line(fanin(*other), "fetch") == message
    forced = ("fetch", "run", "--state", host.state, "--out", out, "--version", "0", "--force")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for name in ("notes", ".hidden", "bundle/notes", "bundle/chunks/notes"):
        (out / name).write_text("mine")
        assert one_line(fanin(*forced), "fetch") == (
            f"{out}: something else is there, such as {out / name}; name another --out, or move it away"
        )
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    # The Bundle of the other Version is the same one, and stays.
    assert fanin(*forced).status == 0
    assert json.loads((out / "version.json").read_text())["version"] == 0
    assert open_folder(out / "bundle", trusted=(f.PUBLISHER.public,)).sha256 == bundle.sha256
    assert sorted(path.name for path in out.iterdir()) == ["bundle", "parameters", "version.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [key.name, out.name]


def test_a_folder_whose_replacement_was_killed_is_repaired(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    out = tmp_path / "version"
    words = ("fetch", "run", "--state", host.state, "--version", "0", "--out")
    assert fanin(*words, out).status == 0
    before = (out / "version.json").read_bytes()
    # Between the two renames, the old folder and the complete draft have names of their own.
    out.rename(tmp_path / ".version.0123abcd.old")
    assert fanin(*words, tmp_path / ".version.0123abcd.new").status == 0
    assert fanin(*words, out).out.endswith(f"is there already: {out}\n")
    assert (out / "version.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    # After the second rename, the new folder is there, too.
    assert fanin(*words, tmp_path / ".version.89abcdef.old").status == 0
    assert fanin(*words, out).status == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    # A folder with a file of the user's is never deleted.
    (tmp_path / ".version.89abcdef.old").mkdir()
    (tmp_path / ".version.89abcdef.old" / "notes").write_text("mine")
    assert fanin(*words, out).status == 0
    assert (tmp_path / ".version.89abcdef.old" / "notes").exists()


def test_a_folder_whose_replacement_fails_stays(tmp_path: Path) -> None:
    out = tmp_path / "version"
    out.mkdir()
    (out / "parameters").write_text("old")
    with pytest.raises(FileNotFoundError):
        swap(out, tmp_path / "missing", tmp_path / "aside")
    assert (out / "parameters").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fetch", "none", "--out", "x"), "run 'none': not found on this coordinator; fanin runs lists its runs"),
        (("fetch", "run", "--out", "x", "--version", "7"), "run run: has no version 7"),
        (("describe", "none"), "run 'none': not found on this coordinator; fanin runs lists its runs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_an_unknown_run_or_version_is_reported(
    fanin: Fanin, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one_line(fanin(*words, "--state", host.state), words[0]) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fetch", "run", "--out", "x.npz", "--bundle"), "--bundle: x.npz is a file, name a folder"),
        (("fetch", "run", "--out", "no/x"), "--out: no/x cannot be written, no is not a folder; create it"),
        (
            ("fetch", "run", "--onnx", "no/x.onnx"),
            "--onnx: no/x.onnx cannot be written, no is not a folder; create it",
        ),
        (
            ("fetch", "run", "--onnx", "new.onnx", "--tflite", "folder.tflite"),
            "--tflite: folder.tflite is a folder, name a file",
        ),
        (("fetch", "run", "--out", "folder.npz"), "--out: folder.npz is a folder, name a file"),
        (("fetch", "run", "--out", "file"), "--out: file is a file, name FILE.npz or a folder"),
        (
            ("evaluations", "run", "--csv", "no/x.csv"),
            "--csv: no/x.csv cannot be written, no is not a folder; create it",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_target_that_cannot_be_written_is_wrong_usage(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("folder.tflite", "folder.npz"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    assert usage_line(fanin(*words), words[0]) == message


@pytest.fixture
def without_rights(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in which the user may not write. As root, the real user is nobody meanwhile."""
    tmp_path.chmod(0o500)
    real, effective = os.getuid(), os.geteuid()
    if effective == 0:
        os.setreuid(NOBODY, effective)
    yield tmp_path
    os.setreuid(real, effective)
    tmp_path.chmod(0o700)


def test_a_target_in_a_folder_without_rights_is_wrong_usage(fanin: Fanin, without_rights: Path) -> None:
    target = without_rights / "x.npz"
    message = f"--out: {target} cannot be written, permission is denied in {without_rights}"
    assert usage_line(fanin("fetch", "run", "--out", target), "fetch") == message


def test_a_write_that_fails_names_the_target(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    target = tmp_path / f"{'x' * 250}.npz"
    message = one_line(fanin("fetch", "run", "--out", target, "--state", host.state), "fetch")
    assert message == f"{target}: File name too long"


class Forger(Operator):
    """An operator's client of a coordinator that changes its replies."""

    forgery = ""

    def version(self, run_id: str, number: int | None = None) -> VersionWithBundle:
        """Return another Version than the signed one."""
        reply = super().version(run_id, number)
        version = reply.version
        match self.forgery:
            case "signature":
                version = replace(version, signature=bytes(64))
            case "number":
                version = super().version(run_id, 0).version
            case "publisher":
                return replace(reply, bundle=replace(reply.bundle, public_key=STRANGER.public))
        return replace(reply, version=version)

    def chunk(self, sha256: str) -> bytes:
        """Return other bytes than those that the digest names."""
        data = super().chunk(sha256)
        return data[:-1] + bytes([data[-1] ^ 1]) if self.forgery == "bytes" else data


@pytest.mark.parametrize(
    ("forgery", "kind"),
    [("signature", InvalidVersion), ("number", InvalidVersion), ("publisher", InvalidBundle), ("bytes", InvalidInput)],
)
def test_a_forged_reply_is_never_fetched(host: Hosted, forgery: str, kind: type[FaninError]) -> None:
    with closing(Connection(host.address, host.ca)) as connection:
        forger = Forger(connection, host.operator_token)
        assert fetch_version(forger, "run", 1, f.PUBLISHER.public).version.number == 1
        forger.forgery = forgery
        with pytest.raises(kind):
            fetch_version(forger, "run", 1, f.PUBLISHER.public)


def test_without_an_evaluation_no_version_is_the_best(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    outcome = fanin("fetch", "run", "--state", host.state, "--out", tmp_path / "best.npz", "--best")
    assert outcome.status == 1
    assert outcome.err.startswith("fanin fetch: run run: got no evaluated version, expected at least one; its plan ")
    assert fanin("evaluations", "run", "--state", host.state).out == "run run has no evaluated version\n"

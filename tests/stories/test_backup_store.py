"""A backup in an object store: incremental, whole after an interruption, and verified before it is restored."""

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from support.staleness import send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.commands.care.backup import main, restore_main
from fanin.protos.errors import Conflict, Corrupted, FaninError
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.backup import back_up
from fanin.server.care.places import ObjectPlace, place_of
from fanin.server.folder import open_archive
from fanin.simulation import run_virtual

URL = "s3://care/coordinators/one"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A bucket of an S3 server on this machine, which the environment names."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    for name, value in {**variables, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield boto3.resource("s3").create_bucket(Bucket="care")
    server.stop()


async def a_round(folder: Path, *, is_first: bool) -> None:
    """Publish a Version."""
    place = open_place(folder)
    if is_first:
        await start(place.runs, bundle_in(folder), plan(concurrency=1, buffer=1, quorum=1, max_rounds=9))
    else:
        await place.runs.start()
    await send(place, "device-0")
    await settle()
    await place.runs.stop()


def versions(state: Path) -> int:
    """Return the number of Versions of a Run, which must have no problem."""
    verdicts = list(verify_run(open_archive(state), "run"))
    assert [each.problem for each in verdicts if each.problem] == []
    return len(verdicts)


def test_a_backup_in_s3_is_incremental_and_whole_after_an_interruption(
    tmp_path: Path, bucket: "object", capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    run_virtual(a_round(tmp_path, is_first=True))
    assert main([URL, "--state", str(state), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["num_new_files"] == first["num_files"] > 0
    assert main([URL, "--state", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_new_files"] == 0

    run_virtual(a_round(tmp_path, is_first=False))

    def interrupt(step: str) -> None:
        if step.startswith("files:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(state, place_of(URL), interrupt)
    assert restore_main([URL, "--state", str(tmp_path / "before"), "--was-stopped"]) == 0
    assert versions(tmp_path / "before") == 2
    assert main([URL, "--state", str(state)]) == 0
    assert restore_main([URL, "--state", str(tmp_path / "after"), "--was-stopped"]) == 0
    assert versions(tmp_path / "after") == 3
    # One database is left: the others were swept.
    store = place_of(URL)
    assert len([path for path in store.sizes() if path.startswith("database/")]) == 1


@pytest.mark.nightly
def test_a_damaged_object_is_found_before_the_target_appears(
    tmp_path: Path, bucket: "object", capsys: pytest.CaptureFixture[str]
) -> None:
    run_virtual(a_round(tmp_path, is_first=True))
    assert main([URL, "--state", str(tmp_path / "state")]) == 0
    store = place_of(URL)
    payload = next(path for path in store.sizes() if path.startswith("updates/"))
    store.write(payload, bytes(store.sizes()[payload]))
    with pytest.raises(Corrupted) as error:
        restore_main([URL, "--state", str(tmp_path / "new")])
    assert error.value.code == "FN-1442"
    assert not (tmp_path / "new").exists()
    assert main([URL, "--state", str(tmp_path / "state"), "--verify"]) == 0
    assert restore_main([URL, "--state", str(tmp_path / "new")]) == 0


@pytest.mark.nightly
def test_another_process_that_writes_the_same_backup_is_noticed_before_a_file_is_removed(
    tmp_path: Path, bucket: "object"
) -> None:
    class Contended(ObjectPlace):
        """A place whose manifest another process replaces."""

        def read(self, path: str) -> bytes | None:
            return b"{}"

        def remove(self, paths: list[str]) -> None:
            raise AssertionError("removed the files of another process")

    run_virtual(a_round(tmp_path, is_first=True))
    with pytest.raises(Conflict):
        back_up(tmp_path / "state", Contended(URL), lambda _: None)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        pytest.param("s3://missing/backup", "FN-1453", marks=pytest.mark.nightly),
        ("s3://", "FN-1449"),
        ("s3://key:secret@care/backup", "FN-1449"),
        ("nowhere://care/backup", "FN-1449"),
        ("file://host/backup", "FN-1449"),
    ],
)
def test_a_url_that_cannot_hold_a_backup_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, url: str, code: str
) -> None:
    if code == "FN-1453":
        request.getfixturevalue("bucket")
        run_virtual(a_round(tmp_path, is_first=True))
    with pytest.raises(FaninError) as error:
        back_up(tmp_path / "state", place_of(url), lambda _: None)
    assert error.value.code == code
    assert "secret" not in str(error.value)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    run_virtual(a_round(tmp_path, is_first=True))
    (tmp_path / "with space").mkdir()
    url = (tmp_path / "with space" / "backup").as_uri()
    assert main([url, "--state", str(tmp_path / "state")]) == 0
    assert (tmp_path / "with space" / "backup" / "manifest.json").is_file()
    assert restore_main([url, "--state", str(tmp_path / "new"), "--was-stopped"]) == 0
    assert versions(tmp_path / "new") == 2

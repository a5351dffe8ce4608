"""A backup of a coordinator that serves, and a restore after its devices have seen later Versions, with processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Site

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, RunState, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.server.aggregation.verify import verify_run
from fanin.server.care.backup import back_up as write_backup
from fanin.server.care.places import place_of
from fanin.server.folder import open_archive
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=1, buffer=1, quorum=1, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(),
    stop=StopPlan(max_rounds=2),
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator with a Run of two Rounds, and one device."""
    place = Site(tmp_path)
    yield place
    place.close()


def fanin(site: Site, *words: str, status: int = 0) -> str:
    """Run a command and return all that it prints."""
    (site.folder / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    command = [sys.executable, "-m", "fanin.commands.main", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=site.folder)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def begin(site: Site, plan: Plan = PLAN) -> None:
    """Serve, start the Run and a device."""
    site.serve()
    site.start_run(plan, synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (3, 5)}), PUBLISHER)
    site.device(0)


def back_up(site: Site) -> dict[str, object]:
    """Back up, and return the row of the command."""
    row: dict[str, object] = json.loads(fanin(site, "backup", "backup", "--state", "state", "--json"))
    return row


def problems(state: Path) -> list[str]:
    """Verify the Run of a folder."""
    verdicts = list(verify_run(open_archive(state), "run"))
    assert verdicts
    return [verdict.problem for verdict in verdicts if verdict.problem]


def test_devices_that_saw_later_versions_continue_after_a_restore(site: Site) -> None:
    begin(site)
    site.events()
    assert back_up(site)["newest"] == {"run": [1, 2]}
    fanin(site, "resume", "run", "--rounds", "3", "--state", "state")
    site.events()
    site.started[0].kill()
    shutil.rmtree(site.state)

    text = fanin(site, "restore", "backup", "--state", "state")
    assert "fanin reclaim run --key publisher.key" in text
    assert problems(site.state) == []
    for words in (("describe", "run"), ("reclaim", "run", "--key", "publisher.key"), ("token", "list")):
        text = fanin(site, *words, "--state", "state", status=1)
        assert "[FN-1497]" in text and "fanin serve --state state" in text
    site.serve()
    with site.operator() as operator:
        info = operator.run("run")
    assert info.version == 2
    assert info.reason.endswith("waits for its publisher: fanin reclaim run --key publisher.key, then fanin resume run")
    # A device that knows nothing must not get what is stale.
    assert "FN-1445" in fanin(site, "resume", "run", "--rounds", "1", "--state", "state", status=1)
    fanin(site, "reclaim", "run", "--key", "publisher.key", "--rounds", "2", "--state", "state")
    assert site.events()
    with site.operator() as operator:
        info = operator.run("run")
    assert (info.state, info.epoch, info.version) == (RunState.FINISHED, 2, 5)
    assert json.loads((site.folder / "device-0" / "seen.json").read_text())["run"] == [2, 4]
    assert problems(site.state) == []


@pytest.mark.nightly
def test_a_backup_during_rounds_is_whole_and_a_repeated_one_copies_what_is_new(site: Site) -> None:
    begin(site, replace(PLAN, stop=StopPlan(max_rounds=5000)))
    rows = [back_up(site) for _ in range(3)]
    assert rows[0]["lost"] == rows[1]["lost"] == rows[2]["lost"] == []
    fanin(site, "restore", "backup", "--state", "other")
    assert problems(site.folder / "other") == []
    fanin(site, "pause", "run", "--state", "state")
    back_up(site)
    assert back_up(site)["num_new_files"] == 0
    # The folder is as the last manifest says: nothing else is left in it.
    stored = {str(path.relative_to(site.folder / "backup")) for path in (site.folder / "backup").rglob("*.db")}
    assert len(stored) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_an_interrupted_backup_is_never_taken_for_a_whole_one(site: Site, is_first: bool) -> None:
    begin(site)
    site.events()
    if not is_first:
        back_up(site)
        fanin(site, "resume", "run", "--rounds", "1", "--state", "state")
        site.events()

    def kill(step: str) -> None:
        # All files are copied, and only the manifest is missing.
        if step.startswith("files"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_backup(site.state, place_of(str(site.folder / "backup")), kill)
    if is_first:
        assert "[FN-1442]" in fanin(site, "restore", "backup", "--state", "other", status=1)
    else:
        fanin(site, "restore", "backup", "--state", "other")
        assert len(list(verify_run(open_archive(site.folder / "other"), "run"))) == 3
        assert problems(site.folder / "other") == []
    assert back_up(site)["newest"] == {"run": [1, 2 if is_first else 3]}


def test_what_is_no_backup_or_is_damaged_or_is_in_the_way_is_refused(site: Site) -> None:
    begin(site)
    site.events()
    back_up(site)
    folder = site.folder / "backup"

    def refused(code: str, *words: str) -> None:
        assert f"[{code}]" in fanin(site, *words, status=1)

    refused("FN-1443", "restore", "backup", "--state", "state")
    refused("FN-1442", "restore", "bundle", "--state", "new")
    refused("FN-1449", "backup", "bundle", "--state", "state")
    refused("FN-1449", "backup", "state/backup", "--state", "state")
    refused("FN-1449", "backup", "s3://", "--state", "state")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "form": "9999"}))
    refused("FN-1444", "restore", "backup", "--state", "new")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    payload = next(folder.glob("updates/*/*/*"))
    payload.write_bytes(bytes(payload.stat().st_size))
    refused("FN-1442", "restore", "backup", "--state", "new")
    assert not (site.folder / "new").exists()
    assert sorted(path.name for path in site.folder.glob(".new*")) == []

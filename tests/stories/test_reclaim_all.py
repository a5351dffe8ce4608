"""A publisher takes back all its Runs that wait since a restore, by one command."""

import json
from pathlib import Path

import pytest
from support.processes import Site

from fanin.clients.administrator import Administrator
from fanin.commands.care.backup import main as backup
from fanin.commands.care.backup import restore_main as restore
from fanin.commands.control.lifecycle import reclaim, resume
from fanin.commands.control.runs import main as runs
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.simulation import synthetic_bundle

PUBLISHERS = SigningKey(bytes(range(32))), SigningKey(bytes(range(1, 33)))
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=1, buffer=1, quorum=1, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(),
    stop=StopPlan(max_rounds=2),
)


def test_a_publisher_reclaims_all_its_restored_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path)
    state = ["--state", str(site.state)]
    key = tmp_path / "publisher.key"
    key.write_text(PUBLISHERS[0].private_bytes().hex())

    def rows(*words: str) -> dict[str, dict[str, object]]:
        assert runs([*state, "--json", *words]) == 0
        return {row["run_id"]: row for row in json.loads(capsys.readouterr().out)["runs"]}

    try:
        served = site.serve()
        with site.operator() as operator:
            for index, publisher in enumerate(PUBLISHERS):
                bundle = synthetic_bundle(tmp_path / f"bundle-{index}", publisher, {"a": (3, 5 + index)})
                operator.publish_bundle(bundle)
                for name in ("k1", "k2") if index == 0 else ("other",):
                    operator.start_run(name, PLAN, bundle, publisher)
        assert backup([str(tmp_path / "backup"), *state, "--quiet"]) == 0
        served.kill()
        site.state.rename(tmp_path / "lost")
        assert restore([str(tmp_path / "backup"), *state, "--quiet"]) == 0
        assert "fanin reclaim --all --key publisher.key" in capsys.readouterr().out
        site.serve()
        assert {name for name, row in rows().items() if row["waits_for_publisher"]} == {"k1", "k2", "other"}

        assert reclaim(["--all", "--key", str(key), *state]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" (")[0] for line in lines[:2]] == ["run k1 is paused", "run k2 is paused"]
        assert lines[2].startswith("not reclaimed: run other: ") and len(lines) == 3
        after = rows()
        assert [after[name]["waits_for_publisher"] for name in ("k1", "k2", "other")] == [False, False, True]
        for name in ("k1", "k2"):
            assert "fanin resume " + name in str(after[name]["reason"])
            assert "fanin reclaim" not in str(after[name]["reason"])
        assert resume(["k1", *state]) == 0
        capsys.readouterr()
        assert rows()["k1"]["reason"] == ""
        assert [*rows("--only", "running,failed")] == ["k1"]
        assert [*rows("--last", "2")] == ["k2", "other"]
        assert [*rows("--only", "paused", "--last", "1")] == ["other"]
        assert runs([*state, "--only", "finished"]) == 0
        assert capsys.readouterr().out == "no runs are finished\n"
        assert runs([*state, "--only", "finishd"]) != 0
        assert "FN-1008" in capsys.readouterr().err

        # A repeated command changes nothing, and says so of the publisher's Runs.
        assert reclaim(["--all", "--key", str(key), "--json", *state]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["runs"] == [] and row["not_reclaimed"]["other"]["code"] == "FN-1015"
        token = (site.state / "tokens" / "operator.token").read_text()
        with Administrator.connect(site.address, site.ca, token) as administrator:
            entries = administrator.audit_page().entries
        done = [entry.subject for entry in entries if (entry.call, entry.outcome) == ("ReclaimRun", "done")]
        assert done == ["run k1: epoch 2", "run k2: epoch 2"]
        for words in ([], ["k1", "--all"]):
            assert reclaim([*words, "--key", str(key), *state]) != 0
            assert "FN-1471" in capsys.readouterr().err
    finally:
        site.close()

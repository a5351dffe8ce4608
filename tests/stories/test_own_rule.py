"""A rule from outside the package: the median of docs/rules.md, installed as a distribution of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT

PAGE = (ROOT / "docs" / "rules.md").read_text()
RUN = """
import json, sys
from pathlib import Path
from fanin.clients.planfile import parse_plan
from fanin.clients.testing import Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Scenario, simulate

folder, rule, liar_scale = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
plan = f'''
name = "own"
bundle = "bundle"
cohort = {{ concurrency = 5, deadline_s = 86400.0 }}
training = {{ learning_rate = 0.1, seed = 7 }}
aggregation = {{ rule = "{rule}", trim = 0.2 }}
stop = {{ max_rounds = 3 }}
'''
publisher = SigningKey.generate()
members = tuple(
    Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i, scale=liar_scale if i == 4 else 0.01))
    for i in range(5)
)
bundle = synthetic_bundle(folder / "bundle", publisher, {"weight": (300, 10), "bias": (10,)})
outcome = simulate(
    Scenario(plan=parse_plan(plan, "own").plan, bundle=bundle, publisher=publisher, members=members, seed=1,
             stops_s=(40.0, 90.0)),
    folder,
)
archive = open_archive(folder / "state")
verdicts = [(verdict.version, verdict.num_updates, verdict.problem) for verdict in verify_run(archive, "run")]
print(json.dumps({"digests": outcome.digests, "verdicts": verdicts}))
"""


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution, as pip would leave it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "median_rule.py").write_text(python_blocks()[0])
    info = folder / "median_rule-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: median-rule\nVersion: 1.0\n")
    (entry,) = re.findall(r'^\[project.entry-points."fanin.rules"\]\n(median = ".*")$', PAGE, re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[fanin.rules]\n{entry.replace(chr(34), '')}\n")
    return folder


def run(site: Path, code: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(site: Path) -> None:
    rule, check = python_blocks()
    assert len(rule.splitlines()) < 40
    done = run(site, check)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_with_an_installed_rule_is_verified(site: Path, tmp_path: Path) -> None:
    done = run(site, RUN, tmp_path, "median", 0.01)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["verdicts"] == [[0, 0, ""], [1, 5, ""], [2, 5, ""], [3, 5, ""]]
    again = run(site, RUN, tmp_path / "mean", "weighted_mean", 0.01)
    assert json.loads(again.stdout)["digests"][1:] != outcome["digests"][1:]


def test_without_the_package_the_run_does_not_start(tmp_path: Path) -> None:
    done = run(tmp_path / "empty", RUN, tmp_path, "median", 0.01)
    assert done.returncode != 0
    assert (
        "InvalidPlan: plan: aggregation.rule: got 'median', expected one of ['trimmed_mean', 'weighted_mean'], the "
        "rules that are installed at the coordinator" in done.stderr
    )

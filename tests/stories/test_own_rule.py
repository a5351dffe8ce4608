"""Rules, optimizers and selection policies from outside the package, as the pages on them in docs have them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT

RULES, OUTER, SELECTION = ((ROOT / "docs" / name).read_text() for name in ("rules.md", "outer.md", "selection.md"))
RUN = """
import json, sys
from pathlib import Path
from fanin.clients.planfile import parse_plan
from fanin.clients.testing import Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Scenario, simulate

folder, rule, optimizer = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
plan = f'''
name = "own"
bundle = "bundle"
cohort = {{ concurrency = 5, deadline_s = 86400.0 }}
training = {{ learning_rate = 0.1, seed = 7 }}
aggregation = {{ rule = "{rule}", outer_optimizer = "{optimizer}" }}
stop = {{ max_rounds = 3 }}
'''
publisher = SigningKey.generate()
members = tuple(
    Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i))
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

RUN_SELECTION = """
import json, sys
from pathlib import Path
from fanin.clients.planfile import parse_plan
from fanin.clients.testing import Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.control import RoundClosed
from fanin.simulation import Scenario, simulate

folder = Path(sys.argv[1])
plan = f'''
name = "own"
bundle = "bundle"
cohort = {{ concurrency = 2, selection = "{sys.argv[2]}" }}
training = {{ learning_rate = 0.1 }}
stop = {{ max_rounds = 4 }}
'''
publisher = SigningKey.generate()
members = tuple(Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i)) for i in range(9))
bundle = synthetic_bundle(folder / "bundle", publisher, {"weight": (300, 10), "bias": (10,)})
outcome = simulate(
    Scenario(plan=parse_plan(plan, "own").plan, bundle=bundle, publisher=publisher, members=members, seed=1), folder
)
closed = [logged.event for logged in outcome.events if isinstance(logged.event, RoundClosed)]
print(json.dumps([device for event in closed for device in event.accepted]))
"""


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def install(folder: Path, page: str, group: str) -> None:
    """Write the distribution of a page's example to a folder, as pip would."""
    ((name, value),) = re.findall(rf'^\[project.entry-points."{group}"\]\n(\w+) = "(.*)"$', page, re.MULTILINE)
    module = value.split(":")[0]
    (folder / f"{module}.py").write_text(python_blocks(page)[0])
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distributions."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, RULES, "fanin.rules")
    install(folder, OUTER, "fanin.outer_optimizers")
    install(folder, SELECTION, "fanin.selection_policies")
    return folder


def run(site: Path, code: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", [RULES, OUTER, SELECTION], ids=["rule", "optimizer", "policy"])
def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(site: Path, page: str) -> None:
    example, check = python_blocks(page)
    assert len(example.splitlines()) < 40
    done = run(site, check)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("rule", "optimizer"), [("median", "fedavg"), ("weighted_mean", "lion"), ("median", "lion")])
def test_a_run_with_what_is_installed_is_verified(site: Path, tmp_path: Path, rule: str, optimizer: str) -> None:
    done = run(site, RUN, tmp_path / "own", rule, optimizer)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["verdicts"] == [[0, 0, ""], [1, 5, ""], [2, 5, ""], [3, 5, ""]]
    plain = json.loads(run(site, RUN, tmp_path / "plain", "weighted_mean", "fedavg").stdout)
    assert not set(outcome["digests"][1:]) & set(plain["digests"])


def test_an_installed_policy_selects_the_devices_of_each_round(site: Path, tmp_path: Path) -> None:
    done = run(site, RUN_SELECTION, tmp_path / "own", "rested")
    assert done.returncode == 0, done.stderr
    accepted = json.loads(done.stdout)
    assert len(accepted) == len(set(accepted)) == 8
    uniform = json.loads(run(site, RUN_SELECTION, tmp_path / "plain", "uniform").stdout)
    assert len(set(uniform)) < 8


def test_without_the_package_of_a_policy_the_run_does_not_start(tmp_path: Path) -> None:
    done = run(tmp_path / "empty", RUN_SELECTION, tmp_path, "rested")
    assert done.returncode != 0
    error = "InvalidPlan: plan: cohort.selection: got 'rested', expected one of ['least_recent', 'uniform']"
    assert error in done.stderr


@pytest.mark.parametrize(
    ("rule", "optimizer", "error"),
    [
        ("median", "fedavg", "aggregation.rule: got 'median', expected one of ['trimmed_mean', 'weighted_mean']"),
        (
            "weighted_mean",
            "lion",
            "aggregation.outer_optimizer: got 'lion', expected one of ['fedavg', 'nesterov']",
        ),
    ],
)
def test_without_the_package_the_run_does_not_start(tmp_path: Path, rule: str, optimizer: str, error: str) -> None:
    done = run(tmp_path / "empty", RUN, tmp_path, rule, optimizer)
    assert done.returncode != 0
    assert f"InvalidPlan: plan: {error}, which are installed here" in done.stderr

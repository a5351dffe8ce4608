"""The rules, optimizers, stages and selection policies of the docs, from outside the package."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from house.tree import ROOT
from parallel.programs import Programs
from support.nightly import in_ci
from support.outside import install, python_blocks

from fanin.server.aggregation import rules

RULES, OUTER, SELECTION, STAGES = (
    (ROOT / "docs" / "howto" / f"{name}.md").read_text() for name in ("rules", "outer", "selection", "stages")
)
RUN = """
import json, sys
from pathlib import Path
from fanin.clients.planfile import parse_plan
from fanin.simulation import Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Scenario, play

folder, rule, optimizer = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
stages = "".join(f"[[stages]]\\nname = '{name}'\\noptions = {{share = 0.1}}\\n" for name in sys.argv[4:])
plan = f'''
name = "own"
bundle = "bundle"
cohort = {{ concurrency = 5, quorum = 5, deadline_s = 86400.0 }}
training = {{ learning_rate = 0.1, seed = 7 }}
aggregation = {{ rule = "{rule}", outer_optimizer = "{optimizer}" }}
stop = {{ max_rounds = 3 }}
{stages}'''
publisher = SigningKey.generate()
members = tuple(
    Member(device=f"device-{i}", trainer=SyntheticTrainer(partition=i))
    for i in range(5)
)
bundle = synthetic_bundle(folder / "bundle", publisher, {"weight": (300, 10), "bias": (10,)})
outcome = play(
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
from fanin.simulation import Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import RoundClosed
from fanin.simulation import Scenario, play

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
outcome = play(
    Scenario(plan=parse_plan(plan, "own").plan, bundle=bundle, publisher=publisher, members=members, seed=1), folder
)
closed = [logged.event for logged in outcome.events if isinstance(logged.event, RoundClosed)]
print(json.dumps([device for event in closed for device in event.accepted]))
"""

KNOWN_STAGES = """
import sys
from fanin.edge.codecs.known import known_stages

print(*known_stages(), "importlib.metadata" in sys.modules)
"""
UPDATES = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from fanin.clients.device.updates import Change, apply_stages, begin_stages, state_label
from fanin.clients.device.contract import example_assignment, example_model
from fanin.simulation import synthetic_bundle
from fanin.simulation.federation.memory import MemoryStates
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.codecs.stages import stages_of
from fanin.protos import messages as m

bundle = synthetic_bundle(Path(sys.argv[1]), SigningKey.generate(), {"weight": (100, 10)})
stored, first = MemoryStates(), example_assignment(bundle)
specs = (m.StageSpec(name="random_share", options={"share": 0.1}),)
shares, sums, changes, repeats = [], np.zeros(1000), np.zeros(1000), []
for number in range(1, 6):
    work = replace(first, round=number, stages=specs, state=m.StageState(round=number - 1))
    values = np.random.default_rng(number).normal(0.0, 0.1, 1000).astype(np.float32)
    change = Change(values=values, counts={m.EXAMPLES: 1}, num_steps=1)
    updates = [
        apply_stages(work, change, begin_stages(work, stages_of(specs), example_model(bundle), stored))
        for _ in range(2)
    ]
    repeats.append(updates[0].encoded == updates[1].encoded)
    stored.put(state_label(work, number), updates[0].states)
    sent = np.frombuffer(updates[0].encoded.payload, "<i4") * 2.0 ** (work.grid[0] + updates[0].encoded.shifts[0])
    shares.append(int(np.count_nonzero(sent)))
    sums, changes = sums + sent, changes + values
error = np.abs(sums + updates[0].states["random_share"]["residual"] - changes).max()
print(json.dumps({"shares": shares, "repeats": repeats, "error": float(error)}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distributions."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, RULES, "fanin.rules")
    install(folder, OUTER, "fanin.outer_optimizers")
    install(folder, SELECTION, "fanin.selection_policies")
    install(folder, STAGES, "fanin.stages")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(programs: Programs) -> Run:
    """A function that runs code with its arguments in a process that has the distributions of a folder."""
    return lambda site, code, *words: programs.script(code, *words, site=site)


@pytest.fixture(scope="module")
def plain_digests(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> set[str]:
    """The digests of the Versions of the Run that uses none of the distributions."""
    completed = programs.script(RUN, tmp_path_factory.mktemp("plain"), "weighted_mean", "fedavg")
    return set(json.loads(completed.stdout)["digests"])


@pytest.mark.parametrize("page", [RULES, OUTER, SELECTION, STAGES], ids=["rule", "optimizer", "policy", "stage"])
def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(run: Run, site: Path, page: str) -> None:
    # A page may use the example between these two blocks.
    example, *_, check = python_blocks(page)
    assert len(example.splitlines()) < 40
    completed = run(site, check)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_the_example_of_a_rule_that_adds_up_keeps_the_contract(run: Run, tmp_path: Path) -> None:
    _, example, check = python_blocks(RULES)
    assert len(example.splitlines()) < 40
    check = check.replace("from midmean_rule import Midmean\n", example).replace("Midmean()", "EqualMean()")
    completed = run(tmp_path, check)
    assert (completed.returncode, completed.stderr) == (0, "")


# CI has the rule and the optimizer together. The nightly suite also has each by itself.
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        ("midmean", "lion"),
        pytest.param("midmean", "fedavg", marks=pytest.mark.nightly),
        pytest.param("weighted_mean", "lion", marks=pytest.mark.nightly),
    ],
)
def test_a_run_with_installed_distributions_is_verified(
    run: Run, site: Path, tmp_path: Path, plain_digests: set[str], rule: str, optimizer: str
) -> None:
    completed = run(site, RUN, tmp_path / "own", rule, optimizer)
    assert completed.returncode == 0, completed.stderr
    outcome = json.loads(completed.stdout)
    assert outcome["verdicts"] == [[0, 0, ""], [1, 5, ""], [2, 5, ""], [3, 5, ""]]
    assert not set(outcome["digests"][1:]) & plain_digests


def test_an_installed_policy_selects_the_devices_of_each_round(run: Run, site: Path, tmp_path: Path) -> None:
    completed = run(site, RUN_SELECTION, tmp_path / "own", "rested")
    assert completed.returncode == 0, completed.stderr
    devices = json.loads(completed.stdout)
    assert len(devices) == len(set(devices)) == 8
    uniform_devices = json.loads(run(site, RUN_SELECTION, tmp_path / "plain", "uniform").stdout)
    assert len(set(uniform_devices)) < 8


def test_without_the_package_of_a_policy_the_run_does_not_start(run: Run, tmp_path: Path) -> None:
    completed = run(tmp_path / "empty", RUN_SELECTION, tmp_path, "rested")
    assert completed.returncode != 0
    error = "InvalidPlan: plan: cohort.selection: got 'rested', expected one of ['least_recent', 'uniform']"
    assert error in completed.stderr


@pytest.mark.parametrize(
    ("rule", "optimizer", "error"),
    [
        (
            "midmean",
            "fedavg",
            f"aggregation.rule: got 'midmean', expected one of {sorted(rules.RULES)}",
        ),
        (
            "weighted_mean",
            "lion",
            (
                "aggregation.outer_optimizer: got 'lion', expected one of ['fedadagrad', 'fedadam', 'fedavg', "
                "'fedavgm', 'feddyn', 'fedyogi', 'nesterov']"
            ),
        ),
    ],
)
def test_without_the_package_the_run_does_not_start(
    run: Run, tmp_path: Path, rule: str, optimizer: str, error: str
) -> None:
    completed = run(tmp_path / "empty", RUN, tmp_path, rule, optimizer)
    assert completed.returncode != 0
    assert f"InvalidPlan: plan: {error}, which are installed here" in completed.stderr


def test_a_device_names_an_installed_stage_and_loads_no_parser_without_one(site: Path, tmp_path: Path) -> None:
    # New interpreters: a fork has loaded the parser.
    for path, stages in (
        (site, "error_feedback evaluate_only feddyn fednova qfedavg scaffold random_share True"),
        (tmp_path, "error_feedback evaluate_only feddyn fednova qfedavg scaffold False"),
    ):
        environment = os.environ | {"PYTHONPATH": str(path)}
        command = [sys.executable, "-c", KNOWN_STAGES]
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert completed.stdout == f"{stages}\n"


def test_an_installed_stage_sends_its_share_and_keeps_the_rest(run: Run, site: Path, tmp_path: Path) -> None:
    completed = run(site, UPDATES, tmp_path / "bundle")
    assert (completed.returncode, completed.stderr) == (0, "")
    outcome = json.loads(completed.stdout)
    # The share is 0.1 of 1000 values, with a standard deviation of 9.5.
    assert all(60 <= share <= 140 for share in outcome["shares"])
    assert len(set(outcome["shares"])) > 1
    assert outcome["repeats"] == [True] * 5
    assert outcome["error"] < 1e-5


def test_a_run_with_an_installed_stage_is_verified(
    run: Run, site: Path, tmp_path: Path, plain_digests: set[str]
) -> None:
    completed = run(site, RUN, tmp_path / "own", "weighted_mean", "fedavg", "random_share")
    assert (completed.returncode, completed.stderr) == (0, "")
    outcome = json.loads(completed.stdout)
    assert outcome["verdicts"] == [[0, 0, ""], [1, 5, ""], [2, 5, ""], [3, 5, ""]]
    assert not set(outcome["digests"][1:]) & plain_digests


def test_a_run_with_a_stage_that_is_not_installed_does_not_start(run: Run, tmp_path: Path) -> None:
    completed = run(tmp_path / "empty", RUN, tmp_path, "weighted_mean", "fedavg", "random_share")
    assert completed.returncode != 0
    assert (
        "InvalidPlan: plan: stages: got 'random_share', expected one of ['error_feedback', 'evaluate_only', 'feddyn', "
        "'fednova', 'qfedavg', 'scaffold'], which are installed here"
    ) in completed.stderr


@pytest.mark.parametrize("share", in_ci(("0.0", "1.5", "-1.0"), ("0.0",)))
def test_the_example_of_a_stage_refuses_a_share_out_of_range(run: Run, site: Path, tmp_path: Path, share: str) -> None:
    completed = run(
        site, RUN.replace("0.1}}", f"{share}}}}}"), tmp_path / "own", "weighted_mean", "fedavg", "random_share"
    )
    assert completed.returncode != 0
    error = f"InvalidPlan: plan: stages: random_share: options.share: got {share}, expected a number above 0 and at "
    error += "most 1; correct it\n"
    assert error in completed.stderr

"""The codec of the docs, from outside the package: a Run with it, its options, and a codec that breaks its contract."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from house.tree import ROOT
from parallel.programs import Programs
from support.outside import file_block, install, install_module, python_blocks

PAGE = (ROOT / "docs" / "howto" / "codecs.md").read_text()
RUN = """
import json, sys
from pathlib import Path
from fanin.clients.planfile import parse_plan
from fanin.simulation.federation.member import Member
from fanin.simulation.federation.synthetic import SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import RoundFailed, VersionPublished
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Scenario, play

folder, codec = Path(sys.argv[1]), sys.argv[2]
plan = f'''
name = "own"
bundle = "bundle"
cohort = {{ concurrency = 5, quorum = 5, deadline_s = 600.0 }}
training = {{ learning_rate = 0.1, seed = 7 }}
aggregation = {{ {sys.argv[3]} }}
stop = {{ max_rounds = 3 }}
codec = {{ name = "levels", max_shift = 12, options = {{ {codec} }} }}
'''
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
events = [logged.event for logged in outcome.events]
archive = open_archive(folder / "state")
print(json.dumps({
    "verdicts": [(verdict.version, verdict.num_updates, verdict.problem) for verdict in verify_run(archive, "run")],
    "bytes": [event.bytes_up for event in events if isinstance(event, VersionPublished) and event.round],
    "failures": [event.reason for event in events if isinstance(event, RoundFailed)],
}))
"""
KNOWN = """
import sys
from fanin.edge.codecs.known import known_codecs

print(*known_codecs(), "importlib.metadata" in sys.modules)
"""
SUM = 'rule = "weighted_mean"'
COLUMNS = 'rule = "trimmed_mean", rule_options = { trim = 0.2 }'
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution of the page."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, PAGE, "fanin.codecs")
    return folder


@pytest.fixture
def run(programs: Programs) -> Run:
    """A function that runs code with its arguments in a process that has the distributions of a folder."""
    return lambda site, code, *words: programs.script(code, *words, site=site)


def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(run: Run, site: Path) -> None:
    example, check = python_blocks(PAGE)
    assert len(example.splitlines()) < 40
    completed = run(site, check)
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.parametrize("rule", [SUM, COLUMNS], ids=["sum", "columns"])
def test_a_run_with_an_installed_codec_is_verified(run: Run, site: Path, tmp_path: Path, rule: str) -> None:
    completed = run(site, RUN, tmp_path, "largest = 15", rule)
    assert completed.returncode == 0, completed.stderr
    outcome = json.loads(completed.stdout)
    assert outcome["verdicts"] == [[0, 0, ""], [1, 5, ""], [2, 5, ""], [3, 5, ""]]
    # Five devices send 3,010 values of a byte each, and their headers.
    assert all(5 * 3010 < size < 2 * 5 * 3010 for size in outcome["bytes"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("largst = 15", "codec.options.largst: unknown option, expected largest; did you mean largest?"),
        ("largest = 128", "codec.options.largest: got 128, expected an integer from 1 to 127; correct it"),
    ],
)
def test_a_wrong_option_of_an_installed_codec_does_not_start_the_run(
    run: Run, site: Path, tmp_path: Path, options: str, text: str
) -> None:
    completed = run(site, RUN, tmp_path, options, SUM)
    assert completed.returncode != 0
    assert f"InvalidPlan: plan: {text}\n" in completed.stderr


def test_without_the_package_the_run_does_not_start(run: Run, tmp_path: Path) -> None:
    completed = run(tmp_path / "empty", RUN, tmp_path, "", SUM)
    assert completed.returncode != 0
    error = "plan: codec.name: got 'levels', expected one of ['fixed32', 'int16', 'int4', 'int8', 'topk'], which are"
    assert f"InvalidPlan: {error} installed here" in completed.stderr


BROKEN = {
    "bits": ("bits = 8", "bits = 12", "plan: codec.name: 'levels': bits: got 12, expected 4, 8, 16 or 32"),
    "no codec": (
        "return Levels(largest)",
        "return None",
        "plan: codec.name: 'levels': got NoneType, expected an object",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_function_that_returns_no_codec_does_not_start_the_run(run: Run, tmp_path: Path, fault: str) -> None:
    old, new, text = BROKEN[fault]
    (site := tmp_path / "site").mkdir()
    source = file_block(PAGE, "levels_codec.py").replace(old, new)
    install_module(site, ("levels", "levels_codec:levels"), source, "fanin.codecs")
    completed = run(site, RUN, tmp_path, "", SUM)
    assert completed.returncode != 0
    assert f"InvalidPlan: {text}" in completed.stderr


@pytest.mark.parametrize("rule", [SUM, COLUMNS], ids=["sum", "columns"])
def test_a_codec_that_decodes_wrongly_fails_the_round_with_its_name(run: Run, tmp_path: Path, rule: str) -> None:
    (site := tmp_path / "site").mkdir()
    source = file_block(PAGE, "levels_codec.py").replace(
        'return np.frombuffer(payload, "<i1")', 'return np.frombuffer(payload, "<i1") * 1.0'
    )
    install_module(site, ("levels", "levels_codec:levels"), source, "fanin.codecs")
    completed = run(site, RUN, tmp_path, "", rule)
    assert completed.returncode == 0, completed.stderr
    failures = json.loads(completed.stdout)["failures"]
    assert failures and all("codec Levels: decode returned float64 " in text for text in failures), failures


def test_a_device_names_an_installed_codec_and_loads_no_parser_without_one(site: Path, tmp_path: Path) -> None:
    # New interpreters: a fork has loaded the parser.
    for path, codecs in (
        (site, "fixed32 int16 int4 int8 topk levels True"),
        (tmp_path, "fixed32 int16 int4 int8 topk False"),
    ):
        environment = os.environ | {"PYTHONPATH": str(path)}
        command = [sys.executable, "-c", KNOWN]
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert completed.stdout == f"{codecs}\n"

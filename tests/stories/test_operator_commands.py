"""The operator's commands with wrong input: one clear line, exit status 1, and nothing changed.

The commands run in this process; the coordinator is behind real gRPC and TLS.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.commands import STEP, Fanin, fanin_in_process, one_line, uncoded
from support.hosted import Hosted
from support.snapshot import snapshot

from fanin.clients.administrator import new_secret
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import NewToken, Role
from fanin.simulation import synthetic_bundle

PLAN = """
name = "story"
bundle = "bundle"
[cohort]
concurrency = 3
[training]
learning_rate = 0.1
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator whose folder has a Run that ended after one Round."""
    host = Hosted(tmp_path_factory.mktemp("commands")).start()
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    for peer in f.peers(host, bundle, host.folder):
        peer.take_part()
    assert len(host.published_versions()) == 1
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    (host.folder / "publisher.key").write_text(f.PUBLISHER.private_bytes().hex())
    (host.folder / "plan.toml").write_text(PLAN)
    yield host
    host.stop()


# run, runs, watch


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "{plan}: not TOML ("),
        (PLAN + "epochs = 0", "{plan}: training.epochs: got 0, expected an integer from 1 to "),
        (PLAN + "[extra]", "{plan}: extra: unknown section, expected one of app, "),
        (PLAN.replace('bundle = "bundle"', ""), "{plan}: expected either app or bundle, got neither"),
        (PLAN.replace("3", "'three'"), "{plan}: cohort.concurrency: got 'three', "),
        (PLAN.replace("concurrency = 3", ""), "{plan}: cohort.concurrency: missing, "),
        (PLAN.replace("3", "3\nquorum = 4"), "{plan}: cohort: got quorum 4, buffer 3, concurrency 3, expected "),
        (PLAN.replace('"bundle"', '"nowhere"'), "nowhere: does not exist, "),
        (PLAN.replace('"story"', '"a/b"'), "{plan}: name: got 'a/b', expected a string of 1 to 128 letters, digits"),
    ],
)
def test_run_with_an_invalid_plan(fanin: Fanin, host: Hosted, text: str, message: str) -> None:
    plan = host.folder / "bad.toml"
    plan.write_text(text)
    before = snapshot(host.state)
    outcome = fanin("run", plan, "--state", host.state, "--key", host.folder / "publisher.key")
    assert message.format(plan=plan) in one_line(outcome, "run")
    assert snapshot(host.state) == before


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("aggregation.rule", "trimed_mean", "FN-0210"),
        ("aggregation.rule_options.trim", "0.1", "FN-0216"),
        ("aggregation.outer_optimizer", "fedadm", "FN-0210"),
        ("aggregation.outer_options.rate", "0.5", "FN-0216"),
        ("cohort.selection", "unifrom", "FN-0210"),
        ("cohort.selection_options.seed", "1", "FN-0216"),
        ("codec.name", "fixed33", "FN-0210"),
        ("codec.options.width", "3", "FN-0216"),
        ("stages", '[{name="error_feedbak"}]', "FN-0210"),
        ("stages", '[{name="error_feedback", options={rate=1}}]', "FN-0216"),
    ],
)
def test_a_part_that_the_coordinator_lacks_is_refused_before_a_publication(
    fanin: Fanin, host: Hosted, key: str, value: str, code: str
) -> None:
    plan = host.folder / "parts.toml"
    plan.write_text(PLAN)
    before = snapshot(host.state)
    words = ("run", plan, "--state", host.state, "--key", host.folder / "publisher.key")
    outcome = fanin(*words, "--set", f"{key}={value}")
    assert one_line(outcome, "run").startswith(f"{plan} with --set: {key.split('.')[0]}"), outcome.err
    assert f"[{code}]" in outcome.err
    assert "publishing" not in outcome.err
    assert snapshot(host.state) == before


def test_a_misspelled_rule_names_the_file_of_the_plan(fanin: Fanin, host: Hosted) -> None:
    plan = host.folder / "parts.toml"
    plan.write_text(f'{PLAN}[aggregation]\nrule = "trimed_mean"\n')
    words = (plan, "--state", host.state, "--key", host.folder / "publisher.key")
    assert one_line(fanin("run", *words), "run").startswith(f"{plan}: aggregation.rule: got 'trimed_mean', expected ")
    outcome = fanin("simulate", "none.py:app", plan)
    assert one_line(outcome, "simulate").startswith(f"{plan}: aggregation.rule: got 'trimed_mean', expected ")
    plan.write_text('[cohort]\nconcurrency = 4\n[training]\nlearning_rate = 0.1\n[aggregation]\nrule = "trimed_mean"\n')
    for limit in ((), ("--cohort", 4)):
        outcome = fanin("simulate", "none.py:app", plan, *limit)
        source = f"{plan} with --cohort" if limit else f"{plan}"
        assert one_line(outcome, "simulate").startswith(f"{source}: aggregation.rule: got 'trimed_mean', expected ")
    outcome = fanin("simulate", "none.py:app", "--set", "aggregation.rule=trimed_mean")
    assert one_line(outcome, "simulate").startswith("plan with --set: aggregation.rule: got 'trimed_mean', expected ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # The coordinator's data sets are checked before the metrics, which need the app.
        (
            "evaluation.data=digits",
            "{plan} with --set: evaluation.data: got 'digits', expected none: this coordinator has ",
        ),
        (
            'flower.roles."layer.*"=statistic',
            "{plan} with --set: got flower.roles, but the bundle has graphs, which read no such ",
        ),
        (
            "training.batch_size=5",
            "{plan} with --set: got training.batch_size 5, but the bundle's train graphs are for 8",
        ),
    ],
)
def test_a_plan_that_the_app_cannot_carry_out_is_refused_before_the_export(
    fanin: Fanin, host: Hosted, override: str, message: str
) -> None:
    source = host.folder / "apps.py"
    source.write_text('from support.models import app_of\n\napp = app_of("mlp")\n')
    plan = host.folder / "app.toml"
    plan.write_text(PLAN.replace('bundle = "bundle"', f'app = "{source}:app"'))
    words = ("run", plan, "--state", host.state, "--key", host.folder / "publisher.key")
    before = snapshot(host.state)
    outcome = fanin(*words, "--set", override)
    assert one_line(outcome, "run").startswith(message.format(plan=plan))
    assert "preparing the module" not in outcome.err
    assert snapshot(host.state) == before


def test_the_id_and_the_role_are_checked_before_the_export(fanin: Fanin, host: Hosted) -> None:
    plan = host.folder / "id.toml"
    plan.write_text(PLAN.replace('bundle = "bundle"', 'app = "none.py:app"'))
    words = ("run", plan, "--state", host.state, "--key", host.folder / "publisher.key")
    secret, sha256 = new_secret()
    with host.administrator() as administrator:
        administrator.create_token(NewToken(name="eve", role=Role.VIEWER, sha256=sha256))
    (host.folder / "viewer.token").write_text(secret)
    for more, status, code in (
        (("--run-id", "a b"), 2, "FN-0105"),
        (("--run-id", "x" * 65), 2, "FN-0105"),
        (("--run-id", "run"), 1, "FN-0604"),
        (("--token-file", host.folder / "viewer.token"), 1, "FN-1416"),
    ):
        outcome = fanin(*words, *more)
        assert (outcome.status, "exporting" in outcome.err) == (status, False) and f"[{code}]" in outcome.err, outcome


def test_run_without_a_plan_a_key_or_the_publishers_bundle(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    before = snapshot(host.state)
    words = ("run", host.folder / "plan.toml", "--state", host.state, "--key")
    outcome = fanin("run", tmp_path / "none.toml", "--state", host.state)
    assert f"{tmp_path / 'none.toml'}: cannot be read (" in one_line(outcome, "run")
    (tmp_path / "broken.key").write_bytes(b"\xff\xfe")
    message = one_line(fanin(*words, tmp_path / "broken.key"), "run")
    assert message.startswith(
        f"{tmp_path / 'broken.key'}: got 2 characters, expected a key of 64 hexadecimal ones; restore it "
    )
    (tmp_path / "another.key").write_text("ab" * 32)
    signer, owner = f.PUBLISHER.public[:8], SigningKey(bytes.fromhex("ab" * 32)).public[:8]
    path = tmp_path / "another.key"
    assert one_line(fanin(*words, path), "run") == (
        f"{host.folder / 'bundle'}: signed by key {signer}.., but {path} has key {owner}..; pass the key that signed "
        "it with --key, or export the bundle again"
    )
    # A new key has signed no Bundle, so no key is created.
    assert one_line(fanin(*words, tmp_path / "none.key"), "run") == (
        f"--key {tmp_path / 'none.key'}: no such file, expected the key that signed {host.folder / 'bundle'}; pass it "
        "with --key"
    )
    assert not (tmp_path / "none.key").exists()
    assert snapshot(host.state) == before


def test_a_run_is_started_once_and_another_plan_under_its_id_is_a_conflict(fanin: Fanin, host: Hosted) -> None:
    words = ("run", host.folder / "plan.toml", "--state", host.state, "--key", host.folder / "publisher.key")
    first = fanin(*words, "--run-id", "mine", "--json")
    assert json.loads(first.out)["run_id"] == "mine"
    assert STEP.findall(first.err) == ["publishing the bundle", "starting the run"]
    repeat = fanin(*words, "--run-id", "mine", "--quiet")
    assert repeat.out.startswith("run mine started; devices trust ")
    assert (repeat.err, ("ListRuns", "OK") in host.instruments.calls.ended) == ("", False), "it reads all Runs"
    (host.folder / "other.toml").write_text(PLAN.replace("0.1", "0.2"))
    other = fanin("run", host.folder / "other.toml", *words[2:], "--run-id", "mine")
    keeps = "A run cannot change: choose another id (--run-id), or start it without the change"
    assert one_line(other, "run") == (
        "run mine: the id is taken by a run of another plan; it differs in training.learning_rate (there 0.1, here "
        f"0.2). {keeps}"
    )
    rows = json.loads(fanin("runs", "--state", host.state, "--json").out)["runs"]
    assert [row["run_id"] for row in rows] == ["run", "mine"]
    assert fanin("stop", "mine", "--state", host.state).status == 0
    ended = fanin(*words, "--run-id", "mine", "--quiet")
    assert ended.out.startswith("run mine is already there: stopped, version 0; devices trust ")


def test_an_option_overrides_a_key_and_the_run_is_described_with_it(fanin: Fanin, host: Hosted) -> None:
    words = ("run", host.folder / "plan.toml", "--state", host.state, "--key", host.folder / "publisher.key")
    before = snapshot(host.state)
    message = one_line(fanin(*words, "--set", "cohort.concurency=2"), "run")
    assert message.startswith("--set: cohort.concurency: unknown key, ")
    assert message.endswith("; did you mean cohort.concurrency?")
    assert snapshot(host.state) == before
    options = ("--set", "cohort.concurrency=2", "--set", "aggregation.max_staleness=2", "--set", "codec.name=int8")
    assert fanin(*words, "--run-id", "overridden", *options).status == 0
    plan = json.loads(fanin("describe", "overridden", "--state", host.state, "--json").out)["plan"]
    assert (plan["cohort"]["concurrency"], plan["cohort"]["quorum"]) == (2, 2)
    assert (plan["aggregation"]["max_staleness"], plan["codec"]) == (
        2,
        {"name": "int8", "max_shift": 12, "options": {}},
    )


def test_a_run_that_is_watched_is_described_before_its_events(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    words = ("run", host.folder / "plan.toml", "--state", host.state, "--key", host.folder / "publisher.key")
    assert fanin(*words, "--run-id", "followed").status == 0
    host.await_round("followed", 1)
    assert fanin("stop", "followed", "--state", host.state).status == 0
    out = tmp_path / "lines.json"
    outcome = fanin(*words, "--run-id", "followed", "--watch", "--json", out)
    assert outcome.status == 1
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["run", "round", "run"]
    description, *events = map(json.loads, out.read_text().splitlines())
    assert (description["run_id"], description["state"]) == ("followed", "stopped")
    assert [row["event"] for row in events] == ["RoundOpened", "RoundFailed", "RunRested"]


@pytest.mark.parametrize("command", [("runs",), ("watch", "run")])
def test_an_operator_without_a_coordinator_or_a_token(
    fanin: Fanin, host: Hosted, tmp_path: Path, command: tuple[str, ...]
) -> None:
    def message(*words: object) -> str:
        return one_line(fanin(*command, *words), command[0])

    missing, state = tmp_path / "nowhere", host.state
    assert message("--state", missing) == (
        f"--server: {missing / 'address'} cannot be read (No such file or directory); give --server, or --state of "
        "a coordinator"
    )
    assert message("--state", missing, "--server", host.address).startswith(
        f"--ca: {missing / 'tls' / 'ca.pem'} cannot"
    )
    (tmp_path / "ca.pem").write_bytes(host.ca)
    options = ("--state", missing, "--server", host.address, "--ca", tmp_path / "ca.pem")
    assert message(*options) == (
        "--token-file: got none, expected a file that holds the token, or the variable FANIN_OPERATOR_TOKEN"
    )
    assert message("--state", state, "--token-file", missing) == (
        f"--token-file: {missing} cannot be read (No such file or directory)"
    )
    (tmp_path / "token").write_text("wrong")
    assert message("--state", state, "--token-file", tmp_path / "token") == (
        f"{host.address}: control: this coordinator has no token with this secret; check that it is of this "
        "coordinator, and that nobody has replaced it (fanin token rotate)"
    )


def test_an_unreachable_coordinator_is_retried_and_named(fanin: Fanin, host: Hosted) -> None:
    error = one_line(fanin("runs", "--state", host.state, "--server", "127.0.0.1:1"), "runs")
    assert error.startswith("127.0.0.1:1: cannot be reached (Connection refused)")


def test_watch_of_an_unknown_run(fanin: Fanin, host: Hosted) -> None:
    message = one_line(fanin("watch", "none", "--state", host.state), "watch")
    assert message == "run 'none': not found on this coordinator; fanin runs lists its runs"


def test_json_to_a_file_that_cannot_be_written(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    target = tmp_path / "no" / "such.json"
    outcome = fanin("runs", "--state", host.state, "--json", target)
    assert (outcome.status, outcome.out) == (2, "")
    message = f"--json: {target} cannot be written, {target.parent} is not a folder; create it"
    assert uncoded(outcome.err) == f"fanin runs: {message}; see fanin runs --help\n"


# verify


@pytest.fixture
def copy(host: Hosted, tmp_path: Path) -> Path:
    """A copy of the coordinator's folder for the test to tamper with."""
    shutil.copytree(host.state, tmp_path / "copy")
    return tmp_path / "copy"


def test_verify_of_an_unknown_run_or_no_folder(fanin: Fanin, copy: Path, tmp_path: Path) -> None:
    assert one_line(fanin("verify", "none", "--state", copy), "verify") == (
        "run none: not in this coordinator's folder"
    )
    assert one_line(fanin("verify", "run", "--state", tmp_path / "nowhere"), "verify") == (
        f"{tmp_path / 'nowhere'}: not a coordinator's folder, fanin.db is missing; give --state"
    )
    assert not (tmp_path / "nowhere").exists()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("tamper", "version", "message"),
    [
        (lambda state: flip(min(state.glob("updates/run/1/*"))), 1, "a committed update was changed on disk"),
        (lambda state: min(state.glob("updates/run/1/*")).write_bytes(b""), 1, "got 0 bytes, expected 88"),
        (lambda state: min(state.glob("updates/run/1/*")).unlink(), 1, "a committed update is missing"),
    ],
)
def test_verify_names_the_version_that_differs(
    fanin: Fanin, copy: Path, tamper: Callable[[Path], None], version: int, message: str
) -> None:
    verification = fanin("verify", "run", "--state", copy)
    assert verification.status == 0
    assert verification.out.count(": verified\n") == 2
    tamper(copy)
    outcome = fanin("verify", "run", "--state", copy)
    assert outcome.status == 1
    first, second = outcome.out.splitlines()
    assert first.startswith("version 0 ")
    assert first.endswith("(the publisher's initial version): verified")
    assert second.startswith(f"version {version} ")
    assert message in second
    row = json.loads(fanin("verify", "run", "--state", copy, "--json").out)
    assert (row["verified"], [bool(verdict["problem"]) for verdict in row["versions"]]) == (False, [False, True])


# inspect


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The folder of a valid Bundle."""
    synthetic_bundle(tmp_path / "bundle", f.PUBLISHER, f.SMALL_SHAPES)
    return tmp_path / "bundle"


def test_inspect_of_a_good_bundle(fanin: Fanin, bundle: Path) -> None:
    outcome = fanin("inspect", bundle, "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["publisher"] == f.PUBLISHER.public
    assert "(signature verified)" in fanin("inspect", bundle).out


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (
            lambda folder: flip(folder / "bundle.json"),
            "the signature does not match the manifest; it was changed after",
        ),
        (lambda folder: flip(max(folder.glob("chunks/*"))), ": digest mismatch (got "),
        (lambda folder: max(folder.glob("chunks/*")).unlink(), " is missing"),
        (lambda folder: (folder / "bundle.sig").write_text("{}"), "bundle.sig: not a signature file ("),
        (lambda folder: (folder / "bundle.sig").unlink(), "bundle.sig is missing"),
    ],
)
def test_inspect_of_a_bundle_that_was_tampered_with(
    fanin: Fanin, bundle: Path, tamper: Callable[[Path], None], message: str
) -> None:
    tamper(bundle)
    assert message in one_line(fanin("inspect", bundle), "inspect")


def test_inspect_of_a_bundle_by_another_publisher(fanin: Fanin, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other.pub").write_text(SigningKey(bytes(range(1, 33))).public)
    message = one_line(fanin("inspect", bundle, "--publisher", tmp_path / "other.pub"), "inspect")
    assert message.startswith(f"{bundle}: bundle: signed by key {f.PUBLISHER.public[:8]}.., expected one of [")
    message = one_line(fanin("inspect", bundle, "--publisher", bundle / "bundle.json"), "inspect")
    assert message.startswith(f"--publisher: {bundle / 'bundle.json'}: got a public key of ")

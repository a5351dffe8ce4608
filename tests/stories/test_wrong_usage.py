"""Exit statuses: a mistake on the command line is status 2 in every command, and it is reported before any work."""

from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line, usage_line

from fanin.commands.main import SUBCOMMANDS

SERVER = ("--server", "nonsense")
ADDRESS = "--server: got 'nonsense', expected HOST:PORT, for example nonsense:7443"
DEVICE = ("--ca", "ca.pem", "--publisher", "p.pub", "--data", "x.npz")
WRONG = {
    "demo": (("--rounds", "-1"), "--rounds, --delay-seed: got -1 and -1, expected at least 0 and -1"),
    "serve": (("--listen", "nonsense"), "listen: got 'nonsense', expected HOST:PORT, for example nonsense:7443"),
    "join": ((*SERVER, *DEVICE), ADDRESS),
    "status": (("--json", "none/x.json"), "--json: none/x.json cannot be written, none is not a folder; create it"),
    "doctor": ((), "--server: got none, expected HOST:PORT, or --state with the folder of a device or a coordinator"),
    "explain": ((), "the following arguments are required: CODE"),
    "export": (("a.py:app", "--check", "--out", "b"), "--out: got --check too, which writes nothing; expected one of "),
    "assemble": (("spec.toml", "--out", "full"), "--out: full is not empty, expected a new folder; name another one, "),
    "bundle": (("--out", "new"), "--initial and --flower: got neither, expected one: --initial FILE.npz or MODULE:NA"),
    "plan": (("--model", "125m", "--world", "2", "--device", "abacus"), "--device: got 'abacus', expected cpu or one "),
    "run": (("plan.toml", "--set", "rounds"), "--set rounds: expected KEY=VALUE, for example --set cohort.concurrency"),
    "config": (("shwo",), "got 'shwo', expected one of show, schema; did you mean show"),
    "init": (("full",), "NAME: full is not empty, it has mine; name a new folder"),
    "completion": (("bsh",), "got 'bsh', expected one of bash, zsh, fish; did you mean bash"),
    "report": (("run", *SERVER), ADDRESS),
    "runs": (SERVER, ADDRESS),
    "describe": (("run", *SERVER), ADDRESS),
    "watch": (("run", *SERVER), ADDRESS),
    "evaluations": (("run", *SERVER), ADDRESS),
    "evaluate": (("run", "--devices", "3", *SERVER), ADDRESS),
    "stats": (("--run-id", "run", *SERVER), ADDRESS),
    "fetch": (
        ("run", "--out", "x.onnx"),
        "--out: got x.onnx, expected FILE.npz or a folder; for a model file use ",
    ),
    "publish": (("x", "--run", "run", "--max-int8-drop", "1"), "--max-int8-drop: expected --data FILE.npz with it"),
    "pause": (("run", *SERVER), ADDRESS),
    "resume": (("run", *SERVER), ADDRESS),
    "stop": (("run", *SERVER), ADDRESS),
    "token": (("list", *SERVER), ADDRESS),
    "device": (("list", *SERVER), ADDRESS),
    "audit": (("list", *SERVER), ADDRESS),
    "reclaim": (("run", *SERVER), ADDRESS),
    "prune": (("run", *SERVER), ADDRESS),
    "backup": (
        ("x", "--json", "none/x.json"),
        "--json: none/x.json cannot be written, none is not a folder; create it",
    ),
    "restore": (
        ("x", "--state", "new", "--json", "none/x.json"),
        "--json: none/x.json cannot be written, none is not a folder; create it",
    ),
    "rollback": (("run", "1", *SERVER), ADDRESS),
    "promote": (("run", "1", "other", *SERVER), ADDRESS),
    "verify": (
        ("run", "--json", "none/x.json"),
        "--json: none/x.json cannot be written, none is not a folder; create it",
    ),
    "infer": (("rows.csv", "--data", "x.npy"), "rows.csv: got a file of unknown format, expected one that ends in ['."),
    "inspect": (
        ("rows.csv",),
        "rows.csv: got a file of unknown format, expected one that ends in ",
    ),
    "train": (
        ("config.toml", "--nodes", "many"),
        "--nodes: got 'many', expected the fewest and the most machines, ",
    ),
    "simulate": (("a.py:app", "--seeds", "x"), "--seeds x: expected integers of 0 or more, as in 0,1,2"),
    "study": (
        ("x.toml", "--json", "none/x.json"),
        "--json: none/x.json cannot be written, none is not a folder; create it",
    ),
    "partition": (("--data", "mnist"), "data: got 'mnist', expected digits, fashion-mnist, tinyshakespeare, or the pa"),
    "policy": (("set", "nope=1"), "privacy_floor.nope: got an unknown key, expected one of protocol, threat, "),
    "privacy": (
        ("plan", "--epsilon", "-1", "--rounds", "10", "--cohort", "10", "--population", "100"),
        "epsilon: got -1, expected a number above 0 and at most 100",
    ),
    "bench": (("rounds", "--megabytes", "0"), "--megabytes: got 0, expected 4 bytes or more, up to "),
}
OF_FILES = {
    "export": ("none.py:app", "--check"),
    "infer": ("none.onnx", "--data", "x.npy"),
    "join": ("--server", "127.0.0.1:1", *DEVICE),
    "partition": ("--data", "none.npz"),
    "run": ("none.toml",),
    "simulate": ("none.py:app",),
    "study": ("none.toml",),
    "train": ("none.toml",),
}


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fanin:
    """The command line, in a folder with a table and a folder that is not empty."""
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("1,2\n")
    Path("full").mkdir()
    Path("full", "mine").write_text("")
    return fanin_in_process(capsys, monkeypatch)


def test_the_result_overwrites_no_file_without_json(fanin: Fanin) -> None:
    # A PLAN.toml after --json is its value.
    Path("plan.toml").write_text("[cohort]\nquorum = 1\n")
    message = (
        "--json: plan.toml exists and has no JSON, and would be overwritten; if it is an argument of the command, "
    )
    assert usage_line(fanin("simulate", "none.py:app", "--json", "plan.toml"), "simulate").startswith(message)
    assert Path("plan.toml").read_text().startswith("[cohort]")
    for content in ("", '{\n "rows": []\n}\n', '{"event": 1}\n{"event": 2}\n'):
        Path("result.json").write_text(content)
        message = one_line(fanin("simulate", "none.py:app", "--json", "result.json"), "simulate")
        assert message.startswith("App: no file none.py")


@pytest.mark.heavy
@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_a_wrong_value_of_an_option_is_status_2(fanin: Fanin, command: str) -> None:
    words, message = WRONG[command]
    name = f"{command} {words[0]}" if command in ("audit", "bench", "device", "privacy", "token") else command
    assert usage_line(fanin(command, *words), name).startswith(message)
    assert sorted(path.name for path in Path().iterdir()) == ["full", "rows.csv"]


@pytest.mark.heavy
@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_an_unknown_option_is_status_2(fanin: Fanin, command: str) -> None:
    outcome = fanin(command, *(("rounds",) if command == "bench" else ()), "--unknown", "x")
    assert (outcome.status, outcome.out) == (2, "")
    assert "[FN-0023]" in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.parametrize("command", ["join", "status", "doctor", "explain", "infer"])
def test_a_misspelled_option_of_the_core_install_is_answered_with_the_nearest_one(fanin: Fanin, command: str) -> None:
    words, near = {
        "join": (("--sevrer", "a:1"), "--server"),
        "status": (("--stat", "x"), "--state"),
        "doctor": (("--tokenfile=x",), "--token-file"),
        "explain": (("--jsn", "FN-0023"), "--json"),
        "infer": (("m.onnx", "--dta", "x"), "--data"),
    }[command]
    typo = words[-2].partition("=")[0] if len(words) > 1 else words[0].partition("=")[0]
    assert usage_line(fanin(command, *words), command) == f"No such option: {typo} Did you mean {near}?"


@pytest.mark.heavy
@pytest.mark.parametrize("command", OF_FILES)
def test_a_file_that_is_missing_is_status_1(fanin: Fanin, command: str) -> None:
    assert one_line(fanin(command, *OF_FILES[command]), command)

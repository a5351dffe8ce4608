"""``fanin simulate`` and ``fanin partition``: their output, their files, and wrong arguments."""

import contextlib
import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.commands import uncoded
from support.flower_apps import write_app
from support.round_rows import ROW

from fanin.commands.console.simulated import SimulationText
from fanin.commands.main import main

APP = str(ROOT / "examples" / "digits" / "app.py") + ":app"


def test_a_partition_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["partition", "--clients", "5", "--by", "shards", "--option", "per_client=2", "--seed", "3"]
    assert main(command) == 0
    assert capsys.readouterr().out == "1438 examples of digits on 5 clients, 287 to 288 each\n"
    assert main([*command, "--json", str(tmp_path / "row.json")]) == 0
    assert capsys.readouterr().out == "1438 examples of digits on 5 clients, 287 to 288 each\n"
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["num_examples"] == sum(row["sizes"]) == 1438
    assert [sum(counts) for counts in row["label_counts"]] == row["sizes"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--by", "label_skew", "--option", "alpa=1"],
            "label_skew.alpa: unknown option, expected alpha; did you mean alpha?",
        ),
        (["--alpha", "0"], "dirichlet: got alpha 0.0, expected a positive number"),
        (["--option", "alpha"], "--option alpha: expected NAME=NUMBER, for example --option per_client=2"),
        (
            ["--by", "natural"],
            (
                "--by natural: expected data whose examples have an id, such as tinyshakespeare, and no options; in "
                "Python, use Natural(ids=...)"
            ),
        ),
    ],
)
def test_a_wrong_option_of_a_partition_is_wrong_usage(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", *arguments]) == 2
    assert uncoded(capsys.readouterr().err) == f"fanin partition: {error}; see fanin partition --help\n"


def test_an_unknown_name_of_data_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "--data", "mnist"]) == 2
    error = (
        "fanin partition: data: got 'mnist', expected digits, fashion-mnist, tinyshakespeare, or the path of an .npz, "
        ".csv or .parquet file or of a folder; see fanin partition --help\n"
    )
    assert uncoded(capsys.readouterr().err) == error


@pytest.mark.heavy
def test_an_error_does_not_repeat_the_name_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", APP, "--clients", "5", "--cohort", "6", "--quiet"]) == 1
    assert uncoded(capsys.readouterr().err) == "fanin simulate: got a cohort of 6, expected at most the 5 clients\n"
    assert main(["plan", "--model", "tiny", "--world", "7"]) == 1
    assert capsys.readouterr().err.startswith("fanin plan: no mesh of 7 ranks fits tiny")


def test_too_small_an_alpha_names_clients_and_one_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "--clients", "100", "--by", "label_skew", "--alpha", "0.02"]) == 2
    text = capsys.readouterr().err
    assert "of 100 clients have fewer than 2 examples with seed 0: " in text
    ((works, does_not),) = re.findall(r"with this seed, alpha ([\d.]+) works and ([\d.]+) does not; see", text)
    assert float(works) == pytest.approx(float(does_not) + 0.01)
    assert main(["partition", "--clients", "100", "--by", "label_skew", "--alpha", works]) == 0
    assert main(["partition", "--clients", "100", "--by", "label_skew", "--alpha", does_not]) == 2


def test_more_clients_than_examples_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere:app", "--clients", "2000"]) == 2
    error = (
        "fanin simulate: partition: got 2000 clients for 1438 examples, expected 1 to 719: each client needs 2, one to "
        "train and one to validate; see fanin simulate --help\n"
    )
    assert uncoded(capsys.readouterr().err) == error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--seeds", "1,x"], "--seeds 1,x: expected integers of 0 or more, as in 0,1,2"),
        (
            ["--seeds", "0,1", "--seed", "3"],
            "--seeds, --seed: got the seeds 0,1 and the seed 3, expected one of them; remove --seed",
        ),
        (
            ["--engine", "fast"],
            "engine: got 'fast', expected one of graph, vmap, vmap:cuda (or vmap:cuda:N, the GPU N), or auto",
        ),
        (
            ["--run-config", "a=1"],
            (
                "--initial, --keep, --node-config, --run-config: got them without --flower, expected them for a Flower "
                "app only"
            ),
        ),
        (["--csv", "a.csv", "--clients-csv", "a.csv"], "--csv, --clients-csv: got a.csv for both, expected two files"),
        (["--alpha", "0"], "partition: dirichlet: got alpha 0.0, expected a positive number"),
    ],
)
def test_a_wrong_option_is_wrong_usage_before_the_app_is_loaded(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "nowhere:app", *options]) == 2
    assert uncoded(capsys.readouterr().err) == f"fanin simulate: {error}; see fanin simulate --help\n"


@pytest.mark.parametrize(
    ("option", "name", "error"),
    [
        ("--plot", "nowhere/x.png", "plot: {} cannot be written, {}/nowhere is not a folder; create it"),
        ("--csv", "nowhere/x.csv", "--csv: {} cannot be written, {}/nowhere is not a folder; create it"),
        ("--plot", "x.foo", "plot: got the file {}, expected a name that ends in one of: "),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_training(
    option: str, name: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["simulate", "nowhere:app", option, str(tmp_path / name)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"fanin simulate: {error.format(tmp_path / name, tmp_path)}")


def test_a_wrong_key_is_refused_before_the_app_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere:app", "--set", "training.epoch=2"]) == 1
    assert "did you mean training.epochs?" in capsys.readouterr().err


CLIENTS = """

import numpy as np
from flwr.client import NumPyClient
from support.commands import uncoded


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros(2, np.float32)]

    def fit(self, parameters, config):
        if config["server-round"] == STOP:
            import signal

            signal.raise_signal(signal.SIGINT)
        return [parameters[0] + 1], 1, {}


class FailingOnce(Client):
    def fit(self, parameters, config):
        if config["server-round"] == 2:
            raise OSError("no pictures now")
        return [parameters[0] + 1], 1, {}


class Uneven(Client):
    def __init__(self, partition):
        self._partition = partition

    def fit(self, parameters, config):
        if self._partition == 1:
            raise OSError(f"no pictures in round {config['server-round']}")
        if self._partition == 2:
            raise ArithmeticError("no number")
        return [parameters[0] + 1], 1, {}


def uneven(context):
    return Uneven(context.node_config["partition-id"]).to_client()


class Failing(Client):
    def fit(self, parameters, config):
        raise OSError("no pictures here")
"""


@pytest.mark.heavy
def test_an_interrupted_simulation_names_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "interrupted_app", CLIENTS.replace("STOP", "3"))
    monkeypatch.chdir(tmp_path / "app")
    command = ["simulate", "--flower", "interrupted_app:Client", "--clients", "3", "--cohort", "2", "--quiet"]
    command += ["--set", "codec.max_shift=8"]
    files = tmp_path / "rounds.csv", tmp_path / "clients.csv"
    assert main([*command, "--csv", str(files[0]), "--clients-csv", str(files[1])]) == 130
    text = capsys.readouterr().err
    assert text == f"fanin simulate: stopped after round 2; the result so far is in {files[0]}, {files[1]}\n"
    assert [len(file.read_text().splitlines()) for file in files] == [4, 5]
    assert main([*command, "--seeds", "0,1"]) == 130
    text = capsys.readouterr().err
    assert text.endswith("stopped after round 2 of seed 0; no file has the result; name one, as by --csv FILE\n")


@pytest.mark.heavy
def test_a_run_that_stops_writes_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "stopped_app", CLIENTS.replace("STOP", "9"))
    monkeypatch.chdir(tmp_path / "app")
    # A training takes 1 s, so one Round ends before the clients leave.
    (tmp_path / "trace.csv").write_text("client,time,state\n0,0,on\n0,1.5,off\n")
    (tmp_path / "devices.toml").write_text('traces = "trace.csv"\n')
    command = ["simulate", "--flower", "stopped_app:Client", "--clients", "3", "--cohort", "2", "--quiet"]
    command += ["--set", "codec.max_shift=8"]
    file = tmp_path / "rounds.csv"
    assert main([*command, "--devices", str(tmp_path / "devices.toml"), "--csv", str(file)]) == 1
    assert len(file.read_text().splitlines()) == 3
    stopped, error = capsys.readouterr().err.splitlines()
    assert stopped == f"fanin simulate: stopped after round 1; the result so far is in {file}"
    assert error.startswith("fanin simulate: no client is available from ")


def test_a_missing_library_is_reported_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert main(["simulate", APP, "--clients", "5", "--tensorboard", "board"]) == 1
    error = "TensorBoard: tensorboardX is not installed here; pip install tensorboardX"
    assert uncoded(capsys.readouterr().err) == f"fanin simulate: {error}\n"


@pytest.mark.heavy
def test_the_choice_of_an_engine_the_seeds_and_the_baseline_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", APP, "--clients", "10", "--cohort", "2", "--rounds", "1", "--baseline"]
    assert main([*command, "--engine", "auto"]) == 0
    text = capsys.readouterr()
    assert re.search(
        r"^fanin simulate: .* s: engine graph: graph trains all rounds in .*, and vmap begins", text.err, re.M
    )
    assert re.search(r"^fanin simulate: .* s: training the centralized baseline$", text.err, re.M)
    last = text.out.splitlines()[-1]
    assert re.fullmatch(r"baseline: \d+ steps  test loss \d\.\d{4}  accuracy 0\.\d{4}", last)
    assert main([*command, "--seeds", "3,5", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [line.replace("   ", "").partition("  ")[0] for line in lines[:6]]
    assert labels == ["seed 3", "round 0", "round 1", "seed 5", "round 0", "round 1"]
    assert [line.partition(" baseline: ")[0] for line in lines[6:]] == ["seed 3:", "seed 5:"]


@pytest.mark.parametrize("model", ["", 'app = "other:app"\n', 'bundle = "other"\n'])
@pytest.mark.heavy
def test_a_plan_may_name_another_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "planned_app", CLIENTS.replace("STOP", "0"))
    monkeypatch.chdir(tmp_path / "app")
    Path("plan.toml").write_text(model + "cohort = {concurrency = 4, buffer = 2}\ntraining.learning_rate = 1\n")
    command = ["simulate", "plan.toml", "--flower", "planned_app:Client", "--clients", "4", "--rounds", "2", "--quiet"]
    assert main([*command, "--set", "aggregation.max_staleness=3"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["round", str(number), "2", "clients"] for number in (1, 2)
    ]


def test_an_app_that_always_fails_is_one_error_and_one_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    write_app(tmp_path / "app", "failing_app", CLIENTS.replace("STOP", "0"))
    monkeypatch.chdir(tmp_path / "app")
    assert main(["simulate", "--flower", "failing_app:Failing", "--clients", "3", "--cohort", "2", "--quiet"]) == 1
    text = capsys.readouterr().err
    assert text.count('raise OSError("no pictures here")') == 1
    assert text.splitlines()[-1].startswith(
        "fanin simulate: the first trainings of 3 clients failed, and none succeeded; "
    )


def test_each_cause_of_failed_trainings_is_printed_once_and_the_json_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    write_app(tmp_path / "app", "uneven_app", CLIENTS.replace("STOP", "0"))
    monkeypatch.chdir(tmp_path / "app")
    command = ["simulate", "--flower", "uneven_app:uneven", "--clients", "6", "--cohort", "6", "--rounds", "3"]
    command += ["--initial", "uneven_app:ARRAYS", "--set", "cohort.deadline_s=60", "--quiet"]
    Path("uneven_app.py").write_text(Path("uneven_app.py").read_text() + "\n\nARRAYS = [np.zeros(2, np.float32)]\n")
    assert main([*command, "--json", "row.json"]) == 0
    out, text = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == ["0", "1", "2", "3"]
    assert re.findall(r"^fanin simulate: client (\d) in round 1: ", text, re.M) in (["1", "2"], ["2", "1"])
    assert text.count("raise OSError(") == text.count("raise ArithmeticError(") == 1
    # A client that fails is assigned the work again until the Round's deadline.
    failures = json.loads(Path("row.json").read_text())["failures"]
    assert {(each["client"], each["round"]) for each in failures} == {(c, r) for c in (1, 2) for r in (1, 2, 3)}
    assert text.splitlines()[-1] == f"fanin simulate: {len(failures)} trainings failed; --json FILE lists the errors"
    assert all("Traceback" in each["traceback"] and each["seed"] == 0 for each in failures)
    assert main([*command, "--stop-on-failure", "--csv", "rounds.csv"]) == 1
    assert len(Path("rounds.csv").read_text().splitlines()) == 2
    text = capsys.readouterr().err
    assert text.count("raise OSError(") + text.count("raise ArithmeticError(") == 1
    assert re.match(r"fanin simulate: client \d in round 1: .* \[FN-0905\]$", text.splitlines()[-1])


class Terminal(io.StringIO):
    """A terminal that keeps its text."""

    def isatty(self) -> bool:
        """See io.IOBase."""
        return True


@pytest.mark.parametrize(
    ("target", "quiet", "out", "terminal"),
    [
        ("", True, "round", ""),
        ("row.json", True, "round", ""),
        ("-", False, "", "round"),
        ("-", True, "", ""),
    ],
)
def test_json_on_standard_output_moves_the_rounds_to_a_terminal(
    target: str, quiet: bool, out: str, terminal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.redirect_stderr(Terminal()) as stderr:
        SimulationText(json_target=target, quiet=quiet, has_seeds=False).row(ROW)
    assert (capsys.readouterr().out[:5], stderr.getvalue()[:5]) == (out, terminal)
    SimulationText(json_target="-", quiet=False, has_seeds=False).row(ROW)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.heavy
def test_rows_and_events_of_several_seeds_have_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "seeds_app", CLIENTS.replace("STOP", "0"))
    monkeypatch.chdir(tmp_path / "app")
    command = ["simulate", "--flower", "seeds_app:Client", "--clients", "3", "--cohort", "2", "--rounds", "2"]
    files = ["--events", "events.jsonl", "--clients-csv", "clients.csv", "--csv", "rounds.csv", "--json", "row.json"]
    assert main([*command, "--seeds", "3,5", "--quiet", *files]) == 0
    events = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    engines = [each["seed"] for each in events if each["event"] == "engine"]
    assert engines == [3, 5]
    assert [each["seed"] for each in events] == sorted(each["seed"] for each in events)
    with Path("clients.csv").open() as file:
        assert [row["seed"] for row in csv.DictReader(file)] == ["3"] * 4 + ["5"] * 4
    assert Path("rounds.csv").read_text().splitlines()[0].startswith("round,num_seeds,version.mean,")
    row = json.loads(Path("row.json").read_text())
    assert row["seed"] == 3
    assert [[each["seed"] for each in part["rounds"]] for part in row["repeats"]] == [[3] * 3, [5] * 3]


@pytest.mark.heavy
def test_a_failed_round_uses_a_number_and_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "once_app", CLIENTS.replace("STOP", "0"))
    monkeypatch.chdir(tmp_path / "app")
    command = ["simulate", "--flower", "once_app:FailingOnce", "--clients", "3", "--cohort", "3", "--rounds", "3"]
    command += ["--set", "cohort.deadline_s=60", "--set", "schedule=[{from_round=9}]", "--quiet"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == ["0", "1", "3", "4"]
    assert "note: schedule.0: from_round is 9, and the last Round of the plan is 3 (stop.max_rounds); " in err


@pytest.mark.nightly
@pytest.mark.heavy
def test_a_simulation_follows_a_plan_file_and_its_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'app = "ignored:app"\n[cohort]\nconcurrency = 9\n[training]\nlearning_rate = 0.01\n[stop]\nmax_rounds = 9'
    )
    command = ["simulate", APP, str(path), "--clients", "12", "--cohort", "3", "--set", "stop.max_rounds=2", "--quiet"]
    assert main([*command, "--csv", str(tmp_path / "rounds.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    assert lines[2].split()[2:4] == ["3", "clients"]
    assert len((tmp_path / "rounds.csv").read_text().splitlines()) == 4
    assert main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [each["num_clients"] for each in row["rounds"]] == [0, 3, 3]
    assert len(row["versions"]) == 3

"""``fanin simulate`` repeats a simulation by its seed, resumes one from its record, and draws it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.apps import write_module_app
from support.boards import values_in
from support.flower_apps import write_app

from fanin.commands.main import main

FAILING_APP = """
import numpy as np
from flwr.client import NumPyClient


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros(3, np.float32)]

    def fit(self, parameters, config):
        if np.random.random() < 0.1:
            raise OSError("no pictures now")
        return [parameters[0] + np.random.standard_normal(3).astype(np.float32)], 5, {}
"""
DEVICES = """
bytes_up_per_s = { name = "pareto", least = 0.4, alpha = 1.0 }
dropout = 0.2
traces = "trace.csv"
"""


@dataclass(frozen=True)
class Played:
    """The exit status of a simulation, its output and its event log."""

    status: int
    out: str
    events: bytes


@pytest.mark.heavy
def test_a_seed_replays_a_simulation_that_fails_and_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(tmp_path / "app", "unsteady_app", FAILING_APP)
    monkeypatch.chdir(tmp_path / "app")
    # All devices leave after a minute. With some seeds their uploads are too slow, and the simulation fails.
    rows = "".join(f"{client},0,on,{speed}\n{client},60,off,\n" for client, speed in enumerate([5e6, 3e6, 1e6]))
    Path("trace.csv").write_text(f"client,time,state,bytes_down_per_s\n{rows}")
    Path("devices.toml").write_text(DEVICES)
    command = ["simulate", "--flower", "unsteady_app:Client", "--clients", "5", "--cohort", "3", "--rounds", "3"]
    command += ["--devices", "devices.toml", "--events", "events.jsonl", "--quiet"]

    def played(seed: int) -> Played:
        status = main([*command, "--seed", str(seed)])
        captured = capsys.readouterr()
        return Played(status, captured.out + captured.err, Path("events.jsonl").read_bytes())

    first = {seed: played(seed) for seed in range(4)}
    assert {each.status for each in first.values()} == {0, 1}
    assert len({each.events for each in first.values()}) == 4
    digest = hashlib.sha256(Path("trace.csv").read_bytes()).hexdigest()
    second = json.loads(first[0].events.splitlines()[1])
    assert (second["event"], second["detail"]) == ("traces", digest)
    events = {json.loads(line)["event"] for each in first.values() for line in each.events.splitlines()}
    assert {"accepted", "gave up", "gone", "round failed", "version published"} <= events
    assert {seed: played(seed) for seed in first} == first


@pytest.mark.heavy
def test_the_seed_is_that_of_the_trainings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path / "app", "steady_app", FAILING_APP.replace("< 0.1", "< 0"))
    monkeypatch.chdir(tmp_path / "app")

    def versions(*words: str) -> object:
        command = ["simulate", "--flower", "steady_app:Client", "--clients", "3", "--cohort", "3", "--rounds", "1"]
        assert main([*command, "--quiet", "--json", "result.json", *words]) == 0
        return json.loads(Path("result.json").read_text())["versions"]

    first = versions("--seed", "1")
    assert versions("--seed", "1", "--set", "training.seed=1") == first
    assert versions("--seed", "1", "--set", "training.seed=0") != first


@pytest.mark.heavy
def test_a_partition_is_drawn_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "parts.png"
    assert main(["partition", "--clients", "5", "--alpha", "0.5", "--plot", str(file)]) == 0
    assert capsys.readouterr().out.startswith("1438 examples of digits on 5 clients, ")
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


@pytest.mark.heavy
@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_a_resumed_simulation_computes_the_rounds_that_its_record_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["simulate", write_module_app(tmp_path), "--clients", "4", "--cohort", "3", "--resume", "record"]
    files = ["--plot", "rounds.svg", "--events", "events.jsonl", "--tensorboard", "board"]
    assert main([*command, "--rounds", "1", *files, "--json", "first.json"]) == 0
    first = json.loads(Path("first.json").read_text())
    assert Path("rounds.svg").read_text().count("<svg") == 1
    losses = {step: value for (tag, step), value in values_in(Path("board")).items() if tag == "test_loss"}
    assert losses == pytest.approx({row["round"]: row["test_loss"] for row in first["rounds"]})
    trainings = {path: path.stat().st_mtime_ns for path in Path("record/trainings").iterdir()}
    assert len(trainings) == 3
    assert main([*command, "--rounds", "2", "--processes", processes, "--json", "second.json", "--quiet"]) == 0
    second = json.loads(Path("second.json").read_text())
    assert second["versions"][:2] == first["versions"]
    assert len(set(second["versions"])) == 3
    assert len(list(Path("record/trainings").iterdir())) == 6
    assert {path: path.stat().st_mtime_ns for path in trainings} == trainings
    assert json.loads(Path("events.jsonl").read_text().splitlines()[0])["detail"] == "graph"

"""A rank is stopped, killed or hung. The others resume with the same numbers, and the error names the culprit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.programs import Programs

from fanin.datacenter.checkpoints.progress import latest
from fanin.datacenter.jobs.torchrun import Elastic, failure_reason, run_ranks
from fanin.datacenter.ranks.elastic import StopSignal
from fanin.datacenter.watch.hangs import (
    HangReport,
    PendingOperation,
    attempt_folder,
    diagnose,
    explain,
    read_reports,
    write_report,
)
from fanin.protos.errors import InvalidInput

PROGRAM = Path(__file__).with_name("faults.py")
HUNG = 86
NUM_STEPS = 8
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def scene_results(programs: Programs, folder: Path, names: list[str]) -> dict[str, dict[str, object]]:
    """Return the results of some scenes of ``faults.py``."""
    programs.check("faults", "scenes", folder, *names, warning_action="default")
    results = json.loads((folder / "scenes.json").read_text())
    assert isinstance(results, dict)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """Return the folder with the results of all scenes that run in CI."""
    results_folder = tmp_path_factory.mktemp("faults")
    names = ["whole", "stopped", "resumed after a stop", "killed", "resumed after a kill", "frozen", "inside", "met"]
    scene_results(programs, results_folder, names)
    return results_folder


def scene(folder: Path, name: str) -> dict[str, object]:
    row = json.loads((folder / "scenes.json").read_text())[name]
    assert isinstance(row, dict)
    return row


def traces(folder: Path) -> list[dict[int, str]]:
    """Return the losses of each attempt, by step and to the last bit."""
    attempts = []
    for path in sorted(folder.glob("losses-*.txt")):
        rows = (line.split() for line in path.read_text().splitlines())
        attempts.append({int(step): loss for step, loss in rows})
    return attempts


def test_an_undisturbed_training_reports_no_hang(folder: Path) -> None:
    assert scene(folder, "whole") == {"statuses": [0, 0, 0, 0], "step": NUM_STEPS, "told": None}
    (trace,) = traces(folder / "whole")
    assert list(trace) == list(range(1, NUM_STEPS + 1))
    assert float.fromhex(trace[NUM_STEPS]) < float.fromhex(trace[1]), "something was learnt"


def test_a_signal_to_one_rank_writes_a_checkpoint_with_status_0_on_all(folder: Path) -> None:
    # The signal came after step 3, and all ranks agree on it after the next step.
    assert scene(folder, "stopped") == {"statuses": [0, 0, 0, 0], "step": 4, "told": None}
    assert scene(folder, "resumed after a stop")["step"] == NUM_STEPS
    (expected,), (before, after) = traces(folder / "whole"), traces(folder / "stopped")
    assert (list(before), list(after)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert before | after == expected


def test_a_killed_job_resumes_from_the_last_complete_checkpoint_bit_for_bit(folder: Path) -> None:
    statuses = scene(folder, "killed")["statuses"]
    assert isinstance(statuses, list)
    assert statuses[1] == -signal.SIGKILL
    assert 0 not in statuses, "nobody trains on without it"
    assert scene(folder, "killed")["step"] in (2, 4), "the save after step 4 may have been under way"
    assert scene(folder, "resumed after a kill")["step"] == NUM_STEPS
    (expected,), (before, after) = traces(folder / "whole"), traces(folder / "killed")
    assert list(before) == [1, 2, 3, 4, 5]
    assert min(after) == 1 + int(str(scene(folder, "killed")["step"]))
    assert all(loss == expected[step] for trace in (before, after) for step, loss in trace.items())
    assert set(before) | set(after) == set(expected)


def test_ranks_of_several_machines_use_the_attempt_number_of_the_first(folder: Path) -> None:
    # The second machine joined later, and its own count is 0.
    assert scene(folder, "met") == {"statuses": [0, 0], "attempts": [3, 3]}


def test_a_frozen_rank_is_named_with_the_collective_that_it_missed(folder: Path) -> None:
    row = scene(folder, "frozen")
    # A rank ends with gloo's error, status 1, if its neighbor ends before its own watchdog looks.
    assert row["statuses"][1] == -signal.SIGKILL
    assert HUNG in row["statuses"] and set(row["statuses"]) <= {HUNG, 1, -signal.SIGKILL}
    message = str(row["told"])
    assert message.startswith("rank 1 (pp 0, dp_shard 1) hangs: rank 0 (pp 0, dp_shard 0) waits in ")
    assert " over dp_shard " in message
    assert message.endswith("it left no report: it is gone, stopped, or stuck outside of Python")


def test_a_rank_that_hangs_in_a_layer_is_named_with_axis_collective_and_module(folder: Path) -> None:
    row = scene(folder, "inside")
    # A rank ends with gloo's error, status 1, if its neighbor ends before its own watchdog looks.
    assert HUNG in row["statuses"] and set(row["statuses"]) <= {HUNG, 1}
    message = str(row["told"])
    expected = (
        r"rank 3 \(dp_shard 1, tp 1\) hangs: rank 2 \(dp_shard 1, tp 0\) waits in all_reduce over tp in "
        r"layers\.1\S*, forward, step 3, \S+ \w+, for \d+\.\d s; "
        r"it is in layers\.1\.attention\.out, forward, step 3, faults\.py:\d+ stuck"
    )
    assert re.fullmatch(expected, message), message
    duration = re.search(r"for (\d+\.\d) s", message)
    assert duration is not None
    # The timeout is 6 s, with a check every 0.6 s. A rank that another rank alerts has waited a little less, and on a
    # busy machine any rank waits longer.
    assert float(duration[1]) > 4.0


@pytest.mark.nightly
def test_a_rank_that_hangs_between_steps_or_in_a_backward_pass_is_named(programs: Programs, tmp_path: Path) -> None:
    results = scene_results(programs, tmp_path, ["hung", "behind"])
    hang_message, behind_message = str(results["hung"]["told"]), str(results["behind"]["told"])
    assert hang_message.startswith("rank 2 (pp 1, dp_shard 0) hangs: rank 3 (pp 1, dp_shard 1) waits in ")
    assert " over dp_shard " in hang_message
    previous_wait = read_reports(attempt_folder(tmp_path / "hung", 0))[0].waits
    assert previous_wait == PendingOperation(axis="pp", kind="receive", ranks=(0, 2)), (
        "the stage before it waits for a message"
    )
    assert "it is outside of the model, step 4, faults.py:" in hang_message
    assert behind_message.startswith(
        "rank 1 (dp_shard 0, tp 1) hangs: rank 0 (dp_shard 0, tp 0) waits in all_reduce over tp in "
    )
    assert "it is in layers.1, backward, step 3, faults.py:" in behind_message


@pytest.mark.nightly
def test_torchrun_restarts_the_ranks_with_the_same_trace(folder: Path, tmp_path: Path) -> None:
    program = [str(PROGRAM), "rank", str(tmp_path), "kill-1-5"]
    status = run_ranks(program, 4, tmp_path, Elastic(max_restarts=1))
    assert status == 0, failure_reason(tmp_path, status)
    progress = latest(tmp_path)
    assert progress is not None
    assert progress.step == NUM_STEPS
    (expected,), (before, after) = traces(folder / "whole"), traces(tmp_path)
    assert list(before) == [1, 2, 3, 4, 5]
    assert all(loss == expected[step] for trace in (before, after) for step, loss in trace.items())
    assert set(before) | set(after) == set(expected)


@pytest.mark.nightly
def test_a_signal_to_torchrun_writes_a_checkpoint_whatever_its_status(tmp_path: Path) -> None:
    # Not through run_ranks, because the caller would be this process.
    program = [str(PROGRAM), "rank", str(tmp_path), "pause-0-3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *program]
    agent = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 120.0
    while not any(3 in trace for trace in traces(tmp_path)):
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.1)
    # Wait until all ranks have agreed after that step, and the first one pauses.
    time.sleep(0.3)
    agent.terminate()
    assert agent.wait(60.0) == 1
    progress = latest(tmp_path)
    assert progress is not None
    assert progress.step == 4


@pytest.mark.nightly
def test_the_launcher_reports_a_hang(tmp_path: Path) -> None:
    status = run_ranks([str(PROGRAM), "rank", str(tmp_path), "hang-2-3"], 4, tmp_path)
    assert status != 0
    assert failure_reason(tmp_path, status).startswith("rank 2 (pp 1, dp_shard 0) hangs: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_restarts": -1}, "got max_restarts -1, expected 0 or more"),
        ({"min_nodes": 0}, "got 0 to 1 nodes, expected at least 1"),
        ({"min_nodes": 3, "max_nodes": 2, "endpoint": "a:1"}, "got 3 to 2 nodes"),
        ({"max_nodes": 2}, "got 2 nodes and endpoint '', expected host:port"),
        ({"max_nodes": 2, "endpoint": "a"}, "got 2 nodes and endpoint 'a', expected host:port"),
        ({"max_nodes": 2, "endpoint": ":1"}, "got 2 nodes and endpoint ':1', expected host:port"),
        ({"max_nodes": 2, "endpoint": "a:65536"}, "got 2 nodes and endpoint 'a:65536', expected host:port"),
        ({"max_nodes": 2, "endpoint": "a:1"}, "got 1 to 2 nodes and max_restarts 0, expected at least 1"),
        ({"endpoint": "a:1"}, "got 1 nodes and endpoint 'a:1', expected host:port"),
    ],
)
def test_impossible_numbers_of_machines_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(Elastic(), **changes)


def test_a_stop_signal_is_handled_only_inside_its_context() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
    assert signal.getsignal(signal.SIGTERM) is before


def report(rank: int, waits: PendingOperation | None, **changes: object) -> HangReport:
    """Return a report from a mesh of four ranks."""
    base = HangReport(
        rank=rank,
        mesh="dp_shard=2,tp=2",
        step=2,
        still_s=1.5,
        waits=waits,
        module="layers.0",
        phase="forward",
        line="decoder.py:7 forward",
        done={},
    )
    return replace(base, **changes)


def test_the_rank_behind_in_a_collective_hangs_if_all_wait() -> None:
    first, last = (
        PendingOperation(axis="tp", kind="all_reduce", ranks=ranks, sequence=9) for ranks in ((0, 1), (2, 3))
    )
    messages = PendingOperation(axis="dp_shard", kind="all_gather", ranks=(0, 2), sequence=4)
    reports = {
        0: report(0, messages, done={"tp": 9, "dp_shard": 4}),
        1: report(1, first, done={"tp": 9}),
        2: report(2, replace(last, sequence=8), done={"tp": 8, "dp_shard": 3}),
        3: report(3, last, done={"tp": 9}),
    }
    assert diagnose(reports) == (
        "rank 2 (dp_shard 1, tp 0) hangs: rank 3 (dp_shard 1, tp 1) waits in all_reduce over tp in layers.0, forward, "
        "step 3, decoder.py:7 forward, for 1.5 s; it is in layers.0, forward, step 3, decoder.py:7 forward"
    )


def test_without_a_late_rank_all_ranks_are_reported() -> None:
    waits = {rank: PendingOperation(axis="tp", kind="all_reduce", ranks=(0, 1), sequence=3) for rank in range(2)}
    reports = {rank: report(rank, each, mesh="tp=2", done={"tp": 3}) for rank, each in waits.items()}
    message = diagnose(reports)
    assert message.startswith("all ranks wait for each other: rank 0 (tp 0) waits in all_reduce over tp")
    assert "; rank 1 (tp 1) waits" in message


@given(missing=st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_a_rank_without_a_report_hangs(missing: set[int]) -> None:
    waits = PendingOperation(axis="all ranks", kind="all_reduce", ranks=(0, 1, 2, 3), sequence=1)
    message = diagnose({rank: report(rank, waits, done={"all ranks": 1}) for rank in range(4) if rank not in missing})
    assert {int(rank) for rank in re.findall(r"rank (\d) \([^)]*\) hangs", message)} == missing


def test_the_first_rule_that_matches_decides_alone() -> None:
    late_wait = PendingOperation(axis="tp", kind="all_reduce", ranks=(0, 1), sequence=8)
    early_wait = PendingOperation(axis="tp", kind="all_reduce", ranks=(0, 1), sequence=9)
    reports = {
        0: report(0, late_wait, done={"tp": 8}),
        1: report(1, early_wait, done={"tp": 9}),
        2: report(2, None, done={"tp": 9}),
        3: report(3, early_wait, done={"tp": 9}),
    }
    for missing, idle, expected in (({3}, {2}, {3}), ({3}, set(), {3}), (set(), {2}, {2}), (set(), set(), {0})):
        remaining = {
            rank: each if rank in idle or each.waits is not None else replace(each, waits=early_wait)
            for rank, each in reports.items()
            if rank not in missing
        }
        message = diagnose(remaining)
        assert {int(rank) for rank in re.findall(r"rank (\d) \([^)]*\) hangs", message)} == expected


def test_reports_round_trip_and_unreadable_ones_are_ignored(tmp_path: Path) -> None:
    assert explain(tmp_path) is None
    waits = PendingOperation(axis="tp", kind="all_reduce", ranks=(0, 1), sequence=3)
    old, new = attempt_folder(tmp_path, 9), attempt_folder(tmp_path, 10)
    for rank, each in ((0, waits), (1, None)):
        write_report(new, report(rank, each, done={"tp": 3}))
        write_report(old, report(rank, waits, done={"tp": 3}))
    assert read_reports(new) == {0: report(0, waits, done={"tp": 3}), 1: report(1, None, done={"tp": 3})}
    for rank, text in ((2, "{"), (3, "[]"), (4, '{"rank": 4, "waits": null}')):
        (new / f"rank-{rank}.json").write_text(text)
    assert set(read_reports(new)) == {0, 1}
    # The last attempt counts, in which ranks 2 and 3 left no readable report.
    assert str(explain(tmp_path)).startswith("rank 2 (dp_shard 1, tp 0) hangs")

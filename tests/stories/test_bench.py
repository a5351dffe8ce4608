"""Benchmarks of a coordinator: each, at its smallest size, reports its results, and its parts report their failures."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Fanin, Outcome, fanin_in_process, script_in_process, uncoded, usage_line
from support.errors import raises

from fanin.commands.bench import BENCHES
from fanin.commands.bench.harness.report import percentile, sampled
from fanin.commands.bench.harness.rss import PeakRss, tree
from fanin.commands.console.processes import Children
from fanin.protos.errors import Conflict, Unavailable

ROOT = Path(__file__).parents[2]
MODEL_BYTES = 104_856
"""A tenth of 2^20 bytes, in complete float32 values."""
TINY = ("--megabytes", "0.1")
SCRIPTS = ("fold", "machine", "restart", "collectives")
"""The benchmarks in ``benchmarks/`` with the options of ``fanin bench``."""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def bench(fanin: Fanin, capsys: pytest.CaptureFixture[str]) -> Fanin:
    """Return a function that runs a benchmark: a script, or ``fanin bench``."""

    def run(name: str, *words: object) -> Outcome:
        if name in SCRIPTS:
            return script_in_process(ROOT / "benchmarks" / f"{name}.py", capsys)(*words)
        return fanin("bench", name, *words)

    return run


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    """Child processes, which end with the test."""
    with Children(tmp_path) as children:
        yield children


def test_rounds_are_timed_and_their_bytes_counted(fanin: Fanin, tmp_path: Path) -> None:
    outcome = fanin("bench", "rounds", "--clients", "2", *TINY, "--rounds", "2", "--folder", tmp_path, "--json")
    assert outcome.status == 0, outcome.err
    # Standard output has one JSON object and nothing else.
    row = json.loads(outcome.out)
    assert (row["clients"], row["rounds"], row["model_bytes"]) == (2, 2, MODEL_BYTES)
    for key in ("seconds_per_round", "bare_seconds_per_round"):
        low, high = row[f"{key}_samples"]
        assert min(low, high) > 0.0 and row[key] == (low + high) / 2
    assert row["ratio_to_bare"] == row["seconds_per_round"] / row["bare_seconds_per_round"]
    assert row["least_bytes_on_wire"] == 2 * 2 * MODEL_BYTES
    # Headers and the table of the parameters add a few bytes, but there is no second transfer.
    assert all(0 < num_bytes - 4 * MODEL_BYTES < 4096 for num_bytes in row["bytes_on_wire_samples"])
    assert 2 * MODEL_BYTES <= row["disk_bytes_per_round"]["updates"] < 2 * MODEL_BYTES + 2 * 8192
    assert row["disk_bytes_per_round"]["versions"] >= MODEL_BYTES
    assert row["machine"]["cpus"] >= 1
    # The files of the measurement remain, because ``--folder`` names their place.
    assert (tmp_path / "fanin-state" / "fanin.db").exists()


def test_the_fold_is_timed_alternately_with_numpys_addition(bench: Fanin, tmp_path: Path) -> None:
    out = tmp_path / "fold.json"
    outcome = bench("fold", *TINY, "--repeats", "3", "--json", out)
    assert outcome.status == 0, outcome.err
    row = json.loads(out.read_text())
    pairs = zip(row["fold_seconds_samples"], row["numpy_add_seconds_samples"], strict=True)
    assert row["speed_over_numpy_add_samples"] == [numpy_s / fanin_s for fanin_s, numpy_s in pairs]
    assert "speed_over_numpy_add " in outcome.out and "_samples" not in outcome.out


def test_an_event_of_the_machine_is_timed_in_a_small_and_in_a_large_round(bench: Fanin) -> None:
    outcome = bench("machine", "--devices", "1000", "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    # 1,000 check-ins, 100 devices that give up and return, 1,000 commits: two full batches of 1,000 events.
    assert len(row["event_us_samples"]) == 2
    assert row["event_us"] > 0.0 and row["event_us_100_devices"] > 0.0


@pytest.mark.nightly
def test_memory_is_that_of_the_coordinator_over_idle(fanin: Fanin) -> None:
    outcome = fanin("bench", "memory", "--clients", "2", *TINY, "--rounds", "1", "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert row["peak_rss_over_idle_bytes"] == row["peak_rss_bytes"] - row["idle_rss_bytes"] > 0
    assert row["peak_rss_over_idle_models"] == row["peak_rss_over_idle_bytes"] / MODEL_BYTES
    # Python with numpy, gRPC and SQLAlchemy takes this much memory, and not ten times as much.
    assert 30 << 20 < row["idle_rss_bytes"] < 300 << 20
    assert row["rule"] == "weighted_mean"


@pytest.mark.nightly
def test_a_round_resumes_after_each_restart(bench: Fanin) -> None:
    outcome = bench("restart", "--clients", "2", "--megabytes", "2", "--restarts", "1", "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert row["seconds_to_serving_samples"] == [row["seconds_to_serving"]]
    assert row["seconds_to_serving"] > 0.0 and row["seconds_from_last_update_to_version"] > 0.0


@pytest.mark.nightly
def test_check_ins_are_counted_on_persistent_and_on_new_connections(fanin: Fanin) -> None:
    words = ("--devices", "40", "--calls", "20", "--new-calls", "5", "--connections", "4")
    outcome = fanin("bench", "checkins", *words, "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    for kind, count in (("kept", 20), ("new", 5)):
        samples = row[f"{kind}_latency_seconds_samples"]
        assert len(samples) == row[f"{kind}_check_ins"] == count
        assert min(samples) <= row[f"{kind}_p50_seconds"] <= row[f"{kind}_p99_seconds"] == max(samples)
        assert row[f"{kind}_check_ins_per_second"] > 0.0


def wrong_usage(bench: Fanin, name: str, *words: object) -> str:
    """Run a benchmark with wrong options, and return its one-line error, which comes before any measurement."""
    command = (f"benchmarks/{name}.py", "python") if name in SCRIPTS else (f"bench {name}",)
    return usage_line(bench(name, *words), *command)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rounds", "--clients", "-1"), "Invalid value for '--clients': -1 is not in the range x>=1"),
        (("memory", "--clients", "0"), "Invalid value for '--clients': 0 is not in the range x>=1"),
        (("restart", "--clients", "many"), "Invalid value for '--clients': 'many' is not a valid integer range"),
        (("rounds", "--rounds", "0"), "Invalid value for '--rounds': 0 is not in the range x>=1"),
        (("memory", "--rounds", "-1"), "Invalid value for '--rounds': -1 is not in the range x>=1"),
        (("rounds", "--rounds", "1.5"), "Invalid value for '--rounds': '1.5' is not a valid integer range"),
        (("restart", "--restarts", "0"), "Invalid value for '--restarts': 0 is not in the range x>=1"),
        (("fold", "--repeats", "0"), "Invalid value for '--repeats': 0 is not in the range x>=1"),
        (("memory", "--megabytes", "0"), "--megabytes: got 0, expected 4 bytes or more, up to 65536"),
        (("memory", "--megabytes", "nan"), "--megabytes: got nan, expected 4 bytes or more, up to 65536"),
        (("fold", "--megabytes", "inf"), "--megabytes: got inf, expected 4 bytes or more, up to 65536"),
        (("rounds", "--megabytes", "-3"), "--megabytes: got -3, expected 4 bytes or more, up to 65536"),
        (("rounds", "--megabytes", "big"), "Invalid value for '--megabytes': 'big' is not a valid float"),
        (
            ("checkins", "--devices", "10"),
            "--devices, --calls, --new-calls, --connections: got 10, 10000, 2000 and 32, expected 2 or more of each, a",
        ),
        (("checkins", "--calls", "x"), "Invalid value for '--calls': 'x' is not a valid integer"),
        (("machine", "--devices", "10"), "Invalid value for '--devices': 10 is not in the range x>=1000"),
        (("fold", "--clients", "3"), "No such option: --clients"),
        (("rounds", "more"), "Got unexpected extra argument (more)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_options_are_reported(bench: Fanin, words: tuple[str, ...], message: str) -> None:
    # The text to its end, or the part of it that fits into one line.
    assert wrong_usage(bench, *words).removesuffix(" device for each call") == message


@pytest.mark.parametrize("name", [*BENCHES, *SCRIPTS])
def test_an_unwritable_file_is_reported_before_any_measurement(bench: Fanin, tmp_path: Path, name: str) -> None:
    missing = tmp_path / "missing" / "out.json"
    message = wrong_usage(bench, name, "--json", missing)
    assert message == f"--json: {missing} cannot be written, {missing.parent} is not a folder; create it"
    message = wrong_usage(bench, name, "--json", tmp_path)
    assert message == f"--json: {tmp_path} is a folder, name a file"


def test_a_folder_that_is_not_empty_is_refused(bench: Fanin, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("something")
    message = wrong_usage(bench, "rounds", "--folder", tmp_path)
    assert message == f"--folder: {tmp_path} is not empty; name a new one"
    message = wrong_usage(bench, "rounds", "--folder", file)
    assert message == f"Invalid value for '--folder': Directory '{file}' is a file"


@pytest.mark.parametrize("words", [(), ("--help",)], ids=["nothing", "help"])
def test_help_names_every_benchmark(fanin: Fanin, words: tuple[str, ...]) -> None:
    outcome = fanin("bench", *words)
    assert outcome.status == 0
    assert all(f"\n  {name} " in outcome.out for name in BENCHES)


def test_an_unknown_benchmark_is_reported_with_the_known_names(fanin: Fanin) -> None:
    outcome = fanin("bench", "nothing")
    assert (outcome.status, outcome.out) == (2, "")
    names = "rounds, memory, checkins, secagg"
    assert uncoded(outcome.err) == f"fanin bench: got 'nothing', expected one of {names}\n"


def test_a_child_that_fails_is_reported_with_its_last_line(children: Children) -> None:
    process = children.start("good", [sys.executable, "-c", "pass"])
    assert process.wait() == 0
    children.check_failed()
    with raises(Conflict, "good ended with status 0: "):
        children.check()
    failed_process = children.start("bad", [sys.executable, "-c", "print('one'); raise SystemExit('two')"])
    assert failed_process.wait() == 1
    with raises(Conflict, "bad ended with status 1: two"):
        children.check_failed()


def test_a_coordinator_that_cannot_start_is_reported(children: Children, tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as excinfo:
        children.serve(tmp_path / "state", "nowhere")
    assert str(excinfo.value).startswith("the coordinator did not start: fanin serve: listen: got 'nowhere', expected")


GROW = """
import subprocess, sys
held = bytearray({size})
if {deeper}:
    subprocess.run([sys.executable, "-c", {inner!r}])
print("grown", flush=True)
sys.stdin.read()
"""


def test_memory_is_counted_with_children_that_have_ended() -> None:
    own_bytes, child_bytes = 40 << 20, 60 << 20
    inner = f"import time; held = bytearray({child_bytes}); time.sleep(0.5)"
    code = "import sys; sys.stdin.readline()\n" + GROW.format(size=own_bytes, deeper=True, inner=inner)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        with PeakRss(process.pid) as peak:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"grown\n"
        assert list(tree(process.pid)) == [process.pid]
        assert own_bytes + child_bytes < peak.peak_bytes - peak.idle_bytes < own_bytes + child_bytes + (40 << 20)


def test_medians_and_percentiles() -> None:
    assert sampled("x_seconds", [3.0, 1.0, 2.0]) == {"x_seconds": 2.0, "x_seconds_samples": [3.0, 1.0, 2.0]}
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (51.0, 100.0, 7.0)


@pytest.mark.nightly
def test_the_peers_do_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    words = ["--clients", "2", "--megabytes", "0.1", "--rounds", "2", "--json", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "compare.py"), *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    row = json.loads(out.read_text())
    for name in ("fanin", "flower", "nvflare"):
        assert len(row[name]["seconds_per_round_samples"]) == 2
    for name, version in (("flower", "1.41."), ("nvflare", "2.9.")):
        assert row[name]["version"].startswith(version)
        ratio = row[name]["seconds_per_round"] / row["fanin"]["seconds_per_round"]
        assert row[name]["ratio_to_fanin"] == ratio > 1.0

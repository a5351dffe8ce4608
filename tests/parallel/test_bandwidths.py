"""Measurements between ranks: the link that a measurement recovers, refused settings, and the command end to end."""

import json
from pathlib import Path

import pytest
from house.tree import ROOT
from hypothesis import given
from hypothesis import strategies as st
from support.commands import Fanin, script_in_process, uncoded, usage_line

from fanin.datacenter.network.bandwidths import CollectiveTiming, fit_link, predicted_seconds
from fanin.datacenter.network.collectives import COLLECTIVES, RING
from fanin.datacenter.network.counters import ALL_REDUCE, SEND, Amount
from fanin.datacenter.network.links import Link


@pytest.fixture
def collectives(capsys: pytest.CaptureFixture[str]) -> Fanin:
    """Return the benchmark."""
    return script_in_process(ROOT / "benchmarks" / "collectives.py", capsys)


def predicted_timing(link: Link, size_bytes: int, num_ranks: int) -> CollectiveTiming:
    """Return an all-reduce that takes the time that the planner predicts."""
    amount = Amount(num_calls=1, size_bytes=size_bytes)
    seconds = link.seconds(ALL_REDUCE, amount, num_ranks)
    return CollectiveTiming(
        collective="all_reduce",
        size_bytes=size_bytes,
        seconds=seconds,
        seconds_samples=(seconds,),
        calls=1,
        counted_bytes=size_bytes,
        expected_bytes=size_bytes,
        wire_bytes=amount.wire_bytes(ALL_REDUCE, num_ranks),
        algbw_gb_per_second=size_bytes / seconds / 1e9,
        busbw_gb_per_second=size_bytes / seconds / 1e9 * COLLECTIVES["all_reduce"].bus(num_ranks),
    )


@given(
    latency_s=st.floats(1e-6, 1e-2),
    gb_per_second=st.floats(0.1, 900.0),
    num_ranks=st.integers(2, 64),
    sizes=st.lists(st.integers(10, 30), min_size=2, max_size=5, unique=True),
)
def test_the_fit_recovers_the_planners_link(
    latency_s: float, gb_per_second: float, num_ranks: int, sizes: list[int]
) -> None:
    link = Link(name="given", latency_s=latency_s, bytes_per_second=gb_per_second * 1e9, source="here")
    rows = [predicted_timing(link, 2**size, num_ranks) for size in sizes]
    fit = fit_link(rows, num_ranks)
    for row in rows:
        assert predicted_seconds(row, fit, num_ranks) == pytest.approx(row.seconds, rel=1e-6)
        assert row.busbw_gb_per_second == pytest.approx(row.wire_bytes / row.seconds / 1e9)


def test_with_one_size_all_time_counts_for_the_bytes() -> None:
    link = Link(name="given", latency_s=0.0, bytes_per_second=2e9, source="here")
    fit = fit_link([predicted_timing(link, 2**20, 4)], 4)
    assert (fit.latency_s, fit.bytes_per_second) == (0.0, pytest.approx(2e9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1"), "ranks: got 1, expected at least 2: a single rank sends nothing"),
        (("--backend", "mpi"), "backend: got 'mpi', expected gloo or nccl"),
        (("--backend", "nccl", "--nproc", "999"), "backend: got 'nccl' for 999 ranks, expected a GPU for each, and"),
        (("--megabytes", "1", "--megabytes", "0"), "--megabytes: got 0.0, expected positive numbers"),
        (("--megabytes", "nan"), "--megabytes: got nan, expected positive numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value).strip("-"),
)
def test_impossible_measurements_are_refused_before_a_process_starts(
    collectives: Fanin, options: tuple[str, ...], message: str
) -> None:
    assert usage_line(collectives(*options), "benchmarks/collectives.py", "python").startswith(message)


@pytest.mark.nightly
def test_four_ranks_are_correct_and_timed(collectives: Fanin, tmp_path: Path) -> None:
    out, num_ranks = tmp_path / "found.json", 4
    sizes = ("--megabytes", "0.01", "--megabytes", "1")
    completed = collectives("--nproc", str(num_ranks), *sizes, "--repeats", "3", "--json", out)
    assert (completed.status, uncoded(completed.err)) == (0, "")
    assert f"{num_ranks} ranks over gloo are numpy's" in completed.out
    report = json.loads(out.read_text())
    rows = report["collectives"]
    assert [(row["collective"], row["size_bytes"] > 10**5) for row in rows] == [
        (name, large) for name in COLLECTIVES for large in (False, True)
    ]
    for row in rows:
        assert row["counted_bytes"] == row["expected_bytes"]
        assert len(row["seconds_samples"]) == 3
        assert min(row["seconds_samples"]) <= row["seconds"] <= max(row["seconds_samples"])
        assert row["algbw_gb_per_second"] == pytest.approx(row["size_bytes"] / row["seconds"] / 1e9)
        assert row["predicted_seconds"] > 0.0
        if row["collective"] == RING:
            assert COLLECTIVES[RING].kind == SEND
            assert row["wire_bytes"] == 2 * (num_ranks - 1) / num_ranks * row["size_bytes"]
    assert f"fanin plan --link {report['link']['gb_per_second']:.3g} " in completed.out

"""Ranks send what the formulas predict: to the byte, and by torch's own counter."""

import json
from pathlib import Path

import pytest
from parallel.programs import Programs
from parallel.traffic import CELLS, FIRST, NUM_RANKS

from fanin.datacenter.network.counters import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Amount, by_axis
from fanin.datacenter.planner.traffic import predict_traffic

KINDS = {"all_reduce": ALL_REDUCE, "allreduce_": ALL_REDUCE, "all_gather_into_tensor": ALL_GATHER}
KINDS |= {
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
}
Results = list[dict[str, dict[str, dict[str, list[int]]]]]


NIGHTLY = [name for name in CELLS if name not in FIRST]


def run(programs: Programs, folder: Path, suite: str) -> Results:
    """Return the results of ``traffic.py``, by rank."""
    programs.check("traffic", folder, suite, warning_action="default")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def first_results(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Results:
    """Return the results of the cells that run in CI."""
    return run(programs, tmp_path_factory.mktemp("traffic"), "first")


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Results:
    """Return the results of all cells."""
    return run(programs, tmp_path_factory.mktemp("traffic"), "all")


def predicted_counts(cell: str, rank: int) -> dict[str, list[int]]:
    job = CELLS[cell].job()
    counts = predict_traffic(job, rank // (NUM_RANKS // job.parallel.mesh.pp))
    return {" ".join(key): [amount.num_calls, amount.size_bytes] for key, amount in counts.items()}


@pytest.mark.parametrize("cell", FIRST)
def test_each_rank_sends_the_predicted_bytes(first_results: Results, cell: str) -> None:
    check_bytes(first_results, cell)
    check_calls(first_results, cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", NIGHTLY)
def test_each_rank_sends_the_predicted_bytes_in_every_other_job(all_results: Results, cell: str) -> None:
    check_bytes(all_results, cell)
    check_calls(all_results, cell)


def check_bytes(results: Results, cell: str) -> None:
    parallel = CELLS[cell].job().parallel
    for rank in range(NUM_RANKS):
        actual, expected = results[rank][cell]["counts"], predicted_counts(cell, rank)
        if parallel.mesh.dp_replicate > 1 and not parallel.sharded:
            # DistributedDataParallel alone decides how many buckets it makes.
            assert {key: size for key, (_, size) in actual.items()} == {
                key: size for key, (_, size) in expected.items()
            }
        else:
            assert actual == expected, f"rank {rank}"


def check_calls(results: Results, cell: str) -> None:
    """Compare the calls with torch's own counter, where it can count."""
    job = CELLS[cell].job()
    if (
        job.num_chunks > 1
        or job.parallel.pipelined
        or (job.parallel.mesh.dp_replicate > 1 and not job.parallel.sharded)
    ):
        return
    expected: dict[str, int] = {}
    for (_, kind), amount in predict_traffic(job).items():
        expected[kind] = expected.get(kind, 0) + amount.num_calls
    actual: dict[str, int] = {}
    for operator, calls in results[0][cell]["debug"].items():
        kind = KINDS[operator.rpartition(".")[2]]
        actual[kind] = actual.get(kind, 0) + calls
    assert actual == expected


def test_a_split_sequence_is_gathered_and_scattered_instead_of_summed(first_results: Results) -> None:
    # Korthikanti et al. 2022, section 4.2.2: a layer has two of each in its forward pass, and their counterparts in the
    # backward pass. The embedding and the head have one of each. The loss of the split logits always has two sums.
    num_layers, matrices = 4, "c10d_functional"
    tensor_calls, sequence_calls = (row["debug"] for row in (first_results[0]["tensor"], first_results[0]["sequence"]))
    sums = 4 * num_layers + 2
    # The norm of the gradients needs one more sum.
    assert tensor_calls == {f"{matrices}.all_reduce": sums + 1, "c10d.allreduce_": 2}
    assert sequence_calls == {
        f"{matrices}.reduce_scatter_tensor": sums,
        f"{matrices}.all_gather_into_tensor": sums,
        "c10d.allreduce_": 2,
        # The gradients of two norms in each layer and of the last norm, and the norm of all gradients.
        f"{matrices}.all_reduce": 2 * num_layers + 1 + 1,
    }


def test_amounts_add_up_by_axis() -> None:
    counts = {
        ("tp", ALL_REDUCE): Amount(num_calls=2, size_bytes=10),
        ("tp", ALL_GATHER): Amount(num_calls=1, size_bytes=5),
        ("pp", SEND): Amount(num_calls=1, size_bytes=7),
    }
    assert by_axis(counts) == {"tp": 15, "pp": 7}


@pytest.mark.parametrize(
    ("kind", "expected"), [(ALL_REDUCE, 150.0), (ALL_GATHER, 75.0), (REDUCE_SCATTER, 75.0), (SEND, 100.0)]
)
def test_a_ring_sends_a_share_of_the_payload(kind: str, expected: float) -> None:
    assert Amount(num_calls=1, size_bytes=100).wire_bytes(kind, 4) == expected

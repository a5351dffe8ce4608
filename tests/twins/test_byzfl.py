"""Robust rules against those of byzfl 0.0.11 and of Flower 1.41, on the same Updates.

A golden file has byzfl's results (tests/golden/make_byzfl.py). Where an oracle differs, docs/howto/rules.md says why.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, Strategy
from flwr.serverapp.strategy.bulyan import Bulyan as FlowerBulyan
from flwr.serverapp.strategy.bulyan import aggregate_n_closest_weights
from flwr.serverapp.strategy.multikrum import select_multikrum
from support.folds import fresh

from fanin.edge.tensors import Float64s, TensorTable
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.robust.centre import CentredClipping, GeometricMedian
from fanin.server.aggregation.robust.middle import MeanAroundMedian, Median
from fanin.server.aggregation.robust.nearest import Bulyan, Krum
from fanin.server.aggregation.rules import ColumnRule, TrimmedMean
from fanin.server.aggregation.sets import SetFold

CASES = json.loads((Path(__file__).parents[1] / "golden" / "byzfl.json").read_text("utf-8"))
IDS = [f"{len(case['vectors'])}-{case['f']}" for case in CASES]


def ours(rule: ColumnRule, vectors: Sequence[Sequence[int]]) -> Float64s:
    """Return fanin's aggregate of Updates with a grid of 1."""

    def source(device: str, _scale: int) -> Contribution:
        values = np.array(vectors[int(device)], np.int32)
        update = fresh(256, (0,), CodecSpec(name="fixed32", max_shift=0), [values])
        return replace(update, read=lambda first, last: values[first:last])

    table = TensorTable.of({"w": (len(vectors[0]),)})
    devices = [f"{index:03}" for index in range(len(vectors))]
    return SetFold(rule, table, (0,), source, 200).complete(devices).part(0, table.num_values)


def flowers(strategy: Strategy, vectors: Sequence[Sequence[int]]) -> Float64s:
    """Return Flower's aggregate of the same arrays."""
    replies: list[Any] = []
    for vector in vectors:
        arrays = ArrayRecord([np.array(vector, np.float64)])
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        # A Message needs the identity of a running app.
        replies.append(SimpleNamespace(content=content, has_error=lambda: False))
    record, _ = strategy.aggregate_train(1, replies)
    assert record is not None
    (array,) = record.to_numpy_ndarrays()
    return array


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_median_is_that_of_byzfl_and_of_flower(case: dict[str, Any]) -> None:
    outcome = ours(Median(), case["vectors"])
    assert outcome.tolist() == case["results"]["median"]
    assert outcome.tolist() == flowers(FedMedian(), case["vectors"]).tolist()


def selected(vectors: Sequence[Sequence[int]], f: int, m: int) -> Float64s:
    """Return the mean of the Updates that Flower's Krum selects."""
    records = [
        RecordDict({"arrays": ArrayRecord([np.array(vector, np.float64)]), "n": MetricRecord({"row": row})})
        for row, vector in enumerate(vectors)
    ]
    rows = [int(record.metric_records["n"]["row"]) for record in select_multikrum(records, f, m)]
    mean: Float64s = np.array([vectors[row] for row in rows], np.float64).mean(axis=0)
    return mean


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_krum_and_multi_krum_are_those_of_flower(case: dict[str, Any]) -> None:
    vectors, f = case["vectors"], case["f"]
    for m in (1, len(vectors) - f):
        np.testing.assert_allclose(ours(Krum(f, m), vectors), selected(vectors, f, m), rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_krum_of_byzfl_has_one_neighbour_more_than_the_paper(case: dict[str, Any]) -> None:
    """byzfl adds up n - f - 1 distances. The paper's n - f - 2 of one attacker less are as many."""
    vectors, f = case["vectors"], case["f"]
    for name, m in (("krum", 1), ("multi_krum", len(vectors) - f)):
        np.testing.assert_allclose(ours(Krum(f - 1, m), vectors), case["results"][name], rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_mean_around_the_median_is_that_of_byzfl_and_of_the_last_step_of_flowers_bulyan(case: dict[str, Any]) -> None:
    vectors, f = case["vectors"], case["f"]
    outcome = ours(MeanAroundMedian(f), vectors)
    np.testing.assert_allclose(outcome, case["results"]["meamed"], rtol=1e-12)
    rows = [[np.array(vector, np.float64)] for vector in vectors]
    (expected,) = aggregate_n_closest_weights([np.median(vectors, axis=0)], rows, len(rows) - f)
    np.testing.assert_allclose(outcome, expected, rtol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if len(case["vectors"]) >= 4 * case["f"] + 3])
def test_bulyan_is_flowers_of_the_updates_that_flowers_krum_chooses_one_after_another(case: dict[str, Any]) -> None:
    """Flower's own selection is one Multi-Krum. With its Krum again and again, as in the paper, its Bulyan is ours."""
    vectors, f = case["vectors"], case["f"]

    def select(records: list[RecordDict], num_attackers: int, num: int) -> list[RecordDict]:
        rest, chosen = list(records), list[RecordDict]()
        while len(chosen) < num:
            (best,) = select_multikrum(rest, num_attackers, 1)
            rest = [record for record in rest if record is not best]
            chosen.append(best)
        return chosen

    strategy = FlowerBulyan(num_malicious_nodes=f, selection_rule=select)
    np.testing.assert_allclose(ours(Bulyan(f), vectors), flowers(strategy, vectors), rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_trimmed_mean_is_that_of_byzfl(case: dict[str, Any]) -> None:
    """fanin trims a share of the Updates, rounded down; byzfl trims f at each end."""
    vectors, f = case["vectors"], case["f"]
    outcome = ours(TrimmedMean((f + 0.5) / len(vectors)), vectors)
    np.testing.assert_allclose(outcome, case["results"]["trimmed_mean"], rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_geometric_median_is_that_of_byzfl_from_the_mean(case: dict[str, Any]) -> None:
    """byzfl begins at zero, fanin and the paper's authors at the mean. Many steps lead to the same point."""
    scale = np.abs(case["vectors"]).max()
    for iterations, name in ((3, "geometric_median_3"), (200, "geometric_median_200")):
        outcome = ours(GeometricMedian(iterations, 1e-3), case["vectors"])
        np.testing.assert_allclose(outcome, case["results"][name], rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_centred_clipping_and_norm_bounding_are_those_of_byzfl(case: dict[str, Any]) -> None:
    for iterations, name in ((3, "centred_clipping"), (1, "norm_bounding")):
        outcome = ours(CentredClipping(iterations, 2e5), case["vectors"])
        np.testing.assert_allclose(outcome, case["results"][name], rtol=1e-8)

"""The metrics of logits against plain loops, and against scikit-learn and torchmetrics on recorded cases."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.metrics.logits import NUM_BINS, auc, ece, nll, top_k
from fanin.edge.metrics.metric import METRICS
from fanin.edge.runtimes.base import Inputs

CASES: Final = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text("utf-8"))
TIMES: Final = {"ece": 1e-5}
"""torchmetrics computes in float32."""


def chances(row: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def plain_area(scores: Sequence[float], is_positive: Sequence[bool]) -> float:
    """The share of pairs that are in order, one pair at a time."""
    wins = [
        1.0 if mine > other else 0.5 if mine == other else 0.0
        for mine, positive in zip(scores, is_positive, strict=True)
        for other, negative in zip(scores, is_positive, strict=True)
        if positive and not negative
    ]
    return sum(wins) / len(wins)


def plain(name: str, logits: Sequence[Sequence[float]], targets: Sequence[int]) -> float:
    """The four metrics, example by example."""
    rows, num = [chances(row) for row in logits], len(targets)
    if name == "nll":
        return -sum(math.log(row[label]) for row, label in zip(rows, targets, strict=True)) / num
    if name.startswith("top"):
        best = [sorted(range(len(row)), key=lambda each: (-row[each], each)) for row in logits]
        k = int(name[3:].removesuffix("_accuracy"))
        return sum(label in order[:k] for label, order in zip(targets, best, strict=True)) / num
    if name == "ece":
        gaps = [0.0] * NUM_BINS
        for row, label in zip(rows, targets, strict=True):
            number = min(NUM_BINS, max(1, math.ceil(max(row) * NUM_BINS))) - 1
            gaps[number] += (row.index(max(row)) == label) - max(row)
        return sum(map(abs, gaps)) / num
    classes = [c for c in range(len(rows[0])) if 0 < targets.count(c) < num]
    if len(rows[0]) == 2:
        return plain_area([row[1] - row[0] for row in logits], [label == 1 for label in targets])
    areas = [plain_area([row[c] for row in rows], [label == c for label in targets]) for c in classes]
    return sum(areas) / len(areas)


def arrays(case: dict[str, Any]) -> tuple[Inputs, Inputs]:
    if "scores" in case:
        return np.array(case["scores"], np.float32)[:, None], np.array(case["targets"], np.float32)[:, None]
    return np.array(case["logits"], np.float32), np.array(case["targets"], np.int32)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_equal_those_of_scikit_learn_and_torchmetrics(number: int) -> None:
    case = CASES[number]
    logits, targets = arrays(case)
    assert {"nll", "auc", "ece"} <= case["values"].keys()
    for name, expected in case["values"].items():
        value = METRICS[name].function(logits, targets)
        assert value == pytest.approx(expected, abs=TIMES.get(name, 1e-9)), name


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-6, 6), min_size=4, max_size=4), st.integers(0, 3)), min_size=2, max_size=12
    ),
    num_classes=st.integers(2, 4),
)
def test_values_equal_those_of_plain_loops(rows: list[tuple[list[int], int]], num_classes: int) -> None:
    # Quarters have no rounding in float32, and no confidence on the edge of a bin except that of equal logits.
    logits = [[value / 4 for value in row[:num_classes]] for row, _ in rows]
    targets = [label % num_classes for _, label in rows]
    arguments = np.array(logits, np.float32), np.array(targets, np.int32)
    for name in ("nll", "ece", *(f"top{k}_accuracy" for k in (2, 3) if k < num_classes)):
        if name == "ece" and any(abs(max(chances(row)) * NUM_BINS % 1 - 0.5) > 0.4999 for row in logits):
            continue  # both are right: the edge belongs to one bin or the other by the last bit
        assert METRICS[name].function(*arguments) == pytest.approx(plain(name, logits, targets), abs=1e-9), name
    if len(set(targets)) > 1:
        assert auc(*arguments) == pytest.approx(plain("auc", logits, targets), abs=1e-9)
    else:
        assert auc(*arguments) is None


def test_one_value_is_the_logit_of_the_second_of_two_classes() -> None:
    scores, targets = np.array([-1.5, 0.0, 2.0], np.float32), np.array([0, 1, 1], np.int32)
    pairs = np.stack([np.zeros_like(scores), scores], axis=1)
    for function in (nll, auc, ece):
        assert function(scores, targets.astype(np.float32)) == function(pairs, targets)


def test_large_logits_have_a_finite_likelihood() -> None:
    logits = np.array([[0.0, 1000.0], [1000.0, 0.0]], np.float32)
    assert nll(logits, np.array([1, 1], np.int32)) == 500.0


@pytest.mark.parametrize("function", [nll, auc, ece, top_k(2)])
def test_values_without_classes_are_refused(function: Any) -> None:
    values = np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="choose a metric of values"):
        function(values, values)


def test_as_many_places_as_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected more than 3"):
        top_k(3)(np.zeros((1, 3), np.float32), np.zeros(1, np.int32))

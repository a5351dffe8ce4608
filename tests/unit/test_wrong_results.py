"""States and results of another type or form: the error names the rule or the outer optimizer, and its method."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.errors import raises
from support.folds import fresh

from fanin.edge.codecs.grid import NUM_REACHES
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation import fold
from fanin.server.aggregation.contract import check_rule
from fanin.server.aggregation.rules import WeightedMean
from fanin.server.aggregation.sets import Aggregate, SetFold, Submission


class Mean:
    """The mean as a ``ColumnRule``."""

    num_passes = 2

    def begin(self, num_updates: int) -> dict[str, np.ndarray]:
        return {"largest": np.zeros(num_updates, np.int64)}

    def look(self, state: dict[str, np.ndarray], columns: np.ndarray, number: int) -> dict[str, np.ndarray]:
        return {"largest": np.maximum(state["largest"], abs(columns).max(axis=0, initial=0))}

    def reduce(self, state: dict[str, np.ndarray], columns: np.ndarray) -> np.ndarray:
        return columns.sum(axis=1).astype(np.float64) / columns.shape[1]


def mine(base: type, **members: object) -> Any:
    """Return an object of a class ``Mine`` with these members instead of those of ``base``."""
    return type("Mine", (base,), members)()


def finish(change: Callable[[np.ndarray], object]) -> Any:
    return mine(WeightedMean, finish=lambda self, *arguments: change(fold.finish(*arguments)))


def folded(rule: Any) -> Aggregate:
    """Return the aggregate of one Update of two values."""
    values = np.ones(2, np.int32)
    update = fresh(256, (0,), CodecSpec(name="fixed32", max_shift=4), [values])
    submission = Submission(update=update, read=lambda first, last: values[first:last])
    return SetFold(rule, TensorTable.of({"w": (2,)}), (0,), {"a": submission}.__getitem__).complete(["a"])


def test_a_rule_with_a_state_keeps_the_contract() -> None:
    check_rule(mine(Mean))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (finish(lambda change: change[:1]), "finish returned float64 (1,), expected float64 (72,)"),
        (finish(np.mean), "finish returned float64 (), expected float64 (72,)"),
        (finish(lambda change: change.astype(np.float32)), "finish returned float32 (72,), expected float64 (72,)"),
        (finish(list), "finish returned list, expected float64 (72,)"),
        (finish(lambda change: None), "finish returned NoneType, expected float64 (72,)"),
        (finish(lambda change: change * np.nan), "finish returned NaN or infinity, expected finite values"),
        (mine(WeightedMean, begin=lambda self, table: None), "begin returned NoneType, expected a PartialSum"),
        (mine(WeightedMean, begin=lambda self, table: {"sum": 0}), "begin returned dict, expected a PartialSum"),
        (mine(WeightedMean, accept=lambda self, *_: None), "accept returned NoneType, expected a PartialSum"),
        (mine(WeightedMean, merge=lambda self, *_: None), "merge returned NoneType, expected a PartialSum"),
        (
            mine(WeightedMean, begin=lambda self, table: replace(fold.begin(table), reaches=[])),
            f"begin returned a PartialSum with list as its reaches, expected int64 (3, {NUM_REACHES})",
        ),
        (
            mine(WeightedMean, begin=lambda self, table: replace(fold.begin(table), counts={})),
            "begin returned a PartialSum with dict as its counts, expected a Counter",
        ),
        (mine(Mean, begin=lambda self, num: None), "begin returned NoneType, expected a mapping of arrays"),
        (mine(Mean, begin=lambda self, num: {"n": 3}), "begin returned int as its state 'n', expected an array"),
        (mine(Mean, look=lambda self, *_: None), "look returned NoneType, expected a mapping of arrays"),
        (mine(Mean, look=lambda self, *_: {"n": "3"}), "look returned str as its state 'n', expected an array"),
        (
            mine(Mean, reduce=lambda self, state, columns: columns[:, 0]),
            "reduce returned int64 (72,), expected float64 (72,)",
        ),
    ],
)
def test_a_wrong_result_of_a_rule_names_its_method(rule: Any, text: str) -> None:
    with raises(AssertionError, f"rule Mine: {text}; correct the rule"):
        check_rule(rule)


@pytest.mark.parametrize("num_passes", ["1", 0, -1, True, 1.0, None])
def test_a_number_of_passes_is_an_integer_of_at_least_1(num_passes: object) -> None:
    text = f"num_passes: got {num_passes!r}, expected an integer of at least 1; correct that package"
    with raises(AssertionError, f"rule: {text}"):
        check_rule(mine(Mean, num_passes=num_passes))
    with raises(InvalidPlan, f"rule Mine: {text}"):
        folded(mine(Mean, num_passes=num_passes))


@pytest.mark.parametrize(
    ("rule", "kind"), [(Mean, "the class Mean"), (None, "NoneType"), (mine(object, begin=None), "Mine")]
)
def test_an_object_of_neither_kind_of_rule_is_refused(rule: Any, kind: str) -> None:
    expected = "expected an object with the members of Rule or ColumnRule; correct that package"
    with raises(AssertionError, f"rule: got {kind}, {expected}"):
        check_rule(rule)

"""States and results of another type or form: the error names the rule or the outer optimizer, and its method."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.errors import raises
from support.folds import fresh

from fanin.edge.codecs.grid import NUM_REACHES
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import Corrupted, InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation import fold
from fanin.server.aggregation.checked import CheckedColumnRule, CheckedRule
from fanin.server.aggregation.contract import check_optimizer, check_rule
from fanin.server.aggregation.rules import WeightedMean
from fanin.server.aggregation.sets import Aggregate, SetFold


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
    update = replace(update, read=lambda first, last: values[first:last])
    checked = CheckedColumnRule(rule)
    return SetFold(checked, TensorTable.of({"w": (2,)}), (0,), lambda _device, _scale: update).complete(["a"])


def cut_after(num_pieces: int) -> Any:
    """Return the mean of FedAvg, of the first pieces of each Update."""

    def accept(self: Any, state: fold.PartialSum, table: TensorTable, update: fold.Contribution) -> fold.PartialSum:
        pieces = [piece for _, piece in zip(range(num_pieces), update.pieces, strict=False)]
        values = np.concatenate([*pieces, np.zeros(2, np.int32)])[:2]
        return fold.accept(state, table, replace(update, pieces=[values]))

    return mine(WeightedMean, accept=accept)


@pytest.mark.parametrize("num_pieces", [0, 1, 2])
def test_a_damaged_update_is_found_also_by_a_rule_that_does_not_read_it_to_its_end(num_pieces: int) -> None:
    def damaged() -> Iterator[np.ndarray]:
        yield np.ones(1, np.int32)
        yield np.ones(1, np.int32)
        raise Corrupted("the digest of the payload, which is known at its end")

    update = fresh(256, (0,), CodecSpec(name="fixed32", max_shift=4), damaged())
    rule = CheckedRule(cut_after(num_pieces))
    fold_of_one = SetFold(rule, TensorTable.of({"w": (2,)}), (0,), lambda _device, _scale: update)
    with pytest.raises(Corrupted, match="FN-0021"):
        fold_of_one.add("a")
    assert not fold_of_one.added


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
    text = f"num_passes: got {num_passes!r}, expected an integer of at least 1; correct it"
    with raises(AssertionError, f"rule: {text}"):
        check_rule(mine(Mean, num_passes=num_passes))
    with raises(InvalidPlan, f"rule Mine: {text}"):
        folded(mine(Mean, num_passes=num_passes))


@pytest.mark.parametrize(
    ("rule", "kind"), [(Mean, "the class Mean"), (None, "NoneType"), (mine(object, begin=None), "Mine")]
)
def test_an_object_of_neither_kind_of_rule_is_refused(rule: Any, kind: str) -> None:
    expected = "expected an object with the members of Rule or ColumnRule; correct it"
    with raises(AssertionError, f"rule: got {kind}, {expected}"):
        check_rule(rule)


class Momentum:
    """The parameters plus the sum of all aggregates."""

    tensors = ("m",)

    def begin(self, parameters: np.ndarray) -> dict[str, np.ndarray]:
        return {"m": np.zeros_like(parameters)}

    def step(
        self, state: dict[str, np.ndarray], parameters: np.ndarray, aggregate: np.ndarray, number: int
    ) -> tuple[object, object]:
        momentum = state["m"] + aggregate
        return {"m": momentum}, parameters + momentum


def step(change: Callable[[Any, np.ndarray], object]) -> Any:
    return mine(Momentum, step=lambda self, *arguments: change(*Momentum().step(*arguments)))


def test_an_optimizer_with_a_state_keeps_the_contract() -> None:
    check_optimizer(mine(Momentum))


EXPECTED = "expected float64 (72,); correct it"
FINITE = "expected finite values; correct it"


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            step(lambda state, values: (values, state)),
            "step returned float64 (72,) as the state, expected a mapping of ['m']; correct it",
        ),
        (
            step(lambda state, values: (None, values)),
            "step returned NoneType as the state, expected a mapping of ['m']; correct it",
        ),
        (
            step(lambda state, values: values),
            "step returned float64 (72,), expected a state and parameters; correct it",
        ),
        (
            step(lambda state, values: (state, values, 1)),
            "step returned 3 values, expected a state and parameters; correct it",
        ),
        (step(lambda state, values: ({}, values)), "step returned the state [], expected ['m']; correct it"),
        (
            step(lambda state, values: ({"m": values, "v": values}, values)),
            "step returned the state ['m', 'v'], expected ['m']; correct it",
        ),
        (step(lambda state, values: ({"m": 0.0}, values)), f"step returned float for the tensor 'm', {EXPECTED}"),
        (
            step(lambda state, values: (state, values.astype(np.float32))),
            f"step returned float32 (72,) for the parameters, {EXPECTED}",
        ),
        (step(lambda state, values: (state, None)), f"step returned NoneType for the parameters, {EXPECTED}"),
        (step(lambda state, values: (state, values * np.nan)), f"step returned NaN for the parameters, {FINITE}"),
        (
            step(lambda state, values: ({"m": values * np.nan}, values)),
            f"step returned NaN for the tensor 'm', {FINITE}",
        ),
        (
            step(lambda state, values: (state, values * 1e300)),
            "step returned values beyond float32 for the parameters; lower aggregation.outer_options.learning_rate",
        ),
        (
            mine(Momentum, begin=lambda self, parameters: None),
            "begin returned NoneType as the state, expected a mapping of ['m']; correct it",
        ),
        (
            mine(Momentum, begin=lambda self, parameters: {"m": 0.0}),
            f"begin returned float for the tensor 'm', {EXPECTED}",
        ),
        (
            mine(Momentum, begin=lambda self: None),
            "begin raised TypeError: <lambda>() takes 1 positional argument but 2 were given; correct it",
        ),
    ],
)
def test_a_wrong_result_of_an_optimizer_names_its_method(optimizer: Any, text: str) -> None:
    with raises(AssertionError, f"outer optimizer Mine: {text}"):
        check_optimizer(optimizer)


@pytest.mark.parametrize("names", ["m", None, ("m", "m"), (1,), ("a b",)])
def test_the_tensors_of_an_optimizer_are_different_names(names: object) -> None:
    text = f"outer optimizer: tensors: got {names!r}, expected a tuple of different names; correct it"
    with raises(AssertionError, text):
        check_optimizer(mine(Momentum, tensors=names))


@pytest.mark.parametrize(
    ("optimizer", "kind"), [(Momentum, "the class Momentum"), (None, "NoneType"), (mine(object, begin=None), "Mine")]
)
def test_an_object_that_is_no_optimizer_is_refused(optimizer: Any, kind: str) -> None:
    expected = "expected an object with the members of OuterOptimizer; correct it"
    with raises(AssertionError, f"outer optimizer: got {kind}, {expected}"):
        check_optimizer(optimizer)

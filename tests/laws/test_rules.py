"""Rules compared with plain Python for any Updates, order and parts, and a contract that catches breaches."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.columns import GRID, NUM_VALUES, TABLE, Drawn, contributions, folded
from support.errors import raises
from support.virtual import plan

from fanin.edge.tensors import Float64s, Int32s, Int64s, TensorTable
from fanin.protos.errors import Corrupted, InvalidPlan
from fanin.server.aggregation.checked import CheckedRule, rule_of
from fanin.server.aggregation.contract import check_rule
from fanin.server.aggregation.fold import Contribution, PartialSum
from fanin.server.aggregation.rules import RULES, ColumnRule, Rule, TrimmedMean, WeightedMean, num_trimmed
from fanin.server.aggregation.sets import SetFold

VALUES = st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=NUM_VALUES, max_size=NUM_VALUES)
UPDATES = st.lists(st.tuples(VALUES, st.tuples(st.integers(0, 6), st.integers(0, 6))), min_size=1, max_size=9)


@given(UPDATES, st.floats(0.01, 0.49), st.randoms(use_true_random=False), st.integers(8, 400))
def test_a_trimmed_mean_equals_that_of_fractions(
    drawn: Drawn, trim: float, rng: random.Random, column_bytes: int
) -> None:
    num, left_out = len(drawn), num_trimmed(trim, len(drawn))
    expected = []
    for position in range(NUM_VALUES):
        block = 0 if position < 12 else 1
        column = sorted(values[position] << shifts[block] for values, shifts in drawn)
        middle = column[left_out : num - left_out]
        exact = Fraction(sum(middle), len(middle)) * Fraction(2) ** GRID[block]
        expected.append(float(Fraction(float(sum(middle))) / len(middle) * Fraction(2) ** GRID[block]))
        assert abs(Fraction(expected[-1]) - exact) <= abs(exact) * Fraction(2) ** -51
    names = [f"device-{index}" for index in range(num)]
    aggregate = folded(TrimmedMean(trim), drawn, rng.sample(names, num), column_bytes)
    cut = rng.randint(0, NUM_VALUES)
    outcome = np.concatenate([aggregate.part(0, cut), aggregate.part(cut, NUM_VALUES)])
    assert outcome.tolist() == expected
    assert aggregate.counts == {"n": sum(range(num))}
    assert aggregate.reaches.sum() == num * len(TABLE.specs)


@pytest.mark.parametrize(
    ("trim", "num_updates", "left_out"), [(0.29, 100, 29), (0.2, 5, 1), (0.1, 9, 0), (0.49, 1024, 501), (0.07, 100, 7)]
)
def test_the_updates_that_are_left_out_are_counted_in_decimals(trim: float, num_updates: int, left_out: int) -> None:
    assert num_trimmed(trim, num_updates) == left_out


@given(UPDATES.filter(lambda drawn: len(drawn) >= 4), st.integers(0, 1000))
def test_fewer_liars_than_are_left_out_stay_within_the_honest_values(drawn: Drawn, seed: int) -> None:
    """For any values of liars, each result is between the smallest and the largest value of the honest devices."""
    rng = np.random.default_rng(seed)
    left_out = len(drawn) // 4
    lies = [(rng.choice([-(2**31) + 1, 0, 2**31 - 1], NUM_VALUES).tolist(), (6, 6)) for _ in range(left_out)]
    honest, trim = list(drawn[left_out:]), left_out / len(drawn)
    outcome = folded(TrimmedMean(np.nextafter(trim, 1)), [*lies, *honest]).part(0, NUM_VALUES)
    steps = [GRID[0] if position < 12 else GRID[1] for position in range(NUM_VALUES)]
    for position, step in enumerate(steps):
        column = [values[position] << shifts[position >= 12] for values, shifts in honest]
        slack = 2.0**-50 * max(map(abs, column))
        assert (min(column) - slack) * 2.0**step <= outcome[position] <= (max(column) + slack) * 2.0**step


@pytest.mark.parametrize("rule", [WeightedMean(), TrimmedMean(0.2), TrimmedMean(0.49)], ids=["mean", "20 %", "49 %"])
def test_our_rules_keep_the_contract(rule: Rule | ColumnRule) -> None:
    for num_updates in (3, 7, 16):
        check_rule(rule, num_updates=num_updates, seed=num_updates)


class Broken(TrimmedMean):
    """A trimmed mean with one typical breach of the contract."""

    def __init__(self, fault: str) -> None:
        super().__init__(0.2)
        self.fault, self.calls = fault, 0

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        return {"distances": np.zeros(9 << 20)} if self.fault == "state" else {}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        self.calls += 1
        mean = super().reduce(state, columns)
        match self.fault:
            case "clock":
                return mean + self.calls
            case "parts":
                return mean - mean.mean()
            case "shape":
                return mean[:-1]
            case "nan":
                return mean / 0.0 if mean.any() else mean
            case "float32":
                return mean.astype(np.float32)
        return mean


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("clock", "aggregate: a repetition gave other bits"),
        ("parts", "aggregate: the lengths of the parts changed bits"),
    ],
)
def test_the_contract_detects_a_rule_whose_result_depends_on_the_fold(fault: str, error: str) -> None:
    with raises(AssertionError, error):
        check_rule(Broken(fault))


@pytest.mark.filterwarnings("ignore:divide by zero|invalid value")
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("state", "its state has 75497472 bytes, expected at most 67108864; keep less between its passes"),
        ("shape", "reduce returned float64 (71,), expected float64 (72,); correct the rule"),
        ("nan", "reduce returned NaN or infinity, expected finite values; correct the rule"),
        ("float32", "reduce returned float32 (72,), expected float64 (72,); correct the rule"),
    ],
)
def test_an_invalid_aggregate_is_refused(fault: str, error: str) -> None:
    with raises(AssertionError, f"rule Broken: {error}"):
        check_rule(Broken(fault))


class Spread(TrimmedMean):
    """A mean that is reduced in the third pass, after two passes that count values and sum each Update."""

    expected: Sequence[int] = ()

    @property
    def num_passes(self) -> int:
        return 3

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        return {"sum": np.zeros(num_updates, np.int64), "passes": np.zeros(2, np.int64)}

    def look(self, state: Mapping[str, np.ndarray], columns: Int64s, number: int) -> Mapping[str, np.ndarray]:
        passes = state["passes"].copy()
        passes[number] += len(columns)
        return {"sum": state["sum"] + columns.sum(axis=0), "passes": passes}

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        assert state["passes"].tolist() == [NUM_VALUES, NUM_VALUES], state
        assert state["sum"].tolist() == self.expected
        return columns.mean(axis=1)


def test_a_rule_with_several_passes_reads_all_values_in_each() -> None:
    rng = np.random.default_rng(1)
    drawn = [(rng.integers(-1000, 1000, NUM_VALUES).tolist(), (0, 0)) for _ in range(5)]
    rule = Spread(0.2)
    rule.expected = [2 * sum(values) for values, _ in drawn]
    outcome = folded(rule, drawn, column_bytes=100).part(0, NUM_VALUES)
    mean = np.array([values for values, _ in drawn]).mean(axis=0)
    assert np.allclose(outcome, mean * np.ldexp(1.0, np.repeat(GRID, (12, 5))), rtol=1e-12)


class Lossy(WeightedMean):
    """A sum that loses the partial sums of relays below it."""

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        return left


def test_the_contract_detects_a_sum_that_does_not_merge() -> None:
    with raises(AssertionError, "merge: a sum of two partial sums gave other bits"):
        check_rule(Lossy())


class Newest(WeightedMean):
    """A sum of the newest Update alone."""

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        return super().accept(super().begin(table), table, update)


def test_the_contract_detects_a_sum_that_depends_on_the_order() -> None:
    with raises(AssertionError, "aggregate: the order of the updates changed bits"):
        check_rule(Newest())


class Odd(WeightedMean):
    """A sum with one method that raises an error."""

    def __init__(self, method: str) -> None:
        self._method = method

    def begin(self, table: TensorTable) -> PartialSum:
        self._raise_in("begin")
        return super().begin(table)

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        state = super().accept(state, table, update)
        self._raise_in("accept")
        return state

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        self._raise_in("finish")
        return super().finish(state, table, grid, part)

    def _raise_in(self, method: str) -> None:
        if method == self._method:
            raise KeyError(method)


@pytest.mark.parametrize("method", ["begin", "accept", "finish"])
def test_a_sum_that_raises_is_named(method: str) -> None:
    with raises(InvalidPlan, f"rule Odd: {method} raised KeyError: '{method}'; correct the rule"):
        folded(CheckedRule(Odd(method)), [([1] * NUM_VALUES, (0, 0))]).part(0, NUM_VALUES)


class Hiding(WeightedMean):
    """A sum that leaves out an Update that it cannot read."""

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        try:
            return super().accept(state, table, update)
        except (OSError, Corrupted):
            return state


@pytest.mark.parametrize("rule", [WeightedMean(), CheckedRule(Hiding())], ids=["raises", "hides"])
@pytest.mark.parametrize("error", [OSError("disk"), Corrupted("chunk 3 is damaged")])
def test_an_error_of_the_stored_update_is_not_attributed_to_the_sum(rule: Rule, error: Exception) -> None:
    """Half of the Update is in the sum then, so the next try begins again."""
    errors = [error]

    def pieces(values: Int32s) -> Iterator[Int32s]:
        yield values[:3]
        if errors:
            raise errors.pop()
        yield values[3:]

    drawn = [([9] * NUM_VALUES, (0, 0)), (list(range(NUM_VALUES)), (0, 0))]
    stored = contributions(drawn)

    def source(device: str, _scale: int) -> Contribution:
        if device == "device-0":
            return stored[device]
        return replace(stored[device], pieces=pieces(np.array(drawn[1][0], np.int32)))

    updates = SetFold(rule, TABLE, GRID, source)
    updates.add("device-0")
    with pytest.raises(type(error)) as excinfo:
        updates.add("device-1")
    assert excinfo.value is error
    assert updates.added == set()
    expected = folded(WeightedMean(), drawn)
    assert (
        updates.complete(["device-0", "device-1"]).part(0, NUM_VALUES).tolist() == expected.part(0, NUM_VALUES).tolist()
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"rule": "trimed_mean"},
            (
                f"plan: aggregation.rule: got 'trimed_mean', expected one of {sorted(RULES)}, which are "
                "installed here; did you mean trimmed_mean?"
            ),
        ),
        (
            {"rule": "trimmed_mean", "rule_options": {"trim": 0.1}, "concurrency": 8, "buffer": 8, "quorum": 8},
            (
                "plan: got aggregation.rule_options.trim 0.1 and cohort.quorum 8, so that a trimmed mean of 8 updates "
                "leaves out none; expected trim x quorum of at least 1: raise one of them"
            ),
        ),
        (
            {"rule": "trimmed_mean", "concurrency": 2000, "buffer": 2000, "quorum": 100},
            (
                "plan: got cohort.buffer 2000 with the rule trimmed_mean, expected at most 1024: this rule reads all "
                "updates of a round side by side"
            ),
        ),
        (
            {"rule": "trimmed_mean", "concurrency": 20, "buffer": 20, "quorum": 20, "max_staleness": 2},
            (
                "plan: got aggregation.max_staleness 2 with the rule trimmed_mean, expected 0: this rule compares "
                "updates of one round"
            ),
        ),
    ],
)
def test_a_plan_that_its_rule_cannot_carry_out_is_refused(changes: dict[str, object], error: str) -> None:
    with raises(InvalidPlan, error):
        rule_of(plan(**changes))

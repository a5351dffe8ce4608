"""One liar among nine honest devices: its influence on each statistic and each group.

docs/howto/operate.md and docs/howto/rules.md have the tables.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import TABLE, assignment, plan, update

from fanin.edge import ranges
from fanin.edge.codecs.statistics import declared, range_counts_of
from fanin.edge.codecs.vector import MAIN, Group, VectorLayout, Weighting
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidUpdate
from fanin.server.aggregation.auxiliary import limited
from fanin.server.aggregation.fold import Contribution, RangeSum
from fanin.server.aggregation.rules import ColumnRule, Rule, TrimmedMean, WeightedMean
from fanin.server.aggregation.sets import SetFold
from fanin.server.aggregation.statistics import (
    credible_counts,
    evaluation_of,
    examples_key,
    train_loss_of,
    with_examples,
)
from fanin.server.aggregation.weights import weights_of
from fanin.server.runs.validation import Expected, check_header

WORK = assignment()
HEADER, _ = update(WORK)
MAX_EXAMPLES = 100
NUM_HONEST = 9
OWN = m.Statistic(name="words", unit="words", bound=1000)
HONEST = {
    m.EXAMPLES: MAX_EXAMPLES,
    m.TRAIN_LOSS: MAX_EXAMPLES * m.LOSS_UNIT,
    m.ROUNDED: 5,
    m.SATURATED: 0,
    m.EVAL_EXAMPLES: MAX_EXAMPLES,
    m.EVAL_LOSS: MAX_EXAMPLES * m.LOSS_UNIT,
    m.EVAL_PREDICTIONS: MAX_EXAMPLES,
    m.EVAL_CORRECT_FLOAT: 60,
    m.EVAL_CORRECT_INT8: 50,
    m.EVAL_AGREE: 70,
    "words": 10,
}


def expected(num_labels: int = 1) -> Expected:
    return Expected(
        run_id="run",
        round=1,
        version_sha256=WORK.version.sha256,
        codec=WORK.codec,
        payload_bytes=4 * TABLE.num_values,
        table=TABLE,
        num_labels=num_labels,
        statistics=declared([OWN], max_examples=MAX_EXAMPLES, num_labels=num_labels, num_values=TABLE.num_values),
    )


def header_of(counts: Mapping[str, int]) -> m.UpdateHeader:
    return replace(HEADER, statistics=m.Statistics(counts=MappingProxyType(dict(counts))))


def round_statistics(liar: Mapping[str, int]) -> dict[str, float]:
    """Return the statistics of a Round with this Update, as operators and stop conditions see them."""
    check_header(header_of(liar), expected())
    updates = [liar, *[HONEST] * NUM_HONEST]
    sums = Counter[str]()
    for counts in updates:
        sums.update(with_examples(counts))
    evaluation = evaluation_of(credible_counts(updates, 3), 3)
    assert evaluation is not None
    return {
        "train_loss": train_loss_of(sums),
        "loss": evaluation.loss,
        "accuracy_float": evaluation.accuracy_float,
        "accuracy_int8": evaluation.accuracy_int8,
        "agreement": evaluation.int8_agreement,
        "words": sums["words"],
        "rounded": sums[m.ROUNDED],
    }


def changes_by(lies: Mapping[str, int]) -> dict[str, float]:
    before, after = round_statistics(HONEST), round_statistics({**HONEST, **lies})
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


LARGEST_LOSS = MAX_EXAMPLES * m.MAX_LOSS * m.LOSS_UNIT


@pytest.mark.parametrize(
    ("lies", "moves"),
    [
        (
            {m.TRAIN_LOSS: LARGEST_LOSS},
            {"train_loss": (LARGEST_LOSS / m.LOSS_UNIT - MAX_EXAMPLES) / (10 * MAX_EXAMPLES)},
        ),
        # Beyond the range of the others, its loss does not count, but its labels do.
        ({m.EVAL_LOSS: -LARGEST_LOSS}, {}),
        (
            {m.EVAL_LOSS: LARGEST_LOSS, m.EVAL_CORRECT_INT8: 0, m.EVAL_AGREE: 40},
            {"accuracy_int8": -0.05, "agreement": -0.03},
        ),
        ({m.EVAL_LOSS: LARGEST_LOSS}, {}),
        ({m.EVAL_LOSS: -1}, {}),
        ({m.EVAL_LOSS: 16 * MAX_EXAMPLES * m.LOSS_UNIT}, {"loss": 1.5}),
        ({m.EVAL_LOSS: 0}, {"loss": -0.1}),
        ({m.EVAL_CORRECT_FLOAT: MAX_EXAMPLES, m.EVAL_AGREE: 50}, {"accuracy_float": 0.04, "agreement": -0.02}),
        ({m.EVAL_CORRECT_INT8: 0, m.EVAL_AGREE: 40}, {"accuracy_int8": -0.05, "agreement": -0.03}),
        ({"words": 1000}, {"words": 990}),
        ({"words": -1000}, {"words": -1010}),
        ({m.ROUNDED: TABLE.num_values}, {"rounded": TABLE.num_values - 5}),
    ],
)
def test_a_lie_moves_only_its_own_statistic_by_the_share_of_one_device(
    lies: dict[str, int], moves: dict[str, float]
) -> None:
    assert changes_by(lies) == pytest.approx(moves)


def test_a_lie_beyond_a_bound_is_refused() -> None:
    for statistic in expected().statistics:
        for count in (statistic.bound + 1, -statistic.bound - 1):
            with pytest.raises((InvalidUpdate, InvalidInput)):
                check_header(header_of({**HONEST, statistic.name: count}), expected())


def test_the_weight_of_a_liar_is_the_one_of_the_largest_device() -> None:
    bounds = {each.name: each.bound for each in expected().statistics}
    weights = weights_of(header_of({**HONEST, m.EXAMPLES: bounds[m.EXAMPLES]}), plan(max_examples=MAX_EXAMPLES))
    assert weights == {Weighting.EXAMPLES: MAX_EXAMPLES, Weighting.ONE: 1}


VALUES = {
    m.EVAL_EXAMPLES: MAX_EXAMPLES,
    m.EVAL_LOSS: -3 * MAX_EXAMPLES * m.LOSS_UNIT,
    "eval_squares_float": 50,
    "eval_squares_int8": 51,
    "eval_squares_wanted": 4000,
}
"""The evaluation of a model of values."""


@pytest.mark.parametrize(
    "lies",
    [
        {m.EVAL_EXAMPLES: 1, m.EVAL_LOSS: 0, "eval_squares_float": 1, "eval_squares_int8": m.MAX_SUM},
        {"eval_squares_int8": m.MAX_SUM},
        {"eval_squares_float": m.MAX_SUM},
        {"eval_squares_wanted": m.MAX_SUM},
        {m.EVAL_LOSS: -m.MAX_SUM},
        {m.EVAL_LOSS: m.MAX_SUM},
    ],
)
@pytest.mark.parametrize("num_liars", [1, 3])
def test_a_lie_about_a_model_of_values_neither_pauses_nor_ends_a_run(lies: dict[str, int], num_liars: int) -> None:
    updates = [*[VALUES | lies] * num_liars, *[VALUES] * (10 - num_liars)]
    check_header(header_of({m.EXAMPLES: 1, **updates[0]}), expected(num_labels=0))
    evaluation = evaluation_of(credible_counts(updates, 0), 0)
    assert evaluation is not None and evaluation.int8_rise_percent is not None
    assert (evaluation.int8_rise_percent, evaluation.loss) == (pytest.approx(2.0), -3.0)


@pytest.mark.parametrize(("num_large", "num_credible"), [(3, 6), (4, 9)])
@pytest.mark.parametrize("num_classes", [0, 10])
def test_losses_follow_a_value_that_more_than_a_third_of_the_updates_attain(
    num_large: int, num_credible: int, num_classes: int
) -> None:
    small, large = ({m.EVAL_EXAMPLES: 1, m.EVAL_LOSS: loss * m.LOSS_UNIT} for loss in (1, 100))
    sums = credible_counts([*[large] * num_large, *[small] * (9 - num_large)], num_classes)
    assert sums[examples_key(m.EVAL_LOSS)] == num_credible


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 99), st.integers(0, 16 * m.LOSS_UNIT), st.integers(1, 16), st.integers(1, 16)),
        min_size=1,
        max_size=9,
    ),
    num_classes=st.sampled_from([0, 10]),
)
def test_honest_evaluations_are_summed_unchanged(rows: list[tuple[int, int, int, int]], num_classes: int) -> None:
    updates = [
        {
            m.EVAL_EXAMPLES: examples,
            m.EVAL_LOSS: examples * (loss if num_classes else max(loss, m.LOSS_UNIT)),
            "eval_squares_float": examples * in_float,
            "eval_squares_int8": examples * in_int8,
            "eval_squares_wanted": examples,
        }
        for examples, loss, in_float, in_int8 in rows
    ]
    sums = Counter[str]()
    for counts in updates:
        sums.update(with_examples(counts))
    assert credible_counts(updates, num_classes) == sums


def test_an_app_without_a_loss_does_not_exclude_those_with_one() -> None:
    updates = [*[{m.EVAL_EXAMPLES: 5}] * 9, {m.EVAL_EXAMPLES: 5, m.EVAL_LOSS: 10 * m.LOSS_UNIT}]
    evaluation = evaluation_of(credible_counts(updates, 0), 0)
    assert evaluation is not None and (evaluation.num_examples, evaluation.loss) == (5, 2.0)


LOWS, HIGHS = (-0.5, 0.0), (1.0, 6.0)
"""The extreme values of two activations in every example of the honest devices, up to a factor of 2."""


def range_counts(lows: Float32s, highs: Float32s) -> m.RangeCounts:
    """Return the counts of a device with these extreme values (examples, activations)."""
    return range_counts_of(ranges.counts(lows, highs), np.arange(len(LOWS)))


def ranges_with(*lies: m.RangeCounts, num_honest: int = NUM_HONEST) -> Float32s:
    """Return the next ranges (activations, 2) of honest devices and liars."""
    rng, total = np.random.default_rng(0), RangeSum()
    for _ in range(num_honest):
        scale = rng.uniform(0.5, 1.0, (m.RANGE_EXAMPLES, 1))
        total.add(range_counts((scale * LOWS).astype(np.float32), (scale * HIGHS).astype(np.float32)))
    for lie in lies:
        total.add(lie)
    sums = total.counts(2 * len(LOWS) * ranges.NUM_BINS).reshape(-1, 2, ranges.NUM_BINS)
    return ranges.ranges_of(limited(sums), np.zeros((len(LOWS), 2), np.float32))


def lie(magnitude: float) -> m.RangeCounts:
    values = np.full((m.RANGE_EXAMPLES, len(LOWS)), magnitude, np.float32)
    return range_counts(-values, values)


@pytest.mark.parametrize("num_liars", [1, 3])
def test_a_tenth_of_the_devices_widens_a_range_at_most_twofold(num_liars: int) -> None:
    num_honest = NUM_HONEST * num_liars
    honest, actual = ranges_with(num_honest=num_honest), ranges_with(*[lie(1e30)] * num_liars, num_honest=num_honest)
    is_zero = honest == 0.0
    assert (np.abs(honest)[~is_zero] < np.abs(actual)[~is_zero]).all()
    assert (np.abs(actual) <= 2.0 * np.abs(honest))[~is_zero].all()
    # A side without values gets one that int8 cannot resolve.
    assert np.abs(actual)[is_zero].max() < 2.0**-14


def test_a_liar_narrows_no_range() -> None:
    np.testing.assert_array_equal(ranges_with(lie(0.0)), ranges_with())


CELLS = 2 * len(LOWS) * ranges.NUM_BINS


@pytest.mark.parametrize(
    ("cells", "counts", "problem"),
    [
        ((0, ranges.NUM_BINS), (64, 63), "activation 0 with the sums 64 and 63, expected 64 on each side"),
        ((0, ranges.NUM_BINS), (65, 64), "sums 65 and 64"),
        ((2 * ranges.NUM_BINS,), (64,), "activation 1 with the sums 64 and 0"),
        ((0, CELLS), (64, 64), f"got the range cell {CELLS}, expected a number below {CELLS}"),
        ((0, ranges.NUM_BINS), ((1 << 32) - 1, 64), "sums 4294967295 and 64"),
    ],
)
def test_counts_of_ranges_that_no_device_has_are_refused(
    cells: tuple[int, ...], counts: tuple[int, ...], problem: str
) -> None:
    header = replace(header_of(HONEST), ranges=m.RangeCounts(cells=cells, counts=counts))
    with pytest.raises(InvalidUpdate, match=problem) as refused:
        check_header(header, replace(expected(), num_range_cells=CELLS))
    assert refused.value.code == "FN-0644"


def test_counts_of_ranges_are_refused_in_a_run_without_them() -> None:
    header = replace(header_of(HONEST), ranges=lie(1.0))
    check_header(header, replace(expected(), num_range_cells=CELLS))
    with pytest.raises(InvalidUpdate, match="expected no ranges in this run"):
        check_header(header, expected())


@pytest.mark.parametrize(
    ("cells", "counts"),
    [((1, 1), (32, 32)), ((2, 1), (32, 32)), ((-1,), (64,)), ((1,), (0,)), ((1,), (-64,)), ((1,), ())],
)
def test_counts_of_ranges_in_another_form_do_not_exist(cells: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput) as refused:
        m.RangeCounts(cells=cells, counts=counts)
    assert refused.value.code == "FN-0644"


LAYOUT = VectorLayout(table=TensorTable.of({"a": (4,)}), groups=(MAIN, Group(name="control", weighting=Weighting.ONE)))
SHIFT = 4
"""The Plan's largest shift, which a liar uses to send larger values."""


def aggregates(rule: Rule | ColumnRule, liar_examples: int, lie: dict[str, int]) -> dict[str, float]:
    """Aggregate nine honest devices, which send 9 to 17, and a liar. Return each group's first value in grid steps."""

    def contribution(device: str, _scale: int) -> Contribution:
        number, is_liar = int(device), device == "9"
        examples = liar_examples if is_liar else MAX_EXAMPLES
        values = [lie.get(group.name, 13) if is_liar else 9 + number for group in LAYOUT.groups for _ in range(4)]
        encoded = np.array(values, np.int32)
        weights = LAYOUT.per_block({Weighting.EXAMPLES: examples, Weighting.ONE: 1})
        shifts = tuple(SHIFT * (is_liar and group.name in lie) for group in LAYOUT.groups)
        return Contribution(
            weights=weights,
            fresh_weights=weights,
            shifts=shifts,
            bits=32,
            max_shift=SHIFT,
            counts={},
            pieces=[encoded],
            read=lambda first, last: encoded[first:last],
        )

    aggregate = SetFold(rule, LAYOUT.total_table, [0, 0], contribution).complete([str(number) for number in range(10)])
    return {group.name: float(aggregate.part(*LAYOUT.span(group.name))[0]) for group in LAYOUT.groups}


LARGEST = (1 << 31) - 1
REACH = LARGEST << SHIFT
"""The largest value of an Update, in steps of the grid."""


@pytest.mark.parametrize("group", ["parameters", "control"])
def test_a_liar_moves_only_its_own_group_and_by_its_share_of_the_mean(group: str) -> None:
    other = "control" if group == "parameters" else "parameters"
    honest, actual = (
        aggregates(WeightedMean(), MAX_EXAMPLES, {}),
        aggregates(WeightedMean(), MAX_EXAMPLES, {group: LARGEST}),
    )
    assert actual[other] == honest[other] == 13.0
    assert actual[group] - honest[group] == pytest.approx((REACH - 13) / 10)


def test_examples_weigh_in_the_parameters_and_not_in_the_control_variates() -> None:
    values = aggregates(WeightedMean(), 1, {"parameters": LARGEST, "control": LARGEST})
    assert values["parameters"] - 13.0 == pytest.approx((REACH - 13) / (9 * MAX_EXAMPLES + 1))
    assert values["control"] - 13.0 == pytest.approx((REACH - 13) / 10)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST])
def test_a_trimmed_mean_keeps_each_group_within_the_values_of_honest_devices(value: int) -> None:
    values = aggregates(TrimmedMean(0.1), MAX_EXAMPLES, {"parameters": value, "control": value})
    # The rule trims the liar and the honest device at the other end.
    mean = 13.5 if value > 0 else 12.5
    assert values == {"parameters": mean, "control": mean}

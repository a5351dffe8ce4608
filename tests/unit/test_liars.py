"""One liar among nine honest devices: its influence on each statistic and each group.

docs/operating.md and docs/rules.md have the tables.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from support.values import TABLE, assignment, update

from fanin.edge.codecs.statistics import declared
from fanin.edge.codecs.vector import MAIN, Group, VectorLayout, Weighting
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.rules import ColumnRule, Rule, TrimmedMean, WeightedMean
from fanin.server.aggregation.sets import SetFold, Submission
from fanin.server.aggregation.statistics import evaluation_of, train_loss_of, with_loss_examples
from fanin.server.aggregation.weights import weights_of
from fanin.server.fleet.validation import Expected, check_header

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
        table=TABLE,
        num_labels=num_labels,
        statistics=declared([OWN], max_examples=MAX_EXAMPLES, num_labels=num_labels, num_values=TABLE.num_values),
    )


def header_of(counts: Mapping[str, int]) -> m.UpdateHeader:
    return replace(HEADER, statistics=m.Statistics(counts=MappingProxyType(dict(counts))))


def round_statistics(liar: Mapping[str, int]) -> dict[str, float]:
    """Return the statistics of a Round with this Update, as operators and stop conditions see them."""
    check_header(header_of(liar), expected())
    sums = Counter(with_loss_examples(liar))
    for _ in range(NUM_HONEST):
        sums.update(with_loss_examples(HONEST))
    evaluation = evaluation_of(sums, 3)
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


LARGEST_LOSS = min(MAX_EXAMPLES * m.MAX_LOSS * m.LOSS_UNIT, m.MAX_COUNT)


@pytest.mark.parametrize(
    ("lies", "moves"),
    [
        (
            {m.TRAIN_LOSS: LARGEST_LOSS},
            {"train_loss": (LARGEST_LOSS / m.LOSS_UNIT - MAX_EXAMPLES) / (10 * MAX_EXAMPLES)},
        ),
        ({m.EVAL_LOSS: -LARGEST_LOSS}, {"loss": (-LARGEST_LOSS / m.LOSS_UNIT - MAX_EXAMPLES) / (10 * MAX_EXAMPLES)}),
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
            with pytest.raises(InvalidUpdate):
                check_header(header_of({**HONEST, statistic.name: count}), expected())


def test_the_weight_of_a_liar_is_the_one_of_the_largest_device() -> None:
    bounds = {each.name: each.bound for each in expected().statistics}
    weights = weights_of(header_of({**HONEST, m.EXAMPLES: bounds[m.EXAMPLES]}), MAX_EXAMPLES)
    assert weights == {Weighting.EXAMPLES: 256 * MAX_EXAMPLES, Weighting.ONE: 256}


def test_a_regression_model_has_no_limit_for_squared_errors_but_the_bound() -> None:
    bounds = {each.name: each.bound for each in expected(num_labels=0).statistics}
    assert {bounds[name] for name in bounds if name.startswith("eval_squares")} == {m.MAX_COUNT}


LAYOUT = VectorLayout(table=TensorTable.of({"a": (4,)}), groups=(MAIN, Group(name="control", weighting=Weighting.ONE)))
SHIFT = 4
"""The Plan's largest shift, which a liar uses to send larger values."""


def aggregates(rule: Rule | ColumnRule, liar_examples: int, lie: dict[str, int]) -> dict[str, float]:
    """Aggregate nine honest devices, which send 9 to 17, and a liar. Return each group's first value in grid steps."""

    def submission(device: str) -> Submission:
        number, is_liar = int(device), device == "9"
        examples = liar_examples if is_liar else MAX_EXAMPLES
        values = [lie.get(group.name, 13) if is_liar else 9 + number for group in LAYOUT.groups for _ in range(4)]
        encoded = np.array(values, np.int32)
        weights = LAYOUT.per_block({Weighting.EXAMPLES: 256 * examples, Weighting.ONE: 256})
        shifts = tuple(SHIFT * (is_liar and group.name in lie) for group in LAYOUT.groups)
        update = Contribution(
            weights=weights, fresh_weights=weights, shifts=shifts, bits=32, max_shift=SHIFT, counts={}, pieces=[encoded]
        )
        return Submission(update=update, read=lambda first, last: encoded[first:last])

    aggregate = SetFold(rule, LAYOUT.total_table, [0, 0], submission).complete([str(number) for number in range(10)])
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

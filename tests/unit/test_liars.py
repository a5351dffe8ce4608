"""One liar among nine honest devices: what each declared statistic moves, and by how much (docs/operating.md)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from support.values import TABLE, assignment, update

from fanin.edge.codecs.statistics import declared
from fanin.edge.codecs.vector import Weighting
from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate
from fanin.server.aggregation.statistics import evaluation_of, train_loss_of
from fanin.server.aggregation.weights import weights_of
from fanin.server.fleet.validation import Expected, check_header

WORK = assignment()
HEADER, _ = update(WORK)
MOST = 100
NUM_HONEST = 9
OWN = m.Statistic(name="words", unit="words", bound=1000)
HONEST = {
    m.EXAMPLES: MOST,
    m.TRAIN_LOSS: MOST * m.LOSS_UNIT,
    m.ROUNDED: 5,
    m.SATURATED: 0,
    m.EVAL_EXAMPLES: MOST,
    m.EVAL_LOSS: MOST * m.LOSS_UNIT,
    m.EVAL_PREDICTIONS: MOST,
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
        statistics=declared([OWN], max_examples=MOST, num_labels=num_labels, num_values=TABLE.num_values),
    )


def header_of(counts: Mapping[str, int]) -> m.UpdateHeader:
    return replace(HEADER, statistics=m.Statistics(counts=MappingProxyType(dict(counts))))


def reported(liar: Mapping[str, int]) -> dict[str, float]:
    """What operators and stop conditions see of a Round with this Update among the honest ones."""
    check_header(header_of(liar), expected())
    sums = Counter(liar)
    for _ in range(NUM_HONEST):
        sums.update(HONEST)
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


def moved(lies: Mapping[str, int]) -> dict[str, float]:
    before, after = reported(HONEST), reported({**HONEST, **lies})
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


LARGEST_LOSS = min(MOST * m.MAX_LOSS * m.LOSS_UNIT, m.MAX_COUNT)


@pytest.mark.parametrize(
    ("lies", "moves"),
    [
        ({m.TRAIN_LOSS: LARGEST_LOSS}, {"train_loss": (LARGEST_LOSS / m.LOSS_UNIT - MOST) / (10 * MOST)}),
        ({m.EVAL_LOSS: -LARGEST_LOSS}, {"loss": (-LARGEST_LOSS / m.LOSS_UNIT - MOST) / (10 * MOST)}),
        ({m.EVAL_CORRECT_FLOAT: MOST, m.EVAL_AGREE: 50}, {"accuracy_float": 0.04, "agreement": -0.02}),
        ({m.EVAL_CORRECT_INT8: 0, m.EVAL_AGREE: 40}, {"accuracy_int8": -0.05, "agreement": -0.03}),
        ({"words": 1000}, {"words": 990}),
        ({"words": -1000}, {"words": -1010}),
        ({m.ROUNDED: TABLE.num_values}, {"rounded": TABLE.num_values - 5}),
    ],
)
def test_a_lie_moves_only_its_own_statistic_by_the_share_of_one_device(
    lies: dict[str, int], moves: dict[str, float]
) -> None:
    assert moved(lies) == pytest.approx(moves)


def test_a_lie_beyond_a_bound_is_refused() -> None:
    for statistic in expected().statistics:
        for count in (statistic.bound + 1, -statistic.bound - 1):
            with pytest.raises(InvalidUpdate):
                check_header(header_of({**HONEST, statistic.name: count}), expected())


def test_the_weight_of_a_liar_is_the_one_of_the_largest_device() -> None:
    bounds = {each.name: each.bound for each in expected().statistics}
    weights = weights_of(header_of({**HONEST, m.EXAMPLES: bounds[m.EXAMPLES]}), MOST)
    assert weights == {Weighting.EXAMPLES: 256 * MOST, Weighting.ONE: 256}


def test_a_regression_model_has_no_limit_for_squared_errors_but_the_bound() -> None:
    bounds = {each.name: each.bound for each in expected(num_labels=0).statistics}
    assert {bounds[name] for name in bounds if name.startswith("eval_squares")} == {m.MAX_COUNT}

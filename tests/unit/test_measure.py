"""``edge.measure``: what int8 costs, and when that is too much."""

import pytest

from fanin.edge.measure import Measured, check_drop
from fanin.protos.errors import InvalidVersion

WORSE = Measured(
    num_examples=100, loss_sum=50.0, num_predictions=200, num_correct_float=190, num_correct_int8=187, num_agreeing=180
)
VALUES = Measured(
    num_examples=4, loss_sum=2.0, num_predictions=0, num_correct_float=0, num_correct_int8=0, num_agreeing=0
)


def test_it_tells_points_and_shares() -> None:
    assert WORSE.drop_points == pytest.approx(1.5)
    assert str(WORSE) == "float 95.00 %, int8 93.50 %, agreeing 90.00 % on 200 labels"
    assert str(VALUES) == "mean loss 0.5000 on 4 examples"


@pytest.mark.parametrize("limit", [0.0, 1.0, 1.4, float("nan")])
def test_more_than_the_limit_is_refused_and_no_number_is_no_limit(limit: float) -> None:
    with pytest.raises(InvalidVersion, match=r"here: int8 is 1\.50 points worse than float"):
        check_drop("here", WORSE, limit)


def test_less_than_the_limit_is_fine() -> None:
    check_drop("here", WORSE, 1.6)
    check_drop("here", VALUES, 0.0)

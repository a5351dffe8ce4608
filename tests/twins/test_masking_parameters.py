"""Degree and threshold against the published table of another implementation, scipy, and exact integers."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Final

import pytest

from fanin.edge.masking.parameters import (
    MILLION,
    Assumptions,
    GraphParameters,
    Threat,
    is_secret,
    least_complete_threshold,
    parameters,
)
from fanin.protos.errors import InvalidPlan

Row = tuple[str, float, float, int, int, int]
ROWS: Final[list[Row]] = [
    tuple(row)
    for row in json.loads((Path(__file__).parents[1] / "golden/masking/published-parameters.json").read_text())["rows"]
]
THREATS: Final = {threat.title: threat for threat in Threat}
INCORRECT: Final = [("curious", 0.05, 0.33, 10, 4, 2), ("curious", 0.0, 0.33, 10, 4, 2)]
"""Published rows that break their own bound: with 3 dropouts of 10 devices, a device has fewer than 2 surviving ones of
4 neighbors with a probability of 1/30, and the bound is 2^-20 / 10. The published threshold of 2 is a floor that is
applied after the check."""
SMALL: Final = 1000


def assumed(threat: str, adversarial: float, dropout: float) -> Assumptions:
    return Assumptions(
        threat=THREATS[threat], adversarial_ppm=round(adversarial * MILLION), dropout_ppm=round(dropout * MILLION)
    )


def check_row(row: Row) -> None:
    threat, adversarial, dropout, devices, degree, threshold = row
    chosen = parameters(devices, assumed(threat, adversarial, dropout))
    assert (chosen.degree, chosen.threshold <= threshold) == (degree, True), row


def test_small_published_rows_agree() -> None:
    rows = [row for row in ROWS if row[3] <= SMALL and row not in INCORRECT]
    assert len(rows) == 41
    for row in rows:
        check_row(row)


@pytest.mark.nightly
def test_all_published_rows_agree() -> None:
    rows = [row for row in ROWS if row not in INCORRECT]
    assert len(rows) == 86
    for row in rows:
        check_row(row)


@pytest.mark.parametrize("row", INCORRECT, ids=["0.05", "0"])
def test_two_published_rows_break_their_own_bound(row: Row) -> None:
    threat, adversarial, dropout, devices, degree, threshold = row
    assert exact_below(devices, devices - 3, degree, threshold) == Fraction(1, 30) > Fraction(1, devices << 20)
    chosen = parameters(devices, assumed(threat, adversarial, dropout))
    assert (chosen.degree, chosen.threshold) == (degree + 2, threshold)
    assert exact_below(devices, devices - 3, chosen.degree, chosen.threshold) == 0


def exact_below(total: int, marked: int, draws: int, count: int) -> Fraction:
    """Return P[X < count] of the hypergeometric distribution."""
    ways = sum(
        math.comb(marked, each) * math.comb(total - marked, draws - each) for each in range(min(count, draws + 1))
    )
    return Fraction(ways, math.comb(total, draws))


@pytest.mark.parametrize("row", [row for row in ROWS if row[3] in (100, SMALL) and row[4] < 500], ids=str)
def test_scipy_finds_the_same_bounds(row: Row) -> None:
    """scipy's tails hold for the degree, and not for the degree before it with any threshold."""
    from scipy.stats import hypergeom

    threat, adversarial, dropout, devices, _, _ = row
    assumptions = assumed(threat, adversarial, dropout)
    chosen = parameters(devices, assumptions)
    a, d = assumptions.num_adversarial(devices), assumptions.num_dropouts(devices)

    def fits(degree: int, threshold: int) -> bool:
        log = math.log(devices * (devices - degree - 1) / 2)
        log += log_choose(a + d, degree) - log_choose(devices, degree)
        secret = hypergeom(devices, a, degree)
        most = threshold - 1 if threat == "curious" else 2 * threshold - degree - 1
        return bool(
            log < -41 * math.log(2)
            and secret.sf(most) <= 2**-41 / devices
            and hypergeom(devices, devices - d, degree).cdf(threshold - 1) < 2**-20 / devices
        )

    assert fits(chosen.degree, chosen.threshold)
    assert chosen.threshold == 2 or not fits(chosen.degree, chosen.threshold - 1)
    before = chosen.degree - 2
    assert not any(fits(before, threshold) for threshold in range(2, before + 1))


def log_choose(total: int, draws: int) -> float:
    if draws > total:
        return -math.inf
    return math.lgamma(total + 1) - math.lgamma(draws + 1) - math.lgamma(total - draws + 1)


@pytest.mark.parametrize("threat", Threat)
def test_parameters_keep_secrets_by_exact_integers(threat: Threat) -> None:
    for devices in (3, 4, 7, 20, 50, 120):
        for adversarial, dropout in ((0.0, 0.0), (0.1, 0.1), (0.3, 0.1), (0.05, 0.3)):
            assumptions = assumed(threat.title, adversarial, dropout)
            chosen = parameters(devices, assumptions)
            assert is_secret(devices, chosen, assumptions)
            a, d = assumptions.num_adversarial(devices), assumptions.num_dropouts(devices)
            if chosen.degree == devices - 1:
                assert least_complete_threshold(devices, assumptions) <= chosen.threshold <= devices - d
                continue
            most = chosen.threshold - 1 if threat is Threat.CURIOUS else 2 * chosen.threshold - chosen.degree - 1
            above = 1 - exact_below(devices, a, chosen.degree, most + 1)
            assert above <= Fraction(1, devices << 41)
            assert exact_below(devices, devices - d, chosen.degree, chosen.threshold) < Fraction(1, devices << 20)


@pytest.mark.parametrize("devices", [3, 4, 10, 50])
def test_an_active_coordinator_needs_the_complete_graph(devices: int) -> None:
    chosen = parameters(devices, assumed("active", 0.1, 0.1))
    assert chosen.degree == devices - 1
    assert 2 * chosen.threshold > devices + devices // 10


@pytest.mark.parametrize(
    ("threat", "degree", "threshold"),
    [
        (Threat.CURIOUS, 12, 5),
        (Threat.CURIOUS, 10, 9),
        (Threat.CURIOUS, 13, 9),
        (Threat.CURIOUS, 12, 13),
        (Threat.CURIOUS, 99, 5),
        (Threat.CURIOUS, 0, 0),
        (Threat.SEMI_MALICIOUS, 16, 10),
        (Threat.ACTIVE, 16, 11),
        (Threat.ACTIVE, 99, 52),
        (Threat.ACTIVE, 99, 101),
        (Threat.CURIOUS, 100, 50),
    ],
)
def test_a_device_refuses_parameters_that_keep_no_secret(threat: Threat, degree: int, threshold: int) -> None:
    assumptions = assumed(threat.title, 0.05, 0.05)
    assert not is_secret(100, GraphParameters(degree=degree, threshold=threshold), assumptions)


@pytest.mark.parametrize(
    ("devices", "threat", "adversarial", "dropout"),
    [
        (0, "curious", 0.1, 0.1),
        (1, "curious", 0.0, 0.0),
        (1000, "curious", 0.5, 0.5),
        (1000, "semi-malicious", 0.5, 0.5),
        (1000, "semi-malicious", 0.33, 0.34),
        (10, "active", 0.5, 0.3),
    ],
)
def test_what_no_threshold_can_satisfy_is_refused(
    devices: int, threat: str, adversarial: float, dropout: float
) -> None:
    with pytest.raises(InvalidPlan) as caught:
        parameters(devices, assumed(threat, adversarial, dropout))
    assert caught.value.code == "FN-1626"


@pytest.mark.parametrize(("adversarial", "dropout"), [(-0.1, 0.1), (0.1, 1.0)])
def test_a_fraction_out_of_range_is_refused(adversarial: float, dropout: float) -> None:
    with pytest.raises(InvalidPlan) as caught:
        assumed("curious", adversarial, dropout)
    assert caught.value.code == "FN-1626"

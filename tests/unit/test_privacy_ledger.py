"""The rows of a privacy ledger, and the check before the next release."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.noise.loss import Loss
from fanin.protos.errors import InvalidInput
from fanin.server.privacy.accounting import Entry, epsilon
from fanin.server.privacy.ledger import Budget, from_text, to_text
from fanin.server.privacy.releases import NoisedSum, PlainRelease, SampledRelease

FRACTIONS = st.fractions(min_value=0, max_value=1 << 60, max_denominator=1 << 128)
SUMS = st.builds(NoisedSum, squared_sensitivity=st.integers(0, 1 << 62), parameter=FRACTIONS.filter(bool))
RATES = st.floats(0, 1, exclude_min=True, exclude_max=True)
RELEASES = st.one_of(
    st.builds(PlainRelease, loss=st.builds(Loss, rho=FRACTIONS, xi=FRACTIONS)),
    st.builds(SampledRelease, sums=st.lists(SUMS, min_size=1, max_size=3).map(tuple), sampling_rate=RATES),
)
ONE = PlainRelease(loss=Loss(rho=Fraction(1, 100)))


@given(RELEASES)
def test_a_release_is_read_as_it_was_written(release: PlainRelease | SampledRelease) -> None:
    assert from_text(to_text(release)) == release


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"form":1,"rho":"1/0","xi":"0"}',
        '{"form":1,"rho":"-1","xi":"0"}',
        '{"form":1,"rho":0.1,"xi":"0"}',
        '{"form":2,"rho":"1","xi":"0"}',
        '{"form":1,"rho":"1","xi":"0","rate":"0x1p-3"}',
        '{"form":1,"rate":"nan","sums":[{"norm2":1,"sigma2":"1"}]}',
        '{"form":1,"rate":"0x1.0000000000000p-3","sums":[]}',
        '{"form":1,"rate":"0x1.0000000000000p-3","sums":[{"norm2":1.5,"sigma2":"1"}]}',
        '{"form":1,"rate":"0x1.0000000000000p-3","sums":[1]}',
        to_text(ONE) + " ",
    ],
)
def test_a_damaged_row_is_an_error(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_text(text)
    assert caught.value.code == "FN-1661"


def test_the_release_that_would_exceed_the_budget_is_refused_before_it_happens() -> None:
    budget, ledger = Budget(epsilon=1.0, delta=1e-6), list[Entry]()
    while not (excess := budget.after(ledger, (ONE, 1))[1]):
        ledger.append((ONE, 1))
    assert "expected at most 1 at delta 1e-06" in excess
    assert epsilon(ledger, 1e-6) <= 1.0 < epsilon([*ledger, (ONE, 1)], 1e-6)
    assert ledger


def test_an_exact_budget_admits_its_last_release() -> None:
    after = epsilon([(ONE, 2)], 1e-6)
    assert Budget(epsilon=after, delta=1e-6).after([(ONE, 1)], (ONE, 1)) == (after, "")

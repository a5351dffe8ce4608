"""Laws of privacy floors: two of them hold together exactly if each of them holds."""

from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.floors.rows import floor_row, parse_floor
from fanin.protos import messages as m
from fanin.protos.plans import RoundPlan

THREATS = ("curious", "semi-malicious", "active")
AUTHORITY = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
MASKS = {
    "threat": st.sampled_from(("", *THREATS)),
    "min_survivors": st.sampled_from((0, 3, 10, 50)),
    "adversarial_fraction": st.sampled_from((0.0, 0.05, 0.1, 0.3)),
    "security_bits": st.sampled_from((0, 40, 80)),
    "authority": st.sampled_from(("", AUTHORITY)),
}
NOISE = {"mechanism": st.sampled_from(("central", "distributed")), "noise_multiplier": st.sampled_from((0.0, 0.5, 2.0))}
CLIP = {
    "clip_norm": st.sampled_from((float("inf"), 0.5, 3.0)),
    "epsilon": st.sampled_from((float("inf"), 0.5, 3.0)),
    "delta": st.sampled_from((1.0, 1e-7, 1e-5)),
}
FLOORS = st.builds(
    lambda clip, noise, masks: PrivacyFloor(**clip, **noise, **masks),
    st.fixed_dictionaries(CLIP),
    st.just({}) | st.fixed_dictionaries(NOISE),
    st.just({}) | st.fixed_dictionaries({"protocol": st.just("secagg"), **MASKS}),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "threat": st.sampled_from(THREATS),
        "min_survivors": st.sampled_from((3, 10, 50)),
        "adversarial_fraction": st.sampled_from((0.0, 0.1, 0.3)),
        "security_bits": st.sampled_from((30, 40, 80)),
    },
)
PROTOCOLS = st.just(RoundPlan()) | st.builds(
    lambda options: RoundPlan(protocol="secagg", options=options), options=OPTIONS
)
TERMS = st.none() | st.builds(
    m.PrivacyTerms,
    mechanism=st.sampled_from(("central", "skellam", "unknown")),
    clip_norm=st.sampled_from((0.5, 1.0, 3.0)),
    noise_multiplier=st.sampled_from((0.4, 0.5, 2.0)),
    squared_sensitivity=st.just(1),
    epsilon=st.sampled_from((0.5, 1.0, 8.0)),
    delta=st.sampled_from((1e-7, 1e-6, 1e-4)),
    population=st.just("phones"),
    population_size=st.just(10),
)


@given(FLOORS, FLOORS, PROTOCOLS, TERMS)
def test_both_floors_hold_exactly_if_each_holds(
    first: PrivacyFloor, second: PrivacyFloor, protocol: RoundPlan, terms: m.PrivacyTerms | None
) -> None:
    both = first.tightened(second)
    # One authority serves both floors, so compare floors that have it or not alike.
    first, second = (
        PrivacyFloor(**each.values() | ({"authority": both.authority} if each.protocol else {}))  # type: ignore[arg-type]
        for each in (first, second)
    )
    holds = not first.faults(protocol, terms) and not second.faults(protocol, terms)
    assert (not both.faults(protocol, terms)) == holds


@given(FLOORS, FLOORS, FLOORS)
def test_tightening_is_commutative_associative_and_idempotent(
    first: PrivacyFloor, second: PrivacyFloor, third: PrivacyFloor
) -> None:
    assert first.tightened(second) == second.tightened(first)
    assert first.tightened(second).tightened(third) == first.tightened(second.tightened(third))
    assert first.tightened(first) == first.tightened(NO_FLOOR) == first


@given(FLOORS)
def test_a_floor_reads_as_it_was_written(floor: PrivacyFloor) -> None:
    assert parse_floor(floor_row(floor), "floor") == floor


@given(PROTOCOLS, TERMS)
def test_no_floor_accepts_every_round(protocol: RoundPlan, terms: m.PrivacyTerms | None) -> None:
    assert NO_FLOOR.faults(protocol, terms) == ()

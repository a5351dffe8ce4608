"""Laws of the weights: FedAvg's mean for any counts, one scale for a set in any order, no influence on the others."""

import math
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scenarios import CALM, PATIENT_S, WILD, bundle_in
from support.values import plan
from support.virtual import PUBLISHER
from support.virtual import plan as virtual_plan

from fanin.protos.messages import CodecSpec
from fanin.protos.plans import MAX_TIMES, Plan
from fanin.protos.plans.sections import MAX_STALENESS
from fanin.server.aggregation.weights import RunningScale, scale_of, stale_weight, steps_of
from fanin.simulation import Member, Outcome, Scenario, SyntheticTrainer, play

COUNTS = st.lists(st.sampled_from((1, 7, 100)) | st.integers(1, MAX_TIMES), min_size=1, max_size=30)
BITS = st.integers(7, 31)


def plan_with(num_updates: int, bits: int) -> Plan:
    """Return a Plan whose sum has this many bits for the steps."""
    cohort = replace(plan().cohort, concurrency=num_updates, buffer=num_updates, quorum=1)
    shift = 62 - 31 - bits
    return replace(plan(max_examples=1, max_shift=shift), cohort=cohort)


@given(COUNTS, BITS)
def test_the_shares_of_a_scaled_set_are_those_of_the_examples(counts: list[int], bits: int) -> None:
    most = 1 << bits
    scale = scale_of(counts, most)
    steps = [steps_of(count, scale) for count in counts]
    assert sum(steps) <= most and min(steps) >= 1
    if sum(counts) <= most:
        assert steps == counts
        return
    # It is the smallest one that fits, so the shares are as exact as they can be.
    assert sum(steps_of(count, scale - 1) for count in counts) > most
    for count, step in zip(counts, steps, strict=True):
        error = Fraction(step, sum(steps)) - Fraction(count, sum(counts))
        assert abs(error) <= Fraction(len(counts) + 1, most // 2 - len(counts))


@given(COUNTS, BITS, st.randoms(use_true_random=False))
def test_the_scale_of_a_set_depends_on_no_order_and_the_running_one_only_rises(
    counts: list[int], bits: int, rng: random.Random
) -> None:
    run_plan = plan_with(len(counts), bits)
    assert run_plan.max_total_examples == 1 << bits
    running, before = RunningScale(run_plan), 0
    for number, count in enumerate(rng.sample(counts, len(counts))):
        for _ in range(2):
            running.add(str(number), count)
        assert running.value >= before
        before = running.value
    expected = scale_of(counts, 1 << bits)
    assert scale_of(rng.sample(counts, len(counts)), 1 << bits) == expected
    # With all Updates there is nothing left to expect, but an earlier guess may have been higher.
    assert running.value >= expected


def test_a_claim_of_the_largest_number_leaves_the_shares_of_the_others_as_they_are() -> None:
    """A liar takes the share that it claims, as in FedAvg; the Round's head-room adds nothing to that."""
    honest, most = [10 * number for number in range(1, 10)], 1 << 31
    exact = Fraction(sum(honest), sum(honest) + MAX_TIMES)
    scale = scale_of([*honest, MAX_TIMES], most)
    steps = [steps_of(count, scale) for count in honest]
    assert abs(Fraction(sum(steps), sum(steps) + steps_of(MAX_TIMES, scale)) - exact) < 1e-7


@pytest.mark.parametrize(("examples", "scale", "steps"), [(1, 3, 1), (3, 3, 1), (12, 3, 2), (11, 3, 1)])
def test_halves_of_a_step_are_rounded_up(examples: int, scale: int, steps: int) -> None:
    assert steps_of(examples, scale) == steps


EXAMPLES = (10, 2_000, 60_000, 3_000_000)


def scaled_outcome(folder: Path, seed: int, stops_s: tuple[float, ...], *, is_wild: bool) -> Outcome:
    """Play a Run whose Updates have more examples than steps: 31 bits of a value and 20 of the shift leave 11."""
    members = tuple(
        Member(
            device=f"device-{index}",
            trainer=SyntheticTrainer(partition=index, num_examples=count),
            habits=WILD if is_wild else CALM,
        )
        for index, count in enumerate(EXAMPLES)
    )
    run_plan = virtual_plan(codec=CodecSpec(name="fixed32", max_shift=20), deadline_s=PATIENT_S, max_rounds=2)
    scenario = Scenario(
        plan=run_plan, bundle=bundle_in(folder), publisher=PUBLISHER, members=members, seed=seed, stops_s=stops_s
    )
    return play(scenario, folder)


@settings(max_examples=6)
@given(st.integers(0, 1 << 32), st.lists(st.floats(0.0, 300.0), max_size=2).map(tuple))
def test_a_scaled_set_gives_the_same_versions_in_any_order_and_after_restarts(
    seed: int, stops_s: tuple[float, ...]
) -> None:
    with TemporaryDirectory() as calm, TemporaryDirectory() as wild:
        expected = scaled_outcome(Path(calm), 0, (), is_wild=False)
        outcome = scaled_outcome(Path(wild), seed, stops_s, is_wild=True)
    assert outcome.digests == expected.digests
    assert [verdict.problem for verdict in outcome.verdicts] == [""] * 3
    assert [version.total_examples for version in outcome.versions if version.round] == [sum(EXAMPLES)] * 2


@given(st.integers(0, 1000), st.integers(0, 800))
def test_a_stale_weight_is_the_nearest_integer_to_the_exact_power(staleness: int, hundredths: int) -> None:
    weight = stale_weight(256, staleness, hundredths / 100)
    # weight = 256 / (1 + s)^(p / 100): powers of 100 compare it with integers alone.
    base, top = (1 + staleness) ** hundredths, 512**100
    assert (2 * weight - 1) ** 100 * base <= top or weight == 1
    assert (2 * weight + 1) ** 100 * base >= top


def test_the_default_exponent_is_the_inverse_square_root_and_zero_counts_all_alike() -> None:
    roots = [round(256 / math.sqrt(1 + each)) for each in range(MAX_STALENESS + 1)]
    assert [stale_weight(256, each, 0.5) for each in range(MAX_STALENESS + 1)] == roots
    assert {stale_weight(256, each, 0.0) for each in range(100)} == {256}
    assert stale_weight(1, 0, 8.0) == 1 and stale_weight(256, 1, 8.0) == 1

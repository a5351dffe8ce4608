"""The section ``[privacy]`` of a Plan: what it needs, and what it excludes, with one error each."""

from typing import Final

import pytest

from fanin.clients.planfile import parse_plan
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan

PLAN: Final = """
app = "digits"
[cohort]
concurrency = 8
[training]
learning_rate = 0.1
[aggregation]
max_examples = 1
[privacy]
mechanism = "central"
clip_norm = 0.5
noise_multiplier = 1.1
epsilon = 2.0
delta = 1e-6
population = "phones"
population_size = 100_000
"""


def parsed(*sets: str, text: str = PLAN) -> Plan:
    return parse_plan(text, "plan.toml", sets).plan


def test_a_plan_with_all_keys_of_privacy_is_valid() -> None:
    plan = parsed()
    assert (plan.privacy.mechanism, plan.privacy.clip_norm, plan.privacy.keep_seed_rounds) == ("central", 0.5, 0)
    assert parsed("codec.name=int8", "codec.max_shift=0").codec.bits == 8


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["privacy.mechanism=local"], "FN-0285"),
        (["privacy.clip_norm=0"], "FN-0285"),
        (["privacy.clip_norm=nan"], "FN-0285"),
        (["privacy.noise_multiplier=1001"], "FN-0285"),
        (["privacy.epsilon=-1"], "FN-0285"),
        (["privacy.delta=1"], "FN-0285"),
        (["privacy.delta=2e-5"], "FN-1650"),
        (['privacy.mechanism=""'], "FN-1680"),
        (["privacy.sampling=coins"], "FN-1681"),
        (["privacy.sampling=coins", "privacy.sampling_rate=0.1"], "FN-1682"),
        (["cohort.quorum=0"], "FN-0205"),
        (["privacy.sampling_rate=0.1"], "FN-1681"),
        (["aggregation.max_examples=0"], "FN-1682"),
        (["aggregation.max_examples=32"], "FN-1682"),
        (["aggregation.max_staleness=1"], "FN-1682"),
        (["aggregation.rule=trimmed_mean"], "FN-1682"),
        (["flower.strategy=flwr.serverapp.strategy:FedAvg"], "FN-1682"),
        (['stages=[{name="scaffold"}]'], "FN-1682"),
        (["codec.name=int8"], "FN-1682"),
        (["codec.name=topk"], "FN-1682"),
        (['statistics=[{name="words", bound=5}]'], "FN-1682"),
        (["int8.ranges=devices"], "FN-1682"),
        (["participants.min_examples=5"], "FN-1682"),
        (["stop.patience=3"], "FN-1682"),
        (["stop.max_int8_drop=1.0"], "FN-1682"),
        (["retention.keep_updates=0"], "FN-1682"),
        (["retention.keep_days=1.0"], "FN-1682"),
        (["round.protocol=commit_reveal"], "FN-1682"),
        (["privacy.population_size=7"], "FN-1655"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_plan_that_breaks_the_claim_is_refused(sets: list[str], code: str) -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        parsed(*sets)
    assert excinfo.value.code == code


COINS: Final = (
    "privacy.sampling=coins",
    "privacy.sampling_rate=0.25",
    "privacy.population_size=100",
    "cohort.concurrency=100",
    "cohort.quorum=0",
    "cohort.min_report_s=inf",
)


@pytest.mark.parametrize(
    "change",
    [
        "cohort.quorum=1",
        "cohort.min_report_s=5.0",
        "cohort.max_extension_s=5.0",
        "cohort.concurrency=99",
        "cohort.buffer=99",
        "cohort.selection=least_recent",
        "participants.min_devices=3",
    ],
)
def test_nothing_but_coins_may_decide_who_counts(change: str) -> None:
    assert parsed(*COINS).privacy.sampling_rate == 0.25
    with pytest.raises(InvalidPlan) as excinfo:
        parsed(*COINS, change)
    assert excinfo.value.code == "FN-1682"


@pytest.mark.parametrize("key", ["clip_norm", "noise_multiplier", "epsilon", "delta", "population", "population_size"])
def test_a_mechanism_needs_all_of_its_keys(key: str) -> None:
    text = "\n".join(line for line in PLAN.splitlines() if not line.startswith(f"{key} ="))
    with pytest.raises(InvalidPlan) as excinfo:
        parsed(text=text)
    assert excinfo.value.code == "FN-1680"
    assert f"without {key}, expected" in str(excinfo.value)

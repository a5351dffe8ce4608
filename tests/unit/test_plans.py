"""Plans as TOML: what is left out, and one sentence for each thing that is wrong."""

from pathlib import Path

import pytest
from support.errors import raises

from fanin.clients.planfile import PlanFile, parse_plan, read_plan
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import MAX_EPOCHS, CodecSpec, Training
from fanin.protos.plans import MAX_COHORT, AggregationPlan, CohortPlan, Plan, StopPlan

SHORTEST = 'app = "digits"\n[cohort]\nconcurrency = 8\n[training]\nlearning_rate = 1\n'
TIMES = (1 << 32) - 1
HUGE = "1" + "0" * 400


def test_the_shortest_plan_is_synchronous_fedavg() -> None:
    assert parse_plan(SHORTEST, "plan.toml") == PlanFile(
        app="digits",
        plan=Plan(
            name="run",
            cohort=CohortPlan(concurrency=8, buffer=8, quorum=8, deadline_s=600.0),
            training=Training(epochs=1, learning_rate=1.0, seed=0),
            codec=CodecSpec(name="fixed32", max_shift=0),
            aggregation=AggregationPlan(max_examples=4096, outer_learning_rate=1.0),
            stop=StopPlan(max_rounds=100, patience=0, min_delta=0.0),
        ),
    )


def test_a_quorum_left_out_is_the_buffer() -> None:
    found = parse_plan(SHORTEST.replace("[training]", "buffer = 5\n[training]"), "plan.toml").plan.cohort
    assert (found.concurrency, found.buffer, found.quorum) == (8, 5, 5)


COHORT_RULE = "expected 1 <= quorum <= buffer <= concurrency <= 1000000"
STOP_RULE = f"expected max_rounds of at least 1, the others of at least 0, and counts of at most {TIMES}"
TRAINING_RULE = f"expected 1 to {MAX_EPOCHS} epochs and a learning rate from 1.2e-38 to 1.7e38 (float32)"
NAME_RULE = "expected 1 to 128 letters, digits or ._:+- that do not begin with a dot"
TOP = "['aggregation', 'app', 'bundle', 'codec', 'cohort', 'name', 'stop', 'training']"

OVERFLOW = (
    "plan: the sum of a Round could overflow: (32 - 1) bits of fixed32 + max_shift 9 + 23 bits of weight "
    "(buffer 8 x max_examples 4096 x 256) = 63, expected at most 62; lower max_examples, max_shift or buffer"
)

# What stands in SHORTEST, what it is replaced by, and what is said.
WRONG = [
    ("app =", "apps =", f"plan.toml: got ['apps'], expected only {TOP}"),
    ('app = "digits"\n', "", "plan.toml: expected either app or bundle, got neither"),
    ('app = "digits"', 'app = "a"\nbundle = "b"', "plan.toml: expected either app or bundle, got both"),
    ('app = "digits"', "app = 5", "plan.toml: app = 5, expected str"),
    ('app = "digits"', "bundle = ['a']", "plan.toml: bundle = ['a'], expected str"),
    ('app = "digits"', 'name = 1\napp = "a"', "plan.toml: name = 1, expected str"),
    ('app = "digits"', 'name = "a/b"\napp = "a"', f"plan: name: got 'a/b', {NAME_RULE}"),
    ('app = "digits"', 'codec = 3\napp = "a"', "plan.toml: got codec = 3, expected a table [codec]"),
    (
        "concurrency = 8\n",
        "",
        "plan.toml: [cohort]: got no concurrency, expected a value",
    ),
    (
        "concurrency = 8",
        "size = 8",
        (
            "plan.toml: [cohort]: got ['size'], expected only ['buffer', 'concurrency', 'deadline_s', 'min_report_s', "
            "'quorum']"
        ),
    ),
    ("concurrency = 8", "concurrency = 8.0", "plan.toml: [cohort]: concurrency = 8.0, expected int"),
    ("concurrency = 8", "concurrency = true", "plan.toml: [cohort]: concurrency = True, expected int"),
    ("concurrency = 8", "concurrency = 0", f"plan: got quorum 0, buffer 0, concurrency 0, {COHORT_RULE}"),
    ("concurrency = 8", "concurrency = 8\nbuffer = 9", f"plan: got quorum 9, buffer 9, concurrency 8, {COHORT_RULE}"),
    ("concurrency = 8", "concurrency = 8\nquorum = 0", f"plan: got quorum 0, buffer 8, concurrency 8, {COHORT_RULE}"),
    (
        "concurrency = 8",
        "concurrency = 1000001\nbuffer = 1",
        f"plan: got quorum 1, buffer 1, concurrency 1000001, {COHORT_RULE}",
    ),
    (
        "concurrency = 8",
        "concurrency = 8\ndeadline_s = 0",
        "plan: got deadline_s 0.0, expected a positive number of seconds",
    ),
    (
        "concurrency = 8",
        "concurrency = 8\ndeadline_s = nan",
        "plan: got deadline_s nan, expected a positive number of seconds",
    ),
    (
        "concurrency = 8",
        f"concurrency = 8\ndeadline_s = {HUGE}",
        "plan: got deadline_s inf, expected a positive number of seconds",
    ),
    (
        "concurrency = 8",
        'concurrency = 8\ndeadline_s = "1 h"',
        "plan.toml: [cohort]: deadline_s = '1 h', expected float",
    ),
    ("learning_rate = 1\n", "", "plan.toml: [training]: got no learning_rate, expected a value"),
    ("learning_rate = 1", "learning_rate = 0", f"plan: got epochs 1, learning_rate 0.0, {TRAINING_RULE}"),
    ("learning_rate = 1", "learning_rate = 1e-60", f"plan: got epochs 1, learning_rate 1e-60, {TRAINING_RULE}"),
    ("learning_rate = 1", "learning_rate = 1e300", f"plan: got epochs 1, learning_rate 1e+300, {TRAINING_RULE}"),
    ("learning_rate = 1", "learning_rate = inf", f"plan: got epochs 1, learning_rate inf, {TRAINING_RULE}"),
    ("learning_rate = 1", "learning_rate = 1\nepochs = 0", f"plan: got epochs 0, learning_rate 1.0, {TRAINING_RULE}"),
    (
        "learning_rate = 1",
        f"learning_rate = 1\nepochs = {MAX_EPOCHS + 1}",
        f"plan: got epochs {MAX_EPOCHS + 1}, learning_rate 1.0, {TRAINING_RULE}",
    ),
    ("learning_rate = 1", "learning_rate = 1\nseed = -1", "plan: got seed -1, expected 0 <= seed < 2^64"),
    (
        "learning_rate = 1",
        f"learning_rate = 1\nseed = {1 << 64}",
        f"plan: got seed {1 << 64}, expected 0 <= seed < 2^64",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[stop]\nmax_rounds = 0",
        f"plan: got max_rounds 0, patience 0, min_delta 0.0, {STOP_RULE}",
    ),
    (
        "learning_rate = 1",
        f"learning_rate = 1\n[stop]\nmax_rounds = {TIMES + 1}",
        f"plan: got max_rounds {TIMES + 1}, patience 0, min_delta 0.0, {STOP_RULE}",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[stop]\npatience = -1",
        f"plan: got max_rounds 100, patience -1, min_delta 0.0, {STOP_RULE}",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[stop]\nmin_delta = nan",
        f"plan: got max_rounds 100, patience 0, min_delta nan, {STOP_RULE}",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[aggregation]\nmax_examples = 0",
        f"plan: got max_examples 0, expected 1 to {TIMES}",
    ),
    (
        "learning_rate = 1",
        f"learning_rate = 1\n[aggregation]\nmax_examples = {TIMES + 1}",
        f"plan: got max_examples {TIMES + 1}, expected 1 to {TIMES}",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[aggregation]\nouter_learning_rate = -1",
        "plan: got outer_learning_rate -1.0, expected a positive number",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[aggregation]\nmax_staleness = 1001",
        "plan: got max_staleness 1001, expected 0 (none) to 1000 versions",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[stop]\nmax_int8_drop = -0.5",
        (
            "plan: got max_int8_drop -0.5, expected 0.0 (never pause) to 100: points of accuracy, or percent of a "
            "regression model's squared error"
        ),
    ),
    (
        "concurrency = 8",
        "concurrency = 8\nmin_report_s = 0",
        "plan: got min_report_s 0.0, expected a positive number of seconds",
    ),
    (
        "learning_rate = 1",
        'learning_rate = 1\n[codec]\nname = "int4"',
        "plan: got codec 'int4', expected one of ['fixed32', 'int8']",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[codec]\nname = []",
        "plan.toml: [codec]: name = [], expected str",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[codec]\nmax_shift = -1",
        "plan: got max_shift -1, expected at least 0",
    ),
    (
        "learning_rate = 1",
        "learning_rate = 1\n[codec]\nmax_shift = 9",
        OVERFLOW,
    ),
]


@pytest.mark.parametrize(("good", "bad", "text"), WRONG, ids=[bad[:40] or text for _, bad, text in WRONG])
def test_each_mistake_has_its_sentence(good: str, bad: str, text: str) -> None:
    assert good in SHORTEST
    with raises(InvalidPlan, text):
        parse_plan(SHORTEST.replace(good, bad), "plan.toml")


def test_a_shift_up_to_the_headroom_is_admitted() -> None:
    found = parse_plan(SHORTEST + "[codec]\nmax_shift = 8\n", "plan.toml").plan
    assert found.max_total_weight == 8 * 4096 * 256


def test_int8_has_shifts_unless_the_plan_says_otherwise() -> None:
    codec = SHORTEST + '[codec]\nname = "int8"\n'
    assert parse_plan(codec, "plan.toml").plan.codec == CodecSpec(name="int8", max_shift=12)
    assert parse_plan(codec + "max_shift = 0\n", "plan.toml").plan.codec == CodecSpec(name="int8", max_shift=0)


def test_a_million_int8_devices_have_headroom() -> None:
    found = parse_plan(SHORTEST.replace("= 8", f"= {MAX_COHORT}") + '[codec]\nname = "int8"\n', "plan.toml").plan
    assert found.cohort.buffer == MAX_COHORT


def test_what_is_not_toml_is_said_with_its_place() -> None:
    with pytest.raises(InvalidPlan, match=r"^plan\.toml: not TOML \(.*at line 1, column 8\)\)$"):
        parse_plan("name = ]", "plan.toml")


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    with pytest.raises(InvalidPlan, match=r"plan\.toml: cannot be read \(.*No such file"):
        read_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidPlan, match=r"plan\.toml: cannot be read \(.*utf-8"):
        read_plan(path)
    path.write_text(SHORTEST)
    assert read_plan(path) == parse_plan(SHORTEST, "plan.toml")

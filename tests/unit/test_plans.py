"""Plans as TOML: default values, options, and one error message for each mistake."""

from pathlib import Path

import pytest
from support.errors import raises

from fanin.clients.planfile import Override, PlanFile, parse_plan, read_plan
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import MAX_COHORT, MAX_EPOCHS, AggregationPlan, CohortPlan, Plan, StopPlan

SHORTEST = 'app = "digits"\n[cohort]\nconcurrency = 8\n[training]\nlearning_rate = 1\n'
TIMES, HUGE = (1 << 32) - 1, "1" + "0" * 400


def test_the_shortest_plan_is_synchronous_fedavg() -> None:
    assert parse_plan(SHORTEST, "plan.toml") == PlanFile(
        sources="plan.toml",
        app="digits",
        plan=Plan(
            name="run",
            cohort=CohortPlan(concurrency=8, buffer=8, quorum=6, deadline_s=600.0),
            training=Training(epochs=1, learning_rate=1.0, seed=0),
            codec=CodecSpec(name="fixed32", max_shift=0),
            aggregation=AggregationPlan(max_examples=0),
            stop=StopPlan(max_rounds=100, patience=0, min_delta=0.0),
        ),
    )


@pytest.mark.parametrize(("buffer", "quorum"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (8, 6)])
def test_the_default_quorum_is_three_quarters_of_the_buffer(buffer: int, quorum: int) -> None:
    cohort = parse_plan(SHORTEST.replace("[training]", f"buffer = {buffer}\n[training]"), "plan.toml").plan.cohort
    assert (cohort.concurrency, cohort.buffer, cohort.quorum) == (8, buffer, quorum)


SEE = "; docs/reference/plan.md describes the key"
COHORT_RULE = "expected quorum <= buffer <= concurrency; lower quorum or buffer, or raise concurrency"
DEVICES_RULE = f"expected an integer from 1 to 1000000{SEE}"
RATE_RULE = f"expected a number from 1.2e-38 to 1.7e+38{SEE}"
SECONDS_RULE = f"expected a number above 0 and below inf{SEE}"
TIMES_RULE = f"expected an integer from 1 to {TIMES}{SEE}"
CAP_RULE = f"expected an integer from 0 to {TIMES}{SEE}"
NAME_RULE = f"expected a string of 1 to 128 letters, digits or ._:+- that do not begin with a dot{SEE}"
TOP = (
    "app, bundle, name, [cohort], [training], [[schedule]], [codec], [[stages]], [[statistics]], [aggregation], "
    "[stop], [evaluation], [int8], [flower], [retention], [participants], [round], "
    "[privacy]"
)
COHORT_KEYS = (
    "concurrency, buffer, quorum, deadline_s, min_report_s, report_factor, max_extension_s, selection, "
    "selection_options"
)
OVERFLOW = (
    "the sum of a Round could overflow: (32 - 1) bits of fixed32 + max_shift 21 + 11 bits of weight "
    "(buffer 8 x 256 steps) = 63, expected at most 62; lower max_shift or buffer"
)
APP, COHORT, RATE = 'app = "digits"', "concurrency = 8", "learning_rate = 1"

# A text in SHORTEST, its replacement, and the error message without the file name.
STAGE = '[[stages]]\nname = "error_feedback"\n'
OPTIONS_RULE = f"expected a table of numbers, strings, true and false{SEE}"
ENTRY_RULE = f"expected a finite number, an integer of 64 bits, a string, true or false{SEE}"
SETTING_RULE = (
    'expected a finite number, an integer of 64 bits, a string, true, false, bytes as { base64 = "AAEC" }, or a list '
    f"of one of these types{SEE}"
)
FORM = "1 to 128 letters, digits or ._:+- that do not begin with a dot"
BRACKETS = 'expected a list of sections [[stages]] with name = "NAME"; write it with double brackets'
STAGES_RULE = "expected at most 8 of different names; remove stages"
NINE, WORDS = [f"stage-{number}" for number in range(9)], '[[statistics]]\nname = "words"\nbound = 9\n'
WRONG = [
    (
        RATE,
        f"{RATE}\n{WORDS}{WORDS}",
        "statistics: got ['words', 'words'], expected at most 32 of different names; remove some",
    ),
    (
        RATE,
        f"{RATE}\n{WORDS.replace('words', 'eval_words')}",
        "statistics: got 'eval_words', which fanin declares itself, expected other names; rename it",
    ),
    (
        RATE,
        f"{RATE}\n{WORDS.replace('words', 'examples')}",
        "statistics: got 'examples', which fanin declares itself, expected other names; rename it",
    ),
    (
        RATE,
        f"{RATE}\n{WORDS.replace('9', '0')}",
        f"statistics.0.bound: got 0, expected an integer from 1 to {1 << 56}{SEE}",
    ),
    (RATE, f"{RATE}\n[stages]", f"stages: got {{}}, {BRACKETS}"),
    (RATE, f"{RATE}\n[stages]\nname = 'scaffold'", f"stages: got {{'name': 'scaffold'}}, {BRACKETS}"),
    (RATE, f"{RATE}\n[[stages]]", f"stages.0.name: missing, {NAME_RULE.removesuffix(SEE)}; add the key"),
    (
        RATE,
        f"{RATE}\n{STAGE}option = 1",
        "stages.0.option: unknown key, expected one of name, options; did you mean stages.0.options?",
    ),
    (RATE, f"{RATE}\n[flower.config]\na = [1, 2.0]", f"flower.config.a: got (1, 2.0), {SETTING_RULE}"),
    (RATE, f"{RATE}\n[flower.config]\na = [[1]]", f"flower.config.a: got ((1,),), {SETTING_RULE}"),
    (RATE, f"{RATE}\n[flower.config]\na = {1 << 63}", f"flower.config.a: got {1 << 63}, {SETTING_RULE}"),
    (RATE, f"{RATE}\n[flower.config]\na.base64 = '?'", f"flower.config.a: got {{'base64': '?'}}, {SETTING_RULE}"),
    (RATE, f"{RATE}\n{STAGE}options = 1", f"stages.0.options: got 1, {OPTIONS_RULE}"),
    (RATE, f"{RATE}\n{STAGE}options.share = nan", f"stages.0.options.share: got nan, {ENTRY_RULE}"),
    (RATE, f"{RATE}\n{STAGE}options.share = [1]", f"stages.0.options.share: got [1], {ENTRY_RULE}"),
    (
        RATE,
        f"{RATE}\n{STAGE}options = {{a = 1, num_devices = 1{400 * '0'}, b = nan}}",
        f"stages.0.options.num_devices: got an integer of 1329 bits, {ENTRY_RULE}",
    ),
    (
        RATE,
        f"{RATE}\n{STAGE}options.a = [0x{4000 * 'f'}]",
        f"stages.0.options.a: got a list with a very long integer, {ENTRY_RULE}",
    ),
    (
        RATE,
        f"{RATE}\n{STAGE}options.'my share' = 1",
        f"stages.0.options: got the name 'my share', expected {FORM}{SEE}",
    ),
    (RATE, f"{RATE}\n{STAGE}{STAGE}", f"stages: got ['error_feedback', 'error_feedback'], {STAGES_RULE}"),
    (
        RATE,
        RATE + "".join(f'\n[[stages]]\nname = "{name}"' for name in NINE),
        f"stages: got {str(NINE)[:128]}, {STAGES_RULE}",
    ),
    (
        RATE,
        f'{RATE}\n[[stages]]\nname = "int8"',
        (
            "stages: got 'int8', a second codec in addition to codec.name = 'fixed32', expected one part that writes "
            "the payload; remove the stage, or set codec.name"
        ),
    ),
    (
        RATE,
        f"{RATE}\n[aggregation]\nmax_staleness = 1\n{STAGE}",
        (
            "got aggregation.max_staleness 1 with the stages ['error_feedback'], expected 0; set it to 0 or remove the "
            "stages"
        ),
    ),
    ("app =", "apps =", f"apps: unknown key, expected one of {TOP}; did you mean app?"),
    (APP, f"{APP}\n[other]", f"other: unknown section, expected one of {TOP}; docs/reference/plan.md lists the keys"),
    (
        APP,
        f"{APP}\nconcurrency = 3",
        f"concurrency: unknown key, expected one of {TOP}; did you mean cohort.concurrency?",
    ),
    (APP, f"{APP}\nepochs = 3", f"epochs: unknown key, expected one of {TOP}; did you mean training.epochs?"),
    (APP, f"{APP}\nconfig = 3", f"config: unknown key, expected one of {TOP}; did you mean flower.config?"),
    (APP, f"{APP}\n[cohorts]", f"cohorts: unknown section, expected one of {TOP}; did you mean cohort?"),
    (f"{APP}\n", "", "expected either app or bundle, got neither"),
    (APP, 'app = "a"\nbundle = "b"', "expected either app or bundle, got both"),
    (APP, "app = 5", f"app: got 5, expected a string{SEE}"),
    (APP, "bundle = ['a']", f"bundle: got ['a'], expected a string{SEE}"),
    (APP, 'name = 1\napp = "a"', f"name: got 1, {NAME_RULE}"),
    (APP, 'name = "a/b"\napp = "a"', f"name: got 'a/b', {NAME_RULE}"),
    (APP, 'codec = 3\napp = "a"', "codec: got 3, expected a section [codec]"),
    (f"{COHORT}\n", "", "cohort.concurrency: missing, expected an integer from 1 to 1000000; add the key"),
    (
        COHORT,
        "concurency = 8",
        f"cohort.concurency: unknown key, expected one of {COHORT_KEYS}; did you mean cohort.concurrency?",
    ),
    (
        COHORT,
        f"{COHORT}\nmax_stalenes = 8",
        f"cohort.max_stalenes: unknown key, expected one of {COHORT_KEYS}; did you mean aggregation.max_staleness?",
    ),
    (
        COHORT,
        f"{COHORT}\noptions = {{ alpha = 1 }}",
        f"cohort.options: unknown section, expected one of {COHORT_KEYS}; did you mean cohort.selection_options?",
    ),
    (
        COHORT,
        f"{COHORT}\nx = 8",
        f"cohort.x: unknown key, expected one of {COHORT_KEYS}; docs/reference/plan.md lists the keys",
    ),
    (COHORT, "concurrency = 8.0", f"cohort.concurrency: got 8.0, {DEVICES_RULE}"),
    (COHORT, "concurrency = true", f"cohort.concurrency: got True, {DEVICES_RULE}"),
    (COHORT, "concurrency = 0", f"cohort.concurrency: got 0, {DEVICES_RULE}"),
    (COHORT, f"concurrency = 0x{'f' * 5000}", f"cohort.concurrency: got an integer of 20000 bits, {DEVICES_RULE}"),
    (COHORT, "concurrency = 1000001\nbuffer = 1", f"cohort.concurrency: got 1000001, {DEVICES_RULE}"),
    (COHORT, f"{COHORT}\nquorum = 0", "got cohort.quorum 0, expected at least 1 without coins; raise it"),
    (COHORT, f"{COHORT}\nbuffer = 9", f"cohort: got quorum 7, buffer 9, concurrency 8, {COHORT_RULE}"),
    (COHORT, f"{COHORT}\nbuffer = 4\nquorum = 5", f"cohort: got quorum 5, buffer 4, concurrency 8, {COHORT_RULE}"),
    (COHORT, f"{COHORT}\ndeadline_s = 0", f"cohort.deadline_s: got 0.0, {SECONDS_RULE}"),
    (COHORT, f"{COHORT}\ndeadline_s = nan", f"cohort.deadline_s: got nan, {SECONDS_RULE}"),
    (COHORT, f"{COHORT}\ndeadline_s = {HUGE}", f"cohort.deadline_s: got inf, {SECONDS_RULE}"),
    (COHORT, f'{COHORT}\ndeadline_s = "1 h"', f"cohort.deadline_s: got '1 h', {SECONDS_RULE}"),
    (COHORT, f"{COHORT}\ndeadline_s = true", f"cohort.deadline_s: got True, {SECONDS_RULE}"),
    (COHORT, f"{COHORT}\nmin_report_s = 0", f"cohort.min_report_s: got 0.0, expected a number above 0{SEE}"),
    (f"{RATE}\n", "", "training.learning_rate: missing, expected a number from 1.2e-38 to 1.7e+38; add the key"),
    *(
        (RATE, f"learning_rate = {rate}", f"training.learning_rate: got {value}, {RATE_RULE}")
        for rate, value in (("0", "0.0"), ("1e-60", "1e-60"), ("1e300", "1e+300"), ("inf", "inf"), ("nan", "nan"))
    ),
    *(
        (RATE, f"{RATE}\nepochs = {number}", f"training.epochs: got {number}, expected an integer from 1 to 10000{SEE}")
        for number in (0, MAX_EPOCHS + 1)
    ),
    *(
        (
            RATE,
            f"{RATE}\nseed = {seed}",
            f"training.seed: got {seed}, expected an integer from 0 to {(1 << 64) - 1}{SEE}",
        )
        for seed in (-1, 1 << 64)
    ),
    (
        RATE,
        f"{RATE}\nproximal_weight = -0.1",
        f"training.proximal_weight: got -0.1, expected a number from 0 to 1.7e+38{SEE}",
    ),
    (
        RATE,
        f"{RATE}\nbatch_size = {TIMES + 1}",
        f"training.batch_size: got {TIMES + 1}, expected an integer from 0 to {TIMES}{SEE}",
    ),
    (RATE, f"{RATE}\n[stop]\nmax_rounds = 0", f"stop.max_rounds: got 0, {TIMES_RULE}"),
    (RATE, f"{RATE}\n[stop]\nmax_rounds = {TIMES + 1}", f"stop.max_rounds: got {TIMES + 1}, {TIMES_RULE}"),
    (
        RATE,
        f"{RATE}\n[stop]\npatience = -1",
        f"stop.patience: got -1, expected an integer from 0 to {TIMES}{SEE}",
    ),
    (
        RATE,
        f"{RATE}\n[stop]\nmin_delta = nan",
        f"stop.min_delta: got nan, expected a number of at least 0 and below inf{SEE}",
    ),
    (
        RATE,
        f"{RATE}\n[stop]\nmax_int8_drop = -0.5",
        f"stop.max_int8_drop: got -0.5, expected a number from 0 to 100{SEE}",
    ),
    (RATE, f"{RATE}\n[aggregation]\nmax_examples = -1", f"aggregation.max_examples: got -1, {CAP_RULE}"),
    (
        RATE,
        f"{RATE}\n[aggregation]\nmax_examples = {TIMES + 1}",
        f"aggregation.max_examples: got {TIMES + 1}, {CAP_RULE}",
    ),
    (
        RATE,
        f"{RATE}\n[aggregation]\nmax_staleness = 1001",
        f"aggregation.max_staleness: got 1001, expected an integer from 0 to 1000{SEE}",
    ),
    (RATE, f'{RATE}\n[codec]\nname = "int 4"', f"codec.name: got 'int 4', {NAME_RULE}"),
    (RATE, f"{RATE}\n[codec]\nname = []", f"codec.name: got [], {NAME_RULE}"),
    (RATE, f"{RATE}\n[codec]\nmax_shift = -1", f"codec.max_shift: got -1, expected an integer from 0 to 62{SEE}"),
    (RATE, f"{RATE}\n[codec]\nmax_shift = 21", OVERFLOW),
]


@pytest.mark.parametrize(("good", "bad", "text"), WRONG, ids=[bad[:40] or text for _, bad, text in WRONG])
def test_each_mistake_has_its_error(good: str, bad: str, text: str) -> None:
    assert good in SHORTEST
    with raises(InvalidPlan, f"plan.toml: {text}"):
        parse_plan(SHORTEST.replace(good, bad), "plan.toml")


def test_a_shift_up_to_the_headroom_is_admitted() -> None:
    plan = parse_plan(SHORTEST + "[codec]\nmax_shift = 20\n", "plan.toml").plan
    assert plan.max_total_examples == 8 * 256
    stale = "[aggregation]\nmax_staleness = 1\n[codec]\nmax_shift = "
    assert parse_plan(f"{SHORTEST}{stale}12\n", "plan.toml").plan.max_total_examples == 8 * 256
    with pytest.raises(InvalidPlan, match="FN-0206"):
        parse_plan(f"{SHORTEST}{stale}13\n", "plan.toml")


def test_int8_has_shifts_unless_the_plan_sets_another_number() -> None:
    codec = SHORTEST + '[codec]\nname = "int8"\n'
    assert parse_plan(codec, "plan.toml").plan.codec == CodecSpec(name="int8", max_shift=12)
    assert parse_plan(codec + "max_shift = 0\n", "plan.toml").plan.codec == CodecSpec(name="int8", max_shift=0)


def test_a_million_int8_devices_have_headroom() -> None:
    plan = parse_plan(SHORTEST.replace("= 8", f"= {MAX_COHORT}") + '[codec]\nname = "int8"\n', "plan.toml").plan
    assert plan.cohort.buffer == MAX_COHORT


def test_invalid_toml_is_reported_with_its_place() -> None:
    with pytest.raises(InvalidPlan, match=r"^plan\.toml: not TOML \(.*at line 1, column 8\)\)\n"):
        parse_plan("name = ]", "plan.toml")


@pytest.mark.parametrize("text", [f"name = {'9' * 5000}", f"name = {'[' * 100_000}"], ids=["long", "deep"])
def test_a_document_beyond_the_limits_of_the_parser_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="FN-0280"):
        parse_plan(text, "plan.toml")


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    path, junk = tmp_path / "plan.toml", tmp_path / "junk.toml"
    junk.write_bytes(b"\xff\xfe")
    for wrong in (path, junk):
        with pytest.raises(InvalidPlan, match="FN-0280"):
            read_plan(wrong)
    path.write_text(SHORTEST)
    assert read_plan(path) == parse_plan(SHORTEST, str(path))


OVERRIDES = [
    ("cohort.concurrency=9", "cohort", "concurrency", 9),
    ("cohort.concurrency = 9", "cohort", "concurrency", 9),
    ("codec.name=int8", "codec", "name", "int8"),
    ('codec.name="int8"', "codec", "name", "int8"),
    ("codec={name = 'int8', max_shift = 3}", "codec", "max_shift", 3),
    ("aggregation.max_staleness=2", "aggregation", "max_staleness", 2),
    ("training.learning_rate=2", "training", "learning_rate", 2.0),
]


@pytest.mark.parametrize(("option", "section", "key", "value"), OVERRIDES)
def test_an_option_overrides_a_key(option: str, section: str, key: str, value: object) -> None:
    plan = parse_plan(SHORTEST, "plan.toml", [option]).plan
    assert getattr(getattr(plan, section), key) == value


def test_the_last_option_counts_and_defaults_follow_the_options() -> None:
    file = parse_plan(SHORTEST, "plan.toml", ["cohort.concurrency=3", "name=a=b", "cohort.concurrency=5", "name=a-b"])
    assert (file.plan.name, file.plan.cohort.concurrency, file.plan.cohort.quorum) == ("a-b", 5, 4)


def test_an_option_replaces_the_app_by_a_bundle() -> None:
    file = parse_plan(SHORTEST, "plan.toml", ["app=", "bundle=folder"])
    assert (file.app, file.bundle) == ("", "folder")


BAD_OPTIONS = [
    ("cohort.concurrency=0", f"--set: cohort.concurrency: got 0, {DEVICES_RULE}"),
    ("cohort.concurrency=many", f"--set: cohort.concurrency: got 'many', {DEVICES_RULE}"),
    (
        "cohort.concurency=8",
        f"--set: cohort.concurency: unknown key, expected one of {COHORT_KEYS}; did you mean cohort.concurrency?",
    ),
    ("cohrt.concurrency=8", f"--set: cohrt: unknown section, expected one of {TOP}; did you mean cohort?"),
    ("cohort={}", "--set: cohort.concurrency: missing, expected an integer from 1 to 1000000; add the key"),
    ("cohort=8", "--set: cohort: got 8, expected a section [cohort], as in --set cohort.concurrency=VALUE"),
    (
        "stages=scaffold",
        ("--set: stages: got 'scaffold', expected a list of tables, as in --set 'stages=[{name=\"scaffold\"}]'"),
    ),
    (
        "stages.0.name=scaffold",
        (
            "--set: stages.0.name: stages is not a section; set stages as a whole: a list of tables, as in "
            "--set 'stages=[{name=\"NAME\"}]'"
        ),
    ),
    ("training.optimizer.momentum=x", f"--set: training.optimizer.momentum: got 'x', expected a finite number{SEE}"),
    ("name.x=8", "--set: name.x: name is not a section; set name as a whole"),
    ("cohort.quorum=9", f"plan.toml with --set: cohort: got quorum 9, buffer 8, concurrency 8, {COHORT_RULE}"),
    ("codec.max_shift=21", f"plan.toml with --set: {OVERFLOW}"),
    ("bundle=b", "plan.toml with --set: expected either app or bundle, got both"),
    ("name=8\nx=1", f"--set: name: got '8\\nx=1', {NAME_RULE}"),
    ("cohort.concurrency", "--set cohort.concurrency: expected KEY=VALUE, for example --set cohort.concurrency=8"),
    ("=8", "--set =8: expected KEY=VALUE, for example --set cohort.concurrency=8"),
]


@pytest.mark.parametrize(("option", "text"), BAD_OPTIONS)
def test_a_wrong_option_has_the_error_of_the_file_and_names_the_option(option: str, text: str) -> None:
    with raises(InvalidPlan, text):
        parse_plan(SHORTEST, "plan.toml", [option])


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("training.momentum=0.9", "training.optimizer.momentum"),
        ("training.momentun=0.9", "training.optimizer.momentum"),
        ("training.weight_decay=0.9", "training.optimizer.weight_decay"),
        ("momentum=0.9", "training.optimizer.momentum"),
        ("aggregation.momentum=0.9", "aggregation.outer_options.momentum"),
        ("aggregation.outer_learning_rate=1", "aggregation.outer_options.learning_rate"),
    ],
)
def test_a_setting_of_an_optimizer_in_the_wrong_section_is_found(option: str, nearest: str) -> None:
    with pytest.raises(InvalidPlan, match=rf"; did you mean {nearest}\?\n"):
        parse_plan(SHORTEST, "plan.toml", [option])


def test_a_dotted_option_sets_one_entry_of_a_table() -> None:
    whole = Override(path="training.optimizer", value={"momentum": 0.9, "weight_decay": 0.1})
    options = [whole, "training.optimizer.momentum=0.5", "flower.config.a.b=[1, 2]"]
    plan = parse_plan(SHORTEST, "plan.toml", options).plan
    assert plan.training.optimizer == {"momentum": 0.5, "weight_decay": 0.1}
    assert plan.flower.config == {"a.b": (1, 2)}
    assert whole.value == {"momentum": 0.9, "weight_decay": 0.1}


def test_an_option_does_not_hide_a_mistake_of_the_file() -> None:
    with raises(InvalidPlan, "plan.toml: stop: got 3, expected a section [stop]"):
        parse_plan(f"stop = 3\n{SHORTEST}", "plan.toml", ["stop.max_rounds=5"])

"""Laws of Plans: every Plan can be written as TOML and read back, and all lists of codecs agree."""

import base64
import json

from hypothesis import given
from hypothesis import strategies as st
from support.laws import plans

from fanin.clients.planfile import ROOT, parse_plan
from fanin.edge.codecs.fixed import CODECS, RunCodec
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import CODEC_BITS, Plan, PrivacyPlan, ScheduledChange
from fanin.protos.plans.keys import SectionField, fields_of
from fanin.protos.roles import TensorRole


def toml_of(plan: Plan) -> str:
    """Return the Plan as TOML with all its keys."""
    lines = [f'name = "{plan.name}"', 'bundle = "bundle"']
    for table in ("cohort", "training", "codec", "aggregation", "stop", "evaluation", "int8"):
        lines.append(f"[{table}]")
        part = getattr(plan, table)
        for name in type(part).__slots__:
            value = getattr(part, name)
            if value is None or isinstance(value, tuple):
                continue
            lines.append(f"{name} = {setting_toml(value)}")
    for stage in plan.stages:
        lines += ["[[stages]]", f'name = "{stage.name}"', f"options = {setting_toml(stage.options)}"]
    for change in plan.schedule:
        lines += ["[[schedule]]", *change_toml(change)]
    for each in plan.statistics:
        lines += ["[[statistics]]", f'name = "{each.name}"', f"unit = {json.dumps(each.unit)}", f"bound = {each.bound}"]
    for metric in plan.evaluation.metrics:
        lines += ["[[evaluation.metrics]]", f'name = "{metric.name}"']
    for each in plan.evaluation.sets:
        lines += ["[[evaluation.sets]]", f'name = "{each.name}"', f'data = "{each.data}"']
    for table in ("retention", "participants", "round", "privacy"):
        part = getattr(plan, table)
        values = {name: getattr(part, name) for name in type(part).__slots__}
        if part == PrivacyPlan():
            continue
        if isinstance(part, PrivacyPlan) and not part.sampling_rate:
            # The default of the rate of coins is out of its range, so it cannot be written.
            values.pop("sampling_rate")
        lines += [
            f"[{table}]",
            *(f"{name} = {setting_toml(value)}" for name, value in values.items() if value is not None),
        ]
    lines.append("[flower.config]")
    lines += [f"{key_toml(name)} = {setting_toml(value)}" for name, value in plan.flower.config.items()]
    lines.append("[flower.roles]")
    lines += [f"{key_toml(name)} = {role_toml(role)}" for name, role in plan.flower.roles.items()]
    return "\n".join(lines)


def key_toml(name: str) -> str:
    """Return a quoted key. TOML has no pairs of surrogates, which JSON writes for a character beyond U+FFFF."""
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def change_toml(change: ScheduledChange) -> list[str]:
    """Return the keys of a change that are set."""
    values = {name: getattr(change, name) for name in type(change).__slots__ if name != "flower"}
    lines = [f"{name} = {setting_toml(value)}" for name, value in values.items() if value is not None]
    return [*lines, f"flower.config = {setting_toml(change.flower.config)}"]


def role_toml(role: TensorRole) -> str:
    """Return a role in TOML: as a text if it has no range."""
    bounds = {name: bound for name in ("lowest", "highest") if (bound := getattr(role, name)) is not None}
    return setting_toml({"role": role.role.value, **bounds} if bounds else role.role.value)


def setting_toml(value: object) -> str:
    """Return a value of a Plan in TOML."""
    match value:
        case bool():
            return str(value).lower()
        case bytes():
            return f'{{ base64 = "{base64.b64encode(value).decode()}" }}'
        case str():
            return json.dumps(value)
        case dict():
            return f"{{ {', '.join(f'{json.dumps(name)} = {setting_toml(item)}' for name, item in value.items())} }}"
        case tuple():
            return f"[{', '.join(map(setting_toml, value))}]"
    return repr(value)


@given(plans())
def test_a_complete_plan_in_toml_reads_back(plan: Plan) -> None:
    assert parse_plan(toml_of(plan), "plan.toml").plan == plan


VALUES = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.floats().map(repr),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(('""', '"fixed32"', '"int8"', "[]", "{}", "{ x = 1 }", "1e400", "2026-01-01", "1" + "0" * 400)),
)
SECTIONS = {name: fields_of(field.section) for name, field in ROOT.items() if isinstance(field, SectionField)}
KEYS = st.sampled_from([*ROOT, "other", *(f"{section}.{key}" for section in SECTIONS for key in SECTIONS[section])])
GOOD = {"app": '"digits"', "cohort.concurrency": "3", "training.learning_rate": "0.1"}


@given(st.dictionaries(KEYS, VALUES, max_size=3).map(lambda rows: GOOD | rows) | st.text(max_size=20))
def test_any_text_is_a_plan_or_raises_invalid_plan(rows: dict[str, str] | str) -> None:
    text = rows if isinstance(rows, str) else "\n".join(f"{key} = {value}" for key, value in rows.items())
    try:
        planfile = parse_plan(text, "plan.toml")
    except InvalidPlan:
        return
    assert parse_plan(toml_of(planfile.plan), "plan.toml").plan == planfile.plan


def test_plans_and_codecs_name_the_same_codecs_with_the_same_bits() -> None:
    assert set(CODEC_BITS) == set(CODECS)
    two_values = TensorTable.of({"a": (2,)})
    codecs = {name: RunCodec(codec=codec, max_shift=0) for name, codec in CODECS.items()}
    assert {name: 4 * codec.payload_bytes(two_values) for name, codec in codecs.items()} == CODEC_BITS


def test_sets_of_an_evaluation_are_read_and_written() -> None:
    lines = [f"{key} = {value}" for key, value in GOOD.items()] + ['evaluation.data = "digits"']
    for name in ("noisy", "foreign"):
        lines += ["[[evaluation.sets]]", f'name = "{name}"', f'data = "{name}-digits"']
    plan = parse_plan("\n".join(lines), "plan.toml").plan
    assert [(each.name, each.data) for each in plan.evaluation.sets] == [
        ("noisy", "noisy-digits"),
        ("foreign", "foreign-digits"),
    ]
    assert parse_plan(toml_of(plan), "plan.toml").plan == plan

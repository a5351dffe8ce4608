"""A Plan as text: the main keys, and every other key that differs from its default."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fanin.protos.plans import Plan
from fanin.protos.plans.keys import KeyField, SectionField, fields_of, keys_of

_MAIN: Final = MappingProxyType(
    {
        "cohort": ("concurrency", "buffer", "quorum", "deadline_s", "selection"),
        "training": ("epochs", "learning_rate"),
        "schedule": ("from_round",),
        "codec": ("name", "max_shift"),
        "stages": ("name",),
        "statistics": ("name", "unit", "bound"),
        "aggregation": ("rule", "outer_optimizer"),
        "stop": ("max_rounds",),
    }
)
"""The keys of each section that are shown also with their defaults."""


def plan_sections(plan: Plan) -> list[tuple[str, str]]:
    """Return the sections of a Plan with their keys; a section that is a list, such as a stage, several times."""
    rows = []
    for name, field in fields_of(Plan).items():
        if isinstance(field, KeyField):
            continue
        value = getattr(plan, name)
        for section in value if field.is_list else (value,):
            if text := _section_text(name, section):
                rows.append((name, text))
    if metrics := plan.evaluation.metrics:
        rows.append(("evaluation.metrics", ", ".join(metric.name for metric in metrics)))
    if sets := plan.evaluation.sets:
        rows.append(("evaluation.sets", ", ".join(f"{each.name} ({each.data})" for each in sets)))
    return rows


def plan_lines(plan: Plan) -> list[str]:
    """Return the sections of a Plan as lines."""
    return [f"  plan      {plan.name}", *(f"            {name}: {text}" for name, text in plan_sections(plan))]


def settings_lines(plan: Plan, round_number: int) -> list[str]:
    """Return the settings of a Round as lines; none without a schedule, because the Plan has them."""
    if not plan.schedule:
        return []
    lines = [f"  settings  round {round_number}"]
    for name, section in (("training", plan.training_in(round_number)), ("flower", plan.flower_in(round_number))):
        if text := _section_text(name, section):
            lines.append(f"            {name}: {text}")
    return lines


def _section_text(name: str, section: object) -> str:
    texts = [
        f"{key.name} {_value_text(value)}"
        for key in keys_of(type(section))
        if (value := getattr(section, key.name)) != key.default or key.name in _MAIN.get(name, ())
    ]
    inner = [each for each in fields_of(type(section)).values() if isinstance(each, SectionField) and not each.is_list]
    texts += [f"{each.name}.{text}" for each in inner if (text := _section_text("", getattr(section, each.name)))]
    return ", ".join(texts)


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value_text(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)

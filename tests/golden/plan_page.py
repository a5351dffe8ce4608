"""Generates docs/reference/plan.md, the page of all keys of a Plan, from their declarations.

    python tests/golden/plan_page.py

``test_plan_page`` compares the page in the repository with ``page()``.
"""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Final

from fanin.clients.planfile import ROOT
from fanin.protos.plans import CONSTRAINTS
from fanin.protos.plans.keys import Fields, KeyField, SectionField, fields_of, joined

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "plan.md"
HEAD: Final = """\
# The keys of a Plan

A Plan is a TOML file that describes how a Run proceeds. This is the shortest one:

```toml
app = "app.py:app"

[cohort]
concurrency = 2

[training]
learning_rate = 0.05
```

`fanin run PLAN.toml` starts the Run. `--set` overrides a key, and may be repeated:

```sh
fanin run PLAN.toml --set cohort.concurrency=8 --set aggregation.max_staleness=2
fanin run PLAN.toml --set training.optimizer.momentum=0.5
fanin run PLAN.toml --set 'stages=[{name="scaffold", options={num_devices=3}}]'
```

The value is a TOML value. Any other text is a string, so `--set codec.name=int8` needs no quotes. A string that reads
like another TOML value needs them: `--set 'name="8"'`. If an option sets a key twice, the last value counts.
A dotted key below a table, such as `training.optimizer`, sets one entry and keeps the others.
`fanin describe RUN` shows the Plan that the Run has.

An unknown key, a wrong type or a value out of range is an error, and no Run starts.

This page is generated from the declarations of the keys. After you change one, run `python tests/golden/plan_page.py`.
"""
NEVER_SCHEDULED: Final = frozenset({"schedule.flower.roles"})
"""Keys of a section that a schedule shares and cannot change (``check_schedule``)."""
TABLE_HEAD: Final = "| key | values | unit | default | meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """Return the text of docs/reference/plan.md."""
    parts = [HEAD, "\n## Top level\n\n", _table(ROOT, ""), *_sections(ROOT, "")]
    parts.append("\n## Conditions on several keys\n\n")
    parts += [f"- {' '.join((inspect.getdoc(check) or '').split())}\n" for check in CONSTRAINTS]
    return "".join(parts)


def _sections(fields: Fields, path: str) -> Iterator[str]:
    for field in fields.values():
        if isinstance(field, SectionField):
            name = joined(path, field.name)
            members = fields_of(field.section)
            yield f"\n## {f'[[{name}]]' if field.is_list else f'[{name}]'}\n\n{inspect.getdoc(field.section)}\n\n"
            yield _table(members, name)
            yield from _sections(members, name)


def _table(fields: Fields, path: str) -> str:
    keys = [field for field in fields.values() if isinstance(field, KeyField)]
    return TABLE_HEAD + "".join(_row(field) for field in keys if joined(path, field.name) not in NEVER_SCHEDULED)


def _row(field: KeyField) -> str:
    key = field.key
    link = f" [More]({key.see})." if key.see else ""
    return f"| `{field.name}` | {field.expected} | {key.unit} | {_default(field)} | {key.text}{link} |\n"


def _default(field: KeyField) -> str:
    if field.key.derived is not None:
        return field.key.derived.text
    if field.default is MISSING:
        return "required"
    if field.default is None:
        return "not set"
    return f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Generates docs/reference/errors.md, the page of all codes, and tests/golden/errors.txt, the texts of all errors.

    python tests/golden/errors.py

``test_errors`` compares both with the entries of ``fanin.protos.codes`` and with the source.
"""

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from house.tree import ROOT, Module, package_modules

from fanin.protos import codes

PAGE: Final = ROOT / "docs" / "reference" / "errors.md"
TEXTS: Final = Path(__file__).parent / "errors.txt"
HEAD: Final = """\
# Error codes

Each error has a code beside its text: `[FN-0201]` at the end of a command's error and of a line of a log, `error.code`
of a `FaninError` in Python, `fanin-code` in the trailing metadata of a gRPC status, and `error.code` in the JSON of a
command with `--json`. A code is stable from release to release; the text is not. So a script, a test or an alert
matches the code.

`fanin explain CODE` shows the entry of a code:

```sh
fanin explain FN-0023
```

An error in a part of another package, such as a rule or a stage, keeps its own text. Its code is the one that the
package names (`InvalidInput(text, code="FN-0002")`), else that of its class.

This page is generated from the entries in `protos/fanin/protos/codes/`. After you change an entry, or the text of an
error, run `python tests/golden/errors.py`.

| area | codes |
|---|---|
"""
BASE: Final = "FaninError"


def page() -> str:
    """Return the text of docs/reference/errors.md."""
    index, tables = [], []
    for path in sorted(Path(codes.__file__).parent.glob("*.toml"), key=lambda path: min(codes.area(path))):
        title, area = path.read_text().partition("\n")[0].removeprefix("# ").removesuffix("."), codes.area(path)
        index.append(f"| [{title}](#{_anchor(title)}) | {min(area)} to {max(area)} |\n")
        tables.append(f"\n## {title}\n\n| code | meaning | remedy | cause |\n|---|---|---|---|\n")
        for code, entry in area.items():
            cells = (f'<span id="{code.lower()}">{code}</span>', entry.meaning, entry.remedy, entry.cause)
            tables.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n")
    return "".join((HEAD, *index, *tables))


def _anchor(title: str) -> str:
    """Return the anchor of a heading on the site."""
    return "-".join("".join(char for char in title.lower() if char.isalnum() or char in " -").split())


def texts() -> str:
    """Return one line for each error in the source: its code, its class and its text, with the names of the values."""
    rows = {
        (code, kind, _text(call.args[0]))
        for module in package_modules()
        for call, kind in errors_in(module)
        if (code := literal_code(call)) and call.args
    }
    return "".join(f"{code} {kind}: {text}\n" for code, kind, text in sorted(rows))


def errors_in(module: Module) -> list[tuple[ast.Call, str]]:
    """Return each construction of one of our own errors in a module, with the name of the class."""
    kinds = error_classes()
    calls = [node for node in module.nodes() if isinstance(node, ast.Call)]
    named = [
        (call, ast.unparse(call.func).rpartition(".")[2])
        for call in calls
        if isinstance(call.func, ast.Name | ast.Attribute)
    ]
    return [(call, name) for call, name in named if name in kinds]


@cache
def error_classes() -> frozenset[str]:
    """Return the names of ``FaninError`` and of all its subclasses in the package."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for module in package_modules()
        for node in module.nodes()
        if isinstance(node, ast.ClassDef)
    }
    found = {BASE}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def code_of(call: ast.Call) -> ast.expr | None:
    """Return the argument ``code`` of a construction; None if it has none."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)


def literal_code(call: ast.Call) -> str:
    """Return the code that a construction names; "" if it passes on the code of another error."""
    value = code_of(call)
    return str(value.value) if isinstance(value, ast.Constant) else ""


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.FormattedValue(value=value):
            return f"{{{' '.join(ast.unparse(value).split())}}}"
        case _:
            return f"{{{ast.unparse(node)}}}"


if __name__ == "__main__":
    PAGE.write_text(page())
    TEXTS.write_text(texts())

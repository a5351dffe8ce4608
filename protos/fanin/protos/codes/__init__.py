"""What the code of each error means: the entries of ``fanin explain`` and of docs/reference/errors.md.

Each .toml file of this folder has the codes of one area, sorted. A code is never reused for another mistake, and an
entry stays when its last error goes. To add an error, give it the code of an entry that has the same meaning, cause and
remedy, or a new entry; then run ``python tests/golden/errors.py``.
"""

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.plans.keys import shown

NEAR: Final = 0.6
"""Least similarity of a code that an error about an unknown code names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a code means.

    Attributes:
        meaning: The failure.
        cause: What leads to it in practice.
        remedy: What to do.
    """

    meaning: str
    cause: str
    remedy: str


def area(table: Traversable) -> dict[str, Entry]:
    """Return the entries of one file of this folder."""
    return {code: Entry(**row) for code, row in tomllib.loads(table.read_text("utf-8")).items()}


@cache
def entries() -> dict[str, Entry]:
    """Return the entries of all codes, in the order of the codes."""
    tables = [path for path in files(__name__).iterdir() if path.name.endswith(".toml")]
    return dict(sorted(item for table in tables for item in area(table).items()))


def explained(code: str) -> Entry:
    """Return the entry of a code, such as ``FN-0201``, ``fn-0201`` or ``201``. Raises InvalidInput if there is none."""
    known = entries()
    digits = code.upper().removeprefix("FN").removeprefix("-")
    name = f"FN-{digits:0>4}" if digits.isdecimal() else code
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=NEAR)
        hint = f"; did you mean {near[0]}?" if near else "; docs/reference/errors.md lists the codes"
        raise InvalidInput(
            f"explain: got the code {shown(code)}, expected FN- and four digits of a known code{hint}",
            code="FN-0027",
        )
    return known[name]

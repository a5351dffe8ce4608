"""What a shell completes, read from the help of each command."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a command.

    Attributes:
        text: Its explanation.
        has_value: Whether a value follows.
        values: All values, if they are known.
    """

    text: str
    has_value: bool = False
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A subcommand, or a verb of one.

    Attributes:
        summary: What it does.
        options: Its options.
        names: What its arguments name: ``runs``, ``devices``, or "" for files.
    """

    summary: str
    options: Mapping[str, Option]
    names: str = ""


Table = Mapping[str, Completed]
"""By the words of a command line: ``serve``, ``token``, ``token create``."""

KINDS: Final = ("runs", "devices")
"""Names that ``fanin completion`` prints when the user presses Tab."""
HELP: Final = Option(text="show the options")
_VERB: Final = re.compile(r"  ([a-z]+)  +(\S.*)")
_VALUES: Final = re.compile(r"[\[{]([a-z0-9_.-]+(?:[|,][a-z0-9_.-]+)+)[\]}]$")
_NAMES: Final = (("runs", re.compile(r"\] (?:.* )?\[?RUN(?:_ID)?\b")), ("devices", re.compile(r"\] \[?DEVICE\b")))


def subcommands(table: Table) -> tuple[str, ...]:
    """Return the subcommands."""
    return tuple(path for path in table if " " not in path)


def verbs_of(table: Table, name: str) -> Mapping[str, str]:
    """Return the verbs of a subcommand, each with its key in the table."""
    return {path.partition(" ")[2]: path for path in table if path.startswith(f"{name} ")}


def table_of(summaries: Mapping[str, str], help_of: Callable[[Sequence[str]], str]) -> Table:
    """Return what to complete.

    Args:
        summaries: What each subcommand does.
        help_of: Returns the help of a command; "" if it needs a missing extra.
    """
    table: dict[str, Completed] = {}
    for name, summary in summaries.items():
        text = help_of([name])
        table[name] = completed(summary, text)
        for verb, verb_summary in verbs_in(text).items():
            table[f"{name} {verb}"] = completed(verb_summary, help_of([name, verb]))
    return table


def completed(summary: str, text: str) -> Completed:
    """Return what the help of a command says."""
    usage = text.partition("\n")[0]
    names = next((kind for kind, pattern in _NAMES if pattern.search(usage)), "")
    return Completed(summary=summary, options=options_of(text.splitlines()), names=names)


def verbs_in(text: str) -> dict[str, str]:
    """Return the verbs in the help of a subcommand, each with the first line of its explanation."""
    lines = text.splitlines()
    if any(line.lower().startswith("options:") for line in lines):
        return {}
    return {match[1]: match[2] for line in lines if (match := _VERB.fullmatch(line))}


def options_of(help_lines: Sequence[str]) -> dict[str, Option]:
    """Return the options in the help of a command, each with the first line of its explanation."""
    options: dict[str, Option] = {}
    newest: list[str] = []
    for line in help_lines:
        if line.startswith("  -"):
            head, _, text = line.strip().partition("  ")
            values = _VALUES.search(head)
            words = head.split() if values else re.split(r"[,/\s]+", head)
            newest = [name for name in words if name.startswith("--")]
            option = Option(
                text=text.strip(),
                has_value=any(not word.startswith("-") for word in words),
                values=tuple(re.split("[|,]", values[1])) if values else (),
            )
            options |= dict.fromkeys(newest, option)
        elif newest and line.startswith(" " * 8):
            options |= {name: replace(options[name], text=line.strip()) for name in newest if not options[name].text}
    return options | {"--help": HELP}

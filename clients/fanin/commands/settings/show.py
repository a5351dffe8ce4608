"""``fanin config``: the effective configuration of ``fanin serve`` with its origins, and its schema for editors."""

import json as json_text
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Final

import click

from fanin.commands.console.terminal import check_json_target, json_words, prints_text, typer_command, write_json
from fanin.commands.console.usage import WrongUsage
from fanin.commands.settings.keys import CONFIG, keys_of_command, plain
from fanin.commands.settings.layers import COMMAND_LINE, DEFAULT, Value, configured
from fanin.commands.settings.schema import schema_of

USAGE: Final = """usage: fanin config show [OPTIONS OF SERVE] [--json [FILE]]
       fanin config schema

  show    print the effective values of fanin serve, each with its origin;
          the text is a valid fanin.toml
  schema  print the JSON schema of fanin.toml, for editors

The file is that of --config or of the variable FANIN_SERVE_CONFIG.
"""
ACTIONS: Final = ("show", "schema")


def show_config(function: Callable[..., int | None], argv: Sequence[str]) -> int:
    """Run ``fanin config`` for the command of a function, whose options are the keys."""
    command = typer_command(function)
    if not argv or not {"-h", "--help"}.isdisjoint(argv):
        sys.stdout.write(USAGE)
    elif argv[0] == "show":
        try:
            _show(command, argv[1:])
        except click.ClickException as exc:
            raise WrongUsage(exc.format_message()) from exc
    elif argv[0] == "schema":
        if argv[1:]:
            raise WrongUsage(f"schema: got {argv[1]!r}, expected no arguments")
        sys.stdout.write(json_text.dumps(schema_of(keys_of_command(command, "serve").values()), indent=2) + "\n")
    else:
        near = get_close_matches(argv[0], ACTIONS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WrongUsage(f"got {argv[0]!r}, expected one of {', '.join(ACTIONS)}{hint}")
    return 0


def _show(command: click.Command, argv: Sequence[str]) -> None:
    command.params.append(click.Option(["--json"], metavar="FILE", default="", help="JSON instead of the text."))
    words = json_words(argv)
    configuration = configured(command, words)
    context = command.make_context("show", list(words), default_map=configuration.defaults)
    target = check_json_target(context.params["json"])
    values = []
    for key in configuration.keys.values():
        name = str(key.option.name)
        if name == "json":
            continue
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        stored = configuration.values.get(key.path)
        origin = COMMAND_LINE if is_given else DEFAULT if stored is None else stored.origin
        values.append(Value(key=key, value=plain(context.params[name]), origin=origin))
    if target:
        rows = {
            each.key.path: {"value": each.value, "origin": each.origin, "variable": each.key.variable}
            for each in values
        }
        write_json(target, {CONFIG: plain(context.params[CONFIG]), "values": rows})
    if prints_text(target):
        sys.stdout.write(_text(values))


def _text(values: Sequence[Value]) -> str:
    """Return the values as a file that has the same effect, also after the comments of its keys are removed.

    A default is a comment: the next release may change it. TOML has no value for an option without one, so its line
    remains a comment.
    """
    lines: list[str] = []
    for table in dict.fromkeys(each.key.table for each in values):
        rows = [(_line(each), each.origin) for each in values if each.key.table == table]
        width = max(len(line) for line, _ in rows)
        lines += [*([""] if lines else []), f"[{table}]", *(f"{line:{width}}  # {origin}" for line, origin in rows)]
    return "\n".join(lines) + "\n"


def _line(value: Value) -> str:
    if value.value is None:
        return f"# # {value.key.name} is not set"
    line = f"{value.key.name} = {_toml(value)}"
    return f"# {line}" if value.origin == DEFAULT else line


def _toml(value: Value) -> str:
    """Return a value as TOML. Strings of JSON are strings of TOML."""
    found = value.value
    if value.key.is_named_paths:
        pairs = [str(each).split("=", 1) for each in found or ()] if isinstance(found, list) else []
        return f"{{ {', '.join(f'{_quoted(name)} = {_quoted(path)}' for name, path in pairs)} }}" if pairs else "{}"
    if value.key.option.multiple and isinstance(found, list | None):
        return f"[{', '.join(_quoted(each) for each in found or ())}]"
    return _quoted(found)


def _quoted(value: object) -> str:
    return json_text.dumps(value, ensure_ascii=False)

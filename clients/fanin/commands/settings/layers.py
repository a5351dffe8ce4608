"""The layers of a configuration: the defaults, the file, the environment, the command line. The later ones win.

Values of the file are checked here, with its name in each error. Secrets are refused before: a configuration is
committed, copied and shown, so its errors and ``fanin config show`` must have none to print.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import click

from fanin.clients.textfiles import reason_of
from fanin.commands.settings.keys import CONFIG, PREFIX, ConfigKey, keys_of_command
from fanin.protos.errors import InvalidInput

DEFAULT: Final = "default"
COMMAND_LINE: Final = "command line"
MAX_BYTES: Final = 1 << 20
SECRET_NAME: Final = re.compile(r"(^|_)(token|password|passphrase|secret|credentials?|(private|api|signing)_key)s?$")
"""Names of keys that would hold a secret. A key that names a file ends in ``_file``, and is none of them."""
SECRET_VALUE: Final = re.compile(r"PRIVATE KEY-----|://[^/\s@]*:[^/\s@]+@")
"""A private key, or an address with a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The effective value of a key.

    Attributes:
        key: The key.
        value: The value as TOML has it; None for an option without a default.
        origin: Where it comes from.
    """

    key: ConfigKey
    value: object
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The values of the file and of the environment.

    Attributes:
        keys: All keys by dotted name.
        values: The values that are set, by dotted name, each with its origin.
    """

    keys: Mapping[str, ConfigKey]
    values: Mapping[str, Value]

    @property
    def defaults(self) -> dict[str, object]:
        """The values by the names that click gives the options."""
        return {str(each.key.option.name): each.value for each in self.values.values()}


def configured(command: click.Command, words: Sequence[str], table: str = "serve") -> Configuration:
    """Return the configuration of a command.

    Args:
        command: The command; its option ``--config`` names the file.
        words: The command line. Its options have precedence, so their opposites in the file do not count.
        table: The table of options without a help panel.

    Raises:
        InvalidInput: The file or a variable has an unknown key, a wrong value or a secret.
        click.UsageError: The command line is wrong.
    """
    context = click.Context(command, info_name=command.name)
    given, _, _ = command.make_parser(context).parse_args(list(words))
    keys = keys_of_command(command, table)
    name = given.get(CONFIG) or os.environ.get(variable_of(table, CONFIG))
    layers = [_of_file(Path(name), keys) if name else {}, _of_environment(os.environ, keys, table)]
    values: dict[str, Value] = {}
    for layer in layers:
        _overlay(values, layer)
    for key in keys.values():
        if key.option.name in given:
            values.pop(key.path, None)
            values.pop(f"{key.table}.{key.opposite}", None)
    return Configuration(keys=keys, values=values)


def variable_of(table: str, name: str) -> str:
    """Return the variable of a key."""
    return f"{PREFIX}_{table}_{name}".upper()


def _overlay(values: dict[str, Value], layer: Mapping[str, Value]) -> None:
    """Add a layer with a higher precedence. Raises InvalidInput if it contradicts itself."""
    for path, value in layer.items():
        opposite = f"{value.key.table}.{value.key.opposite}"
        other = layer.get(opposite)
        if other is not None and value.value is not False and other.value is not False:
            raise InvalidInput(
                f"{value.origin}: got {path} and {opposite}, which exclude each other; remove one of them",
                code="FN-1463",
            )
    # The opposites of a layer that are False come first, so that a later key does not remove them.
    for path, value in sorted(layer.items(), key=lambda item: item[1].value is False):
        if value.value is not False:
            values.pop(f"{value.key.table}.{value.key.opposite}", None)
        values[path] = value


def _of_file(path: Path, keys: Mapping[str, ConfigKey]) -> dict[str, Value]:
    document = _document(path)
    where, values = str(path), {}
    for table, row in document.items():
        _refuse_secrets(where, table, row)
        in_table = [key.name for key in keys.values() if key.table == table]
        if not in_table:
            raise _unknown(where, table, row, keys)
        if not isinstance(row, dict):
            raise InvalidInput(
                f"{where}: {table}: got a value, expected a table; write [{table}] and its keys below", code="FN-1462"
            )
        for name, value in row.items():
            if name not in in_table:
                elsewhere = [key.path for key in keys.values() if key.name == name]
                near = get_close_matches(name, in_table, n=1)
                hint = (
                    f"; did you mean {(elsewhere or [f'{table}.{each}' for each in near])[0]}?"
                    if near or elsewhere
                    else ""
                )
                raise InvalidInput(
                    f"{where}: got the key {table}.{name}, expected one of {', '.join(in_table)}{hint}", code="FN-1461"
                )
            key = keys[f"{table}.{name}"]
            folder = path.absolute().parent
            values[key.path] = Value(key=key, value=key.of_file(value, where, folder), origin=where)
    return values


def _document(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise InvalidInput(
            f"--config: {path} cannot be read ({reason_of(exc)}); pass another file", code="FN-1460"
        ) from exc
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{path}: got more than {MAX_BYTES} bytes, expected a fanin.toml", code="FN-1460")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise InvalidInput(
            f"{path}: got byte {exc.start} that is no UTF-8, expected TOML in UTF-8; save it as UTF-8", code="FN-1460"
        ) from exc
    except tomllib.TOMLDecodeError as exc:
        text = str(exc)
        repeated = "declare" in text or "overwrite" in text
        hint = "write each table and each key once" if repeated else "expected TOML; strings need quotes"
        raise InvalidInput(f"{path}: {text}; {hint}", code="FN-1460") from exc


def _unknown(where: str, table: str, row: object, keys: Mapping[str, ConfigKey]) -> InvalidInput:
    """Return the error for an entry at the top level that is no table of the file."""
    tables = list(dict.fromkeys(key.table for key in keys.values()))
    listed = ", ".join(f"[{each}]" for each in tables)
    if isinstance(row, dict):
        near = get_close_matches(table, tables, n=1)
        what = f"the table [{table}]"
        hint = f"; did you mean [{near[0]}]?" if near else ""
    else:
        owners = {key.name: key for key in keys.values()}
        near = get_close_matches(table, owners, n=1)
        what = f"the key {table} outside of a table"
        hint = f"; did you mean {owners[near[0]].path}, below a line [{owners[near[0]].table}]?" if near else ""
    return InvalidInput(f"{where}: got {what}, expected keys below {listed}{hint}", code="FN-1461")


def _refuse_secrets(where: str, path: str, value: object) -> None:
    """Raise InvalidInput for a key that would hold a secret. The error does not have the value."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_secrets(where, f"{path}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            _refuse_secrets(where, path, item)
    elif SECRET_NAME.search(path.rpartition(".")[2]) or (isinstance(value, str) and SECRET_VALUE.search(value)):
        raise InvalidInput(
            f"{where}: {path}: got a secret, expected none in this file, because it is copied, committed and shown; "
            "keep the secret in a file of its own that only this user can read, or in the environment",
            code="FN-1464",
        )


def _of_environment(environment: Mapping[str, str], keys: Mapping[str, ConfigKey], table: str) -> dict[str, Value]:
    by_variable = {key.variable: key for key in keys.values()}
    known = [*by_variable, variable_of(table, CONFIG)]
    values = {}
    for name in sorted(_of_tables(environment, keys)):
        if name in by_variable:
            key = by_variable[name]
            values[key.path] = Value(key=key, value=key.of_variable(environment[name]), origin=f"variable {name}")
        elif name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(known)}"
            raise InvalidInput(f"environment: got the unknown variable {name}{hint}", code="FN-1461")
    return values


def _of_tables(environment: Iterable[str], keys: Mapping[str, ConfigKey]) -> list[str]:
    """Return the variables that begin as those of a table."""
    prefixes = tuple({f"{PREFIX}_{key.table.upper()}_" for key in keys.values()})
    return [name for name in environment if name.startswith(prefixes)]

"""The keys of ``fanin.toml``: one for each option of a command, derived from its signature.

``--keep-days`` of ``fanin serve`` is the key ``keep_days`` of the table ``[serve]``, and the variable
``FANIN_SERVE_KEEP_DAYS``. An option with a help panel (``rich_help_panel``) is in the table of that name.
An option with the metavar ``NAME=PATH`` is a table of paths by name.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import click

from fanin.protos.errors import InvalidInput

CONFIG: Final = "config"
"""The option that names the file: no key of it."""
PREFIX: Final = "FANIN"
NAMED_PATHS: Final = "NAME=PATH"
"""The metavar of an option whose values are paths by name."""
OPPOSITE: Final = "no_"
"""``no_web`` is the opposite of ``web``."""
KINDS: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A key of the file.

    Attributes:
        table: Its table.
        name: Its name in the table.
        option: The option of the command.
    """

    table: str
    name: str
    option: click.Option

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.table}.{self.name}"

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return f"{PREFIX}_{self.path.replace('.', '_').upper()}"

    @property
    def opposite(self) -> str:
        """The name of the key that contradicts this one, if there is one."""
        return self.name.removeprefix(OPPOSITE) if self.name.startswith(OPPOSITE) else OPPOSITE + self.name

    @property
    def is_named_paths(self) -> bool:
        """Whether the value is a table of paths by name."""
        return self.option.multiple and self.option.metavar == NAMED_PATHS

    @property
    def is_path(self) -> bool:
        """Whether the value is a path, or a list of them."""
        return isinstance(self.option.type, click.Path)

    @property
    def kind(self) -> type:
        """The type of the value in TOML; of a list, that of its items."""
        if self.option.is_flag or isinstance(self.option.type, click.types.BoolParamType):
            return bool
        if isinstance(self.option.type, click.types.IntParamType):
            return int
        return float if isinstance(self.option.type, click.types.FloatParamType) else str

    def plain_default(self) -> object:
        """Return the default as a value of TOML; None if there is none."""
        default = self.option.default
        return plain(default()) if callable(default) else plain(default)

    def of_file(self, value: object, source: str, folder: Path) -> object:
        """Return a value of the file as click reads it; its paths are relative to ``folder``. Raises InvalidInput."""
        where = f"{source}: {self.path}"
        if self.is_named_paths:
            if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
                raise _mistyped(where, value, "a table of paths by name, as in { test = 'test.npz' }")
            return [f"{name}={folder / path}" for name, path in value.items()]
        if self.option.multiple:
            if not isinstance(value, list):
                raise _mistyped(where, value, f"a list, each item {KINDS[self.kind]}")
            return [self._item(each, where, folder) for each in value]
        return self._item(value, where, folder)

    def of_variable(self, text: str) -> object:
        """Return the text of the variable as click reads it. Raises InvalidInput."""
        where = f"variable {self.variable}"
        if not self.option.multiple:
            return self._converted(text, where)
        try:
            words = shlex.split(text)
        except ValueError as exc:
            raise InvalidInput(
                f"{where}: got {text!r} ({exc}), expected words with spaces between them; quote a word with spaces",
                code="FN-1462",
            ) from exc
        return [self._converted(word, where) for word in words]

    def _item(self, value: object, where: str, folder: Path) -> object:
        is_number = self.kind is float and type(value) is int
        if type(value) is not self.kind and not is_number:
            raise _mistyped(where, value, KINDS[self.kind])
        if self.is_path and isinstance(value, str):
            return str(folder / Path(value).expanduser())
        self._converted(value, where)
        return value

    def _converted(self, value: object, where: str) -> object:
        """Return the value of the option. The text of click's error names the choices or the range."""
        try:
            converted = self.option.type.convert(value, self.option, None)
        except click.BadParameter as exc:
            raise InvalidInput(f"{where}: {exc.message.rstrip('.')}; correct the value", code="FN-1462") from exc
        if isinstance(converted, float) and not math.isfinite(converted):
            raise InvalidInput(f"{where}: got {converted}, expected a finite number", code="FN-1462")
        return plain(converted)


def keys_of_command(command: click.Command, table: str) -> dict[str, ConfigKey]:
    """Return the keys of a command's options, by dotted name, in the order of the options."""
    keys = {}
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and option.name != CONFIG:
            flag = next(each for each in option.opts if each.startswith("--"))
            panel = getattr(option, "rich_help_panel", None)
            key = ConfigKey(
                table=panel.lower().replace(" ", "_") if panel else table,
                name=flag.removeprefix("--").replace("-", "_"),
                option=option,
            )
            keys[key.path] = key
    return keys


def plain(value: object) -> object:
    """Return a value of Python as one of TOML."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _mistyped(where: str, value: object, expected: str) -> InvalidInput:
    kind = KINDS.get(type(value), f"a {type(value).__name__}")
    return InvalidInput(f"{where}: got {kind}, expected {expected}; correct the value", code="FN-1462")

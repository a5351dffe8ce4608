"""Small files that somebody names on a command line: text, and tokens."""

import os
from pathlib import Path

from fanin.protos.errors import InvalidInput


def read_token(path: Path | None, variable: str) -> str:
    """A token from a file, or else from the environment. Raises InvalidInput if there is none."""
    text = read_text(path, "token") if path is not None else os.environ.get(variable, "")
    token = text.strip()
    if not token:
        raise InvalidInput(f"token: got none, expected a file that holds it (--token-file) or the variable {variable}")
    # It travels as metadata, where gRPC takes nothing else.
    if not token.isascii() or not token.isprintable():
        raise InvalidInput(f"token: got {len(token)} characters that are no token, expected one line of printable ones")
    return token


def read_text(path: Path, what: str) -> str:
    """The text of a small file that somebody named. Raises InvalidInput if it cannot be read or is no text."""
    try:
        return path.read_text()
    except OSError as exc:
        raise InvalidInput(f"{what}: {path} cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{what}: {path} is no text ({exc.reason} at byte {exc.start})") from exc

"""Small files that a user names on a command line: text, tokens and public keys."""

import os
from pathlib import Path
from typing import Final

from fanin.clients.arguments import clean_token
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_key

TOKEN_FILE: Final = "--token-file"
PRIVATE_SUFFIX: Final = ".key"
"""Suffix of the private keys that fanin writes. Their public keys have ``.pub``."""


def read_token(path: Path | None, variable: str) -> str:
    """Read a token from a file, or from the environment variable if ``path`` is None. Raises InvalidInput."""
    if path is not None:
        return clean_token(f"{TOKEN_FILE}: {path}", read_text(path, TOKEN_FILE))
    text = os.environ.get(variable, "")
    if not text.strip():
        raise InvalidInput(
            f"{TOKEN_FILE}: got none, expected a file that holds the token, or the variable {variable}", code="FN-0804"
        )
    return clean_token(variable, text)


def read_public_key(path: Path) -> str:
    """Read a publisher's public key, hexadecimal. Raises InvalidInput.

    A private key has the same form. It must never be taken for a public one: error messages show public keys.
    """
    if path.suffix == PRIVATE_SUFFIX:
        raise InvalidInput(
            f"--publisher: {path} has the name of a private key, expected a public one; pass "
            f"{path.with_suffix('.pub')}",
            code="FN-0805",
        )
    key = read_text(path, "--publisher").strip()
    check_key(f"--publisher: {path}", key)
    return key


def read_text(path: Path, what: str) -> str:
    """Read a small text file. Raises InvalidInput if it cannot be read or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidInput(f"{what}: {path} cannot be read ({reason_of(exc)})", code="FN-0806") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{what}: {path} is no text ({exc.reason} at byte {exc.start})", code="FN-0806") from exc


def reason_of(exc: Exception) -> str:
    """Return why a file cannot be read, without the number of the error and the path, which the message has."""
    return (isinstance(exc, OSError) and exc.strerror) or str(exc)

"""Token files: the first tokens of a coordinator, for the user who started it.

A file has one token on one line. The store keeps only its digest, so a lost or damaged file cannot be rebuilt. A file
of another database admits no caller. Both are errors at the start of a coordinator. Otherwise an operator would notice
only when a device or a command is rejected.
"""

from pathlib import Path

from fanin.protos.errors import Corrupted
from fanin.protos.messages import Role
from fanin.server.access.registry import Registry
from fanin.server.storage.disk import write_file


def ensure_token(path: Path, role: Role, registry: Registry) -> None:
    """Issue a token into a file, or check the existing one.

    Raises:
        Corrupted: The file holds no token, or one that this coordinator did not issue for the role.
        StorageFull: The file cannot be written.
    """
    if not path.exists():
        path.parent.mkdir(exist_ok=True, mode=0o700)
        # The token is issued first. A crash in between leaves an unknown token, and not a file with an invalid one.
        write_file(path, f"{registry.new_token(role)}\n".encode())
        return
    advice = (
        "restore it from a backup, or remove this file: a new token is issued at the next start, and enrolled devices "
        "need none"
    )
    token = path.read_bytes().strip()
    if not token or not token.isascii() or not token.decode("ascii").isprintable():
        raise Corrupted(
            f"{path}: got {len(token)} bytes that are no token, expected one line of text; {advice}", code="FN-0685"
        )
    if not registry.has_token(token.decode("ascii"), role):
        raise Corrupted(
            f"{path}: got a token that fanin.db does not have for {role.value}s; restore the fanin.db that this folder "
            f"was served with, or the token file: {advice}",
            code="FN-0685",
        )

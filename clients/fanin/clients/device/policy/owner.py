"""The policy of a device's owner, ``policy.toml`` in the device's folder::

    [privacy_floor]
    protocol = "secagg"
    min_survivors = 20

The file is read for each Assignment, so a change holds without a restart. Its owner writes it, by an editor or by
``fanin policy set``; the device never does. A device without the file has no floor of its own. A device that cannot
read its file takes part in nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fanin.edge.files import replace_file, storage_error
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.floors.rows import floor_row, parse_floor
from fanin.protos.errors import InvalidInput

POLICY_FILE: Final = "policy.toml"
SECTION: Final = "privacy_floor"
MAX_BYTES: Final = 64 << 10
UNREADABLE: Final = "FN-1704"


def read_policy(folder: Path) -> PrivacyFloor:
    """Return the owner's floor; ``NO_FLOOR`` without a file. Raises InvalidInput (see ``read_floor``).

    The errors name the file without its folder, because a device reports them to the coordinator.
    """
    path = folder / POLICY_FILE
    return read_floor(path, POLICY_FILE) if os.path.lexists(path) else NO_FLOOR


def read_floor(path: Path, where: str) -> PrivacyFloor:
    """Return the floor in a file.

    Args:
        path: The file.
        where: Its name in errors.

    Raises:
        InvalidInput: The file cannot be read, or is no policy. The message has a text for each wrong key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise InvalidInput(f"{where}: cannot be read ({exc.strerror})", code=UNREADABLE) from exc
    # Imported here: a device without a policy would pay for the memory.
    import tomllib

    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{where}: got more than {MAX_BYTES} bytes, expected a policy", code=UNREADABLE)
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{where}: not TOML ({exc})", code=UNREADABLE) from exc
    if unknown := sorted(document.keys() - {SECTION}):
        raise InvalidInput(
            f"{where}: got the keys {', '.join(unknown)}, expected only the section [{SECTION}]", code="FN-1701"
        )
    return parse_floor(document.get(SECTION, {}), f"{where}: {SECTION}")


def write_policy(folder: Path, floor: PrivacyFloor) -> None:
    """Replace the owner's floor durably. Raises StorageFull and StorageUnavailable."""
    path = folder / POLICY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, policy_text(floor_row(floor)).encode(), mode=0o600)
    except OSError as exc:
        raise storage_error(str(path), exc) from exc


def policy_text(row: Mapping[str, object]) -> str:
    """Return a policy as TOML. Texts are names and hexadecimal keys, which need no escapes."""
    lines = [f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in row.items()]
    return "\n".join([f"[{SECTION}]", *lines, ""])

"""``fanin completion runs`` and ``devices``: names for the shell, from a coordinator that serves on this machine."""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from fanin.commands.console.terminal import DEFAULT_STATE, connect, credentials
from fanin.edge.files import is_held
from fanin.protos.errors import FaninError

MAX_NAMES: Final = 1000
"""No user reads more of them, and a coordinator may have a million devices."""


def print_names(kind: str, argv: Sequence[str]) -> None:
    """Print the names, one a line; nothing without a coordinator, because a shell has no place for an error.

    Args:
        kind: ``runs`` or ``devices``.
        argv: ``--state DIR``, or nothing.
    """
    state = Path(argv[1]) if argv[:1] == ["--state"] and argv[1:] else DEFAULT_STATE
    if not is_held(state):
        return
    try:
        names = _runs(state) if kind == "runs" else _devices(state)
    except FaninError:
        return
    sys.stdout.writelines(f"{name}\n" for name in names)


def _runs(state: Path) -> Sequence[str]:
    with connect(state) as operator:
        return [info.run_id for info in operator.runs(last=MAX_NAMES)]


def _devices(state: Path) -> Sequence[str]:
    from fanin.clients.administrator import Administrator

    known = credentials(state)
    with Administrator.connect(known.address, known.ca_certificate, known.token) as client:
        return [info.device_id for info in islice(client.devices(), MAX_NAMES)]

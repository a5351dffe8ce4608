"""All enrolled devices in memory, at 40 bytes each, so that authentication needs no database.

Any peer can send any device id. With a query for each, a flood of invented ids would block the one lane on which Rounds
are recorded. One thread may add devices while another one looks them up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fanin.server.storage.records import EnrolledDevice

KEY_BYTES: Final = 32
_PREFIX_CHARS: Final = 16
MAX_RECENT: Final = 1 << 16
"""Devices in a dict, at some 300 bytes each, before they are sorted into the arrays."""

_DAMAGE: Final = (ValueError, TypeError)
"""Errors of a row that is not hexadecimal, or not text: SQLite stores a value of any type in any column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sorted:
    """The first 8 bytes of ids in ascending order (num_devices,), and the keys (num_devices, 32)."""

    prefixes: NDArray[np.uint64]
    keys: NDArray[np.uint8]


class Population:
    """The enrolled devices.

    Args:
        batches: Batches of (device id, public key) from the database.
        max_recent: Devices in a dict before they are sorted into the arrays.

    Attributes:
        damaged: The device ids of the rows that are damaged, as the database has them. These devices are left out.
    """

    def __init__(self, batches: Iterable[Sequence[tuple[str, str]]] = (), max_recent: int = MAX_RECENT) -> None:
        self._max_recent = max_recent
        self.damaged: list[object] = []
        self._sorted = _merged(*(self._loaded(batch) for batch in batches), _sorted(()))
        self._recent: dict[str, EnrolledDevice] = {}

    def __len__(self) -> int:
        return len(self._sorted.prefixes) + len(self._recent)

    def _loaded(self, batch: Sequence[tuple[str, str]]) -> _Sorted:
        try:
            return _sorted(batch)
        except _DAMAGE:
            self.damaged += [row[0] for row in batch if not _is_intact(row)]
            return _sorted([row for row in batch if _is_intact(row)])

    def add(self, device: EnrolledDevice) -> None:
        """Add a device that is not in the population yet."""
        self._recent[device.device_id] = device
        if len(self._recent) >= self._max_recent:
            rows = [(one.device_id, one.public_key) for one in self._recent.values()]
            # In this order, so that a concurrent lookup finds each device in at least one of them.
            self._sorted = _merged(self._sorted, _sorted(rows))
            self._recent = {}

    def remove(self, device_id: str) -> None:
        """Remove a device, if it is in the population."""
        self._recent.pop(device_id, None)
        devices = self._sorted
        place = _place(devices, device_id)
        if place is not None:
            self._sorted = _Sorted(
                prefixes=np.delete(devices.prefixes, place), keys=np.delete(devices.keys, place, axis=0)
            )

    def find(self, device_id: str) -> EnrolledDevice | None:
        """Return the device of an id, or None if it is not enrolled. The id may be any text."""
        recent = self._recent.get(device_id)
        if recent is not None:
            return recent
        # A copy of the reference: another thread may replace the arrays.
        devices = self._sorted
        place = _place(devices, device_id)
        return None if place is None else _device(devices, place)


def _device(devices: _Sorted, place: int) -> EnrolledDevice:
    return EnrolledDevice(public_key=devices.keys[place].tobytes().hex())


def _place(devices: _Sorted, device_id: str) -> int | None:
    """Return the index of a device, or None if it is not there. The id may be any text."""
    try:
        prefix = np.uint64(int.from_bytes(bytes.fromhex(device_id[:_PREFIX_CHARS])))
    except ValueError:
        return None
    place = int(np.searchsorted(devices.prefixes, prefix))
    # An attacker can search for keys whose ids have the same prefix, so the full id decides.
    while place < len(devices.prefixes) and devices.prefixes[place] == prefix:
        if _device(devices, place).device_id == device_id:
            return place
        place += 1
    return None


def _is_intact(row: tuple[str, str]) -> bool:
    try:
        _sorted([row])
    except _DAMAGE:
        return False
    return True


def _sorted(rows: Sequence[tuple[str, str]]) -> _Sorted:
    prefixes = bytes.fromhex("".join(device_id[:_PREFIX_CHARS] for device_id, _ in rows))
    keys = bytes.fromhex("".join(public_key for _, public_key in rows))
    if len(prefixes) != len(rows) * _PREFIX_CHARS // 2 or len(keys) != len(rows) * KEY_BYTES:
        raise ValueError(
            f"devices: got ids of {2 * len(prefixes)} and keys of {len(keys)} bytes in {len(rows)} rows, "
            f"expected ids of at least {_PREFIX_CHARS} characters and keys of {KEY_BYTES} bytes"
        )
    return _Sorted(
        prefixes=np.frombuffer(prefixes, ">u8").astype(np.uint64),
        keys=np.frombuffer(keys, np.uint8).reshape(len(rows), KEY_BYTES),
    )


def _merged(*parts: _Sorted) -> _Sorted:
    prefixes = np.concatenate([part.prefixes for part in parts])
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(prefixes, kind="stable")
    return _Sorted(prefixes=prefixes[order], keys=keys[order])

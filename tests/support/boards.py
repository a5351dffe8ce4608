"""Scalars of TensorBoard event files, read back.

A file is a series of records, little-endian::

    8  size of the event
    4  checksum of the size
    n  the event, a message of TensorBoard
    4  checksum of the event
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Scalar(NamedTuple):
    """One number, with the time of its event in seconds."""

    tag: str
    step: int
    value: float
    time_s: float


def scalars_in(folder: Path) -> list[Scalar]:
    """Return the scalars of all event files in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    scalars = []
    for path in sorted(folder.iterdir()):
        for data in _records(path.read_bytes()):
            event = Event.FromString(data)
            for value in event.summary.value:
                scalars.append(Scalar(value.tag, event.step, value.simple_value, event.wall_time))
    return scalars


def values_in(folder: Path) -> dict[tuple[str, int], float]:
    """Return the value of each tag and step. Each occurs once."""
    scalars = scalars_in(folder)
    values = {(scalar.tag, scalar.step): scalar.value for scalar in scalars}
    assert len(values) == len(scalars), "a tag and step occur twice"
    return values


def _records(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        yield data[start + 12 : start + 12 + size]
        start += 16 + size
    assert start == len(data), "the last record is complete"

"""Messages on the pipes between a test and a runtime in another process: a JSON header and arrays.

::

    u32 size of the header, u32 size of the arrays, little endian; the header (JSON); the arrays (.npz)
"""

import io
import json
import struct
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Row = dict[str, object]
Arrays = dict[str, npt.NDArray[np.generic]]
INPUT = "input."
"""Prefix of the inputs of a batch, whose names may equal those of other arrays."""


def write_frame(pipe: BinaryIO, row: Row, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write one message."""
    header, data = json.dumps(row).encode(), io.BytesIO()
    np.savez(data, **arrays)
    pipe.write(struct.pack("<II", len(header), len(data.getvalue())) + header + data.getvalue())
    pipe.flush()


def read_frame(pipe: BinaryIO) -> tuple[Row, Arrays] | None:
    """Return the next message, or None at the end of the pipe."""
    sizes = pipe.read(8)
    if len(sizes) < 8:
        return None
    header, size = struct.unpack("<II", sizes)
    row = json.loads(pipe.read(header))
    with np.load(io.BytesIO(pipe.read(size))) as archive:
        return row, dict(archive)

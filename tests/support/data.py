"""Public data sets for tests: the real ones, and small ones of the same format.

A test of real data is skipped if the data are not available.
"""

import gzip
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fanin.clients.data.files import DATA_VARIABLE, Places, places_from
from fanin.clients.data.public import FASHION_MNIST

BESIDE_THE_REPOSITORY = Path(__file__).parents[3] / "shared" / "data"


def unreachable(url: str, max_bytes: int) -> bytes:
    """Raise OSError: no test downloads data."""
    raise OSError(f"{url}: no network for {max_bytes} bytes")


def real_places(name: str) -> Places:
    """Return the places of this data set: FANIN_DATA, or a folder next to the repository. Skip if it is in neither."""
    places = replace(places_from(os.environ), fetch=unreachable)
    if places.data is None and (BESIDE_THE_REPOSITORY / name).is_dir():
        places = replace(places, data=BESIDE_THE_REPOSITORY)
    if places.data is None:
        pytest.skip(f"{name} is not here: set {DATA_VARIABLE} to a folder that holds {name}/")
    return places


def images(count: int, seed: int = 0) -> bytes:
    """Return an IDX file of random images."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), np.uint8)
    return struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes()


def labels(*values: int) -> bytes:
    """Return an IDX file of labels."""
    return struct.pack(">2I", 0x801, len(values)) + bytes(values)


def write_fashion_mnist(folder: Path, *contents: bytes) -> None:
    """Write the files of Fashion-MNIST with these contents, for ``FANIN_DATA=folder``."""
    (folder / FASHION_MNIST.name).mkdir(parents=True)
    for file, content in zip(FASHION_MNIST.files, contents, strict=True):
        (folder / FASHION_MNIST.name / file.name).write_bytes(gzip.compress(content, mtime=0))

"""The real public data, for tests that want it; they are skipped where it is not at hand."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fanin.clients.data.files import DATA_VARIABLE, Places, places_from

BESIDE_THE_REPOSITORY = Path(__file__).parents[3] / "shared" / "data"


def unreachable(url: str, max_bytes: int) -> bytes:
    """No test fetches anything."""
    raise OSError(f"{url}: no network for {max_bytes} bytes")


def real_places(name: str) -> Places:
    """Where the data set of this name lies: FANIN_DATA, or beside the repository. Skips if it lies in neither."""
    found = replace(places_from(os.environ), fetch=unreachable)
    if found.data is None and (BESIDE_THE_REPOSITORY / name).is_dir():
        found = replace(found, data=BESIDE_THE_REPOSITORY)
    if found.data is None:
        pytest.skip(f"{name} is not here: set {DATA_VARIABLE} to a folder that holds {name}/")
    return found

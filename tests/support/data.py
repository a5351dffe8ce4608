"""The real public data for tests that need it. These tests are skipped if the data are not available."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fanin.clients.data.files import DATA_VARIABLE, Places, places_from

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

"""Bundles in both graph formats, converted once a session: a conversion takes seconds, and several files use them."""

import fcntl
import os
from collections.abc import Callable
from functools import cache

import pytest
from support.models import app_of, exported, in_memory, write_copy

from fanin.edge.bundle import SIGNATURE_FILE, Bundle
from fanin.edge.export.formats import FORMATS

BundleOf = Callable[[str], Bundle]


def pytest_configure() -> None:
    """Have all tests compute on the CPU, on which they hold for any number of ranks, unless GPUs are named."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes are named by their length: a time or a random salt within them would make the workers' names differ."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def both_formats(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> BundleOf:
    """The Bundle of an App of ``support.models``, by name; processes of one session share what one has made."""
    root = tmp_path_factory.getbasetemp()
    # A worker has a folder of its own within the session's.
    root = root.parent if hasattr(request.config, "workerinput") else root

    @cache
    def bundle_of(name: str) -> Bundle:
        folder = root / f"bundle-{name}"
        with (root / f"bundle-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / SIGNATURE_FILE).exists():
                write_copy(exported(app_of(name), tuple(FORMATS)), folder)
        return in_memory(folder)

    return bundle_of

"""The public names of ``fanin.server``."""

import subprocess
import sys

import pytest

import fanin.server


def test_the_package_exports_the_coordinator_and_nothing_else() -> None:
    assert fanin.server.__all__ == ["Coordinator"]
    assert fanin.server.Coordinator.__module__ == "fanin.server.fleet.coordinator"
    with pytest.raises(AttributeError, match="has no attribute 'Runs'"):
        _ = fanin.server.Runs


def test_the_package_loads_no_library_before_it_is_used() -> None:
    code = "import sys, fanin.server; print('sqlalchemy' in sys.modules, 'numpy' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["False", "False"]

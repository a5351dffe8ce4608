"""Public packages: ``__all__`` lists their public names, which are imported on first use."""

import subprocess
import sys
from importlib import import_module

import pytest

from fanin.clients import Interrupted
from fanin.protos.errors import FaninError

DOORS = ("fanin.clients", "fanin.simulation")
HEAVY = {"grpc", "google", "numpy", "torch", "onnxruntime", "onnx", "sqlalchemy", "cryptography"}


@pytest.mark.parametrize("door", DOORS)
def test_importing_a_door_loads_no_library(door: str) -> None:
    code = f"import sys, {door}\nprint(*sys.modules, sep='\\n')"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(completed.stdout.split())
    assert sorted(modules & HEAVY) == []
    assert sorted(name for name in modules if name.startswith(f"{door}.")) == []


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_a_docstring(door: str) -> None:
    package = import_module(door)
    undocumented = [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()]
    assert undocumented == []
    assert package.__all__ == sorted(package.__all__)


@pytest.mark.parametrize("door", DOORS)
def test_every_public_error_has_a_code(door: str) -> None:
    public = [getattr(import_module(door), name) for name in import_module(door).__all__]
    errors = {each for each in public if isinstance(each, type) and issubclass(each, Exception)}
    # It is no error: a trainer lets it pass.
    assert [each for each in errors - {Interrupted} if not issubclass(each, FaninError)] == []


@pytest.mark.parametrize("door", DOORS)
def test_nothing_else_is_public(door: str) -> None:
    package = import_module(door)
    assert sorted(dir(package)) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = package.other


@pytest.mark.parametrize("door", DOORS)
def test_a_public_name_comes_from_below_its_door(door: str) -> None:
    package = import_module(door)
    assert [name for name in package.__all__ if not getattr(package, name).__module__.startswith(f"{door}.")] == []

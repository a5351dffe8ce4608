"""The public names of the datacenter package: few, documented, and torch is imported only on first use."""

import inspect
import subprocess
import sys

import pytest

from fanin import datacenter

LOADED = "import sys, fanin.datacenter as door; dir(door); print('torch' in sys.modules)"


def test_the_door_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_door_lists_its_names() -> None:
    assert {"plan", "train"} <= set(datacenter.__all__) <= set(dir(datacenter))
    with pytest.raises(AttributeError, match="has no attribute 'launch'"):
        _ = datacenter.launch


def test_every_name_of_the_door_is_documented() -> None:
    pytest.importorskip("torch")
    for name in datacenter.__all__:
        each = getattr(datacenter, name)
        assert each.__name__ == name
        # Python gives a dataclass without a docstring its signature as docstring.
        assert not inspect.getdoc(each).startswith(f"{name}("), f"{name} has no docstring"

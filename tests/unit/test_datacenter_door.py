"""The public names of the datacenter package: few, documented, and torch is imported only on first use."""

import inspect
import subprocess
import sys

import pytest

from fanin import datacenter

CODE = "import sys, fanin.datacenter as door; dir(door); print('torch' in sys.modules)"


def test_the_package_imports_no_torch() -> None:
    completed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert completed.stdout == "False\n"


def test_the_package_lists_its_names() -> None:
    assert {"plan", "train"} <= set(datacenter.__all__) <= set(dir(datacenter))
    with pytest.raises(AttributeError, match="has no attribute 'launch'"):
        _ = datacenter.launch


def test_every_name_of_the_package_is_documented() -> None:
    pytest.importorskip("torch")
    for name in datacenter.__all__:
        value = getattr(datacenter, name)
        assert value.__name__ == name
        # Python gives a dataclass without a docstring its signature as docstring.
        assert not inspect.getdoc(value).startswith(f"{name}("), f"{name} has no docstring"

"""The wheel contains the complete fanin packages, and no other files."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from house.tree import ROOT, SOURCE_ROOTS

INFO = "fanin-0.1.0.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of this tree, built from a copy so that no build output stays in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCE_ROOTS, "tests"):
        # Other tests create and remove caches meanwhile. The test adds one on purpose below.
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    cached = source / "server/fanin/server/rounds/__pycache__/machine.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"stale")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (path,) = out.glob("*.whl")
    assert path.name == "fanin-0.1.0-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_the_wheel_contains_exactly_the_packages(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT / root))
        for root in SOURCE_ROOTS
        for path in (ROOT / root).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    actual = {name for name in wheel.namelist() if not name.startswith(f"{INFO}/")}
    assert sorted(actual - expected) == []
    assert sorted(expected - actual) == []


def test_the_wheel_contains_the_data_files(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for name in (
        "fanin/server/py.typed",
        "fanin/v1/fleet.proto",
        "fanin/v1/fleet_pb2.pyi",
        "fanin/clients/data/digits.npz",
        f"{INFO}/licenses/LICENSE",
    ):
        assert name in names


def test_fanin_is_a_namespace(wheel: zipfile.ZipFile) -> None:
    assert "fanin/__init__.py" not in wheel.namelist()
    tops = {Path(name).parts[0] for name in wheel.namelist()}
    assert tops == {"fanin", INFO}


def test_the_wheel_installs_one_command(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"{INFO}/entry_points.txt").decode()
    assert text.split("\n") == ["[console_scripts]", "fanin = fanin.commands.main:main", ""]

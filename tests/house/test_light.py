"""`make quick` stays quick: the light files are many, and importing them loads no heavy library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.light import LIBRARIES, ROOT, TESTS, heavy_imports, is_light

TEST_FILES = sorted(TESTS.rglob("test_*.py"))
LIGHT_FILES = [path for path in TEST_FILES if is_light(path)]


def test_every_folder_of_pure_tests_has_light_files() -> None:
    folders = {path.parent.name for path in LIGHT_FILES}
    assert {"golden", "house", "laws", "twins", "unit"} <= folders
    assert len(LIGHT_FILES) > len(TEST_FILES) / 4


def test_light_files_load_no_heavy_library() -> None:
    command = [sys.executable, "-m", "pytest", "--light", "--collect-only", "-q", "-p", "house.test_light", "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded by light files: []" in done.stdout


def pytest_collection_finish() -> None:
    """Print the heavy libraries that a collection has loaded, where this file is a plugin of the run."""
    print(f"loaded by light files: {sorted(LIBRARIES & set(sys.modules))}")


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        ("import numpy", frozenset()),
        ("import torch.nn", {"torch"}),
        ("from subprocess import run", {"subprocess"}),
        ("from support import processes", {"subprocess", "support.processes"}),
        (
            "import fanin.edge.export.build",
            {"torch", "onnx", "onnxruntime", "ai_edge_litert", "subprocess", "multiprocessing"},
        ),
        ("def test_x() -> None:\n    import torch", frozenset()),
    ],
)
def test_a_heavy_import_is_found(text: str, heavy: frozenset[str], tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(text)
    assert heavy_imports(path) == heavy

"""`make quick` stays quick: many test files are light, and importing them loads no heavy library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.light import LIBRARIES, ROOT, TESTS, heavy_imports, is_light


def test_every_folder_of_pure_tests_has_light_files() -> None:
    test_files = sorted(TESTS.rglob("test_*.py"))
    light_files = [path for path in test_files if is_light(path)]
    assert {"golden", "house", "laws", "twins", "unit"} <= {path.parent.name for path in light_files}
    assert len(light_files) > len(test_files) / 5


@pytest.mark.nightly
def test_light_files_load_no_heavy_library() -> None:
    command = [sys.executable, "-m", "pytest", "--light", "--collect-only", "-q", "-p", "house.test_light", "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "loaded by light files: []" in completed.stdout


def pytest_collection_finish() -> None:
    """Print the heavy libraries that a collection has loaded, when this file is a plugin of the run."""
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
def test_a_heavy_import_is_detected(text: str, heavy: frozenset[str], tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(text)
    assert heavy_imports(path) == heavy

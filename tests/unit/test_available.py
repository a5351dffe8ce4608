"""The available runtimes, and the error for a runtime that is not installed."""

import subprocess
import sys

import pytest

from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import RuntimeMissing


def test_an_unknown_runtime_is_refused_with_the_known_names() -> None:
    with pytest.raises(RuntimeMissing, match="FN-0407"):
        open_runtime("abacus")


def test_the_default_runtime_is_onnxruntime() -> None:
    assert open_runtime().name.startswith("onnxruntime ")


def test_tflite_runtime_with_a_numpy_that_it_was_not_built_for_is_refused() -> None:
    with pytest.raises(RuntimeMissing, match="FN-0408"):
        open_runtime("tflite")


def child(code: str, *arguments: str) -> str:
    """Run the code in a new Python process. Return its standard output."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


MISSING = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split())
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import RuntimeMissing
try:
    print(open_runtime(sys.argv[2] or None).name.split()[0])
except RuntimeMissing as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("library", "name", "message"),
    [
        ("onnxruntime", "onnx", "runtime 'onnx': onnxruntime is not installed here; pip install 'fanin[onnx]'"),
        ("onnxruntime", "", "ai-edge-litert"),
        (
            "onnxruntime ai_edge_litert tflite_runtime",
            "",
            "runtime: none of ['onnx', 'litert', 'tflite'] is installed here; pip install 'fanin[onnx]'",
        ),
        (
            "ai_edge_litert",
            "litert",
            "runtime 'litert': ai_edge_litert is not installed here; pip install 'fanin[litert]'",
        ),
        ("onnx", "reference", "runtime 'reference': onnx is not installed here; pip install 'fanin[export]'"),
    ],
)
def test_a_missing_library_is_reported_with_its_extra(library: str, name: str, message: str) -> None:
    assert child(MISSING, library, name) == message

"""Runtimes of other packages that are wrong: one sentence names the runtime, its package and the remedy."""

from pathlib import Path

import pytest
from support.errors import raises
from support.outside import install_code

from fanin.edge.runtimes.available import open_format, open_runtime
from fanin.protos.errors import RuntimeMissing

CODE = """
from fanin.edge.runtimes.available import RuntimeRecord
from fanin.edge.runtimes.engine import GraphEngine

def engine():
    return GraphEngine(name="own", version="1", graph_format="onnx", load=None, errors=())

def missing():
    import abacus_library

def failing():
    raise OSError("no beads")

right = RuntimeRecord(title="Own", graph_format="onnx", engine=engine)
lacking = RuntimeRecord(title="Own", graph_format="onnx", engine=missing, libraries=("abacus_library",))
raising = RuntimeRecord(title="Own", graph_format="onnx", engine=failing)
number = 5
"""
ENTRIES = ("right", "lacking", "raising", "number", "nowhere")


@pytest.fixture
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two distributions of runtimes, in this process."""
    lines = "".join(f"{name} = own_runtime:{name}\n" for name in ENTRIES)
    install_code(tmp_path, "own_runtime", CODE, f"[fanin.runtimes]\n{lines}twice = own_runtime:right\n")
    install_code(tmp_path, "other_runtime", "", "[fanin.runtimes]\ntwice = own_runtime:right\nonnx = nowhere:nothing\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_site")
def test_a_runtime_of_another_package_is_opened_by_its_name() -> None:
    assert open_runtime("right").name == "own 1"
    assert open_format(["onnx"], "right").graph_format == "onnx"
    # A package cannot replace a runtime of ours.
    assert open_runtime("onnx").name.startswith("onnxruntime ")


@pytest.mark.usefixtures("_site")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rigth", "got 'rigth', expected one of .*'right', 'tflite', 'twice'\\]; did you mean right\\?"),
        ("lacking", "'lacking': abacus_library is not installed here; pip install abacus_library"),
        ("raising", "'raising': its package raised OSError: no beads; correct that package"),
        ("number", "'number': got int from own_runtime:number, expected a RuntimeRecord; correct that package"),
        ("nowhere", "'nowhere': cannot be imported from own_runtime:nowhere .*; repair that package"),
        ("twice", "'twice': got one from each of \\['other_runtime', 'own_runtime'\\], .*; uninstall the others"),
    ],
)
def test_a_wrong_package_is_named(name: str, message: str) -> None:
    with pytest.raises(RuntimeMissing, match=f"runtime:? {message}"):
        open_runtime(name)


@pytest.mark.usefixtures("_site")
def test_a_runtime_for_another_format_is_refused_before_it_is_opened() -> None:
    with raises(RuntimeMissing, "runtime 'raising': runs graphs in 'onnx', expected one that runs ['tflite']"):
        open_format(["tflite"], "raising")

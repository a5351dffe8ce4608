"""Wrong runtimes of other packages: one sentence names the runtime, its package and the remedy."""

from pathlib import Path
from typing import Any, Final

import pytest
from support.errors import raises
from support.outside import install_code, run

from fanin.edge.runtimes.available import RuntimeRecord, open_format, open_runtime
from fanin.edge.runtimes.engine import GraphEngine
from fanin.protos.errors import InvalidInput, RuntimeMissing

CODE = """
from fanin.edge.runtimes.available import RuntimeRecord
from fanin.edge.runtimes.engine import GraphEngine

def engine():
    return GraphEngine(name="own", version="1", graph_format="onnx", load=print, errors=())

def without_load():
    return GraphEngine(name="own", version="1", graph_format="onnx", load=None, errors=())

def missing():
    import abacus_library

def failing():
    raise OSError("no beads")

right = RuntimeRecord(title="Own", graph_format="onnx", engine=engine)
hollow = RuntimeRecord(title="Own", graph_format="onnx", engine=without_load)
lacking = RuntimeRecord(title="Own", graph_format="onnx", engine=missing, libraries=("abacus_library",))
raising = RuntimeRecord(title="Own", graph_format="onnx", engine=failing)
number = 5
mixed = RuntimeRecord(title="Own", graph_format="tflite", engine=engine)
default = RuntimeRecord(title="Own", graph_format="onnx", engine=engine, is_default=True)
"""
ENTRIES = ("right", "hollow", "lacking", "raising", "number", "nowhere", "mixed")


@pytest.fixture
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install two distributions with runtimes on this process's import path."""
    lines = "".join(f"{name} = own_runtime:{name}\n" for name in ENTRIES)
    install_code(tmp_path, "own_runtime", CODE, f"[fanin.runtimes]\n{lines}twice = own_runtime:right\n")
    install_code(tmp_path, "other_runtime", "", "[fanin.runtimes]\ntwice = own_runtime:right\nonnx = nowhere:nothing\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_site")
def test_a_runtime_of_another_package_is_opened_by_its_name() -> None:
    assert open_runtime("right").name == "own 1"
    assert open_format(["onnx"], "right").graph_format == "onnx"
    # A package cannot replace a runtime of fanin.
    assert open_runtime("onnx").name.startswith("onnxruntime ")


@pytest.mark.usefixtures("_site")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rigth", "got 'rigth', expected one of .*'right', 'tflite', 'twice'\\]; did you mean right\\?"),
        ("lacking", "'lacking': abacus_library is not installed here; pip install abacus_library"),
        (
            "hollow",
            "'hollow': its package raised InvalidInput: engine 'own': load: got None, expected a function",
        ),
        ("raising", "'raising': its package raised OSError: no beads; correct that package"),
        ("number", "'number': got int from own_runtime:number, expected a RuntimeRecord; correct that package"),
        ("mixed", "'mixed': its record returned an engine of onnx, expected a GraphEngine of tflite; correct that"),
        ("nowhere", "'nowhere': cannot be imported from own_runtime:nowhere .*; repair that package"),
        ("twice", "'twice': got one from each of \\['other_runtime', 'own_runtime'\\], .*; uninstall the others"),
    ],
)
def test_a_wrong_package_is_named(name: str, message: str) -> None:
    with pytest.raises(RuntimeMissing, match=f"runtime:? {message}"):
        open_runtime(name)


WITHOUT_OURS = """
import sys
sys.modules |= dict.fromkeys(["onnxruntime", "ai_edge_litert", "tflite_runtime"])
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import RuntimeMissing
try:
    print(open_runtime().name)
except RuntimeMissing as exc:
    print(exc)
"""


def test_only_a_default_runtime_of_another_package_is_opened_without_a_name(tmp_path: Path) -> None:
    for name, output in (("right", "runtime: none of ['onnx', 'litert', 'tflite'] is installed"), ("default", "own 1")):
        site = tmp_path / name
        site.mkdir()
        install_code(site, "own_runtime", CODE, f"[fanin.runtimes]\n{name} = own_runtime:{name}\n")
        assert run(site, WITHOUT_OURS, cwd=tmp_path).stdout.startswith(output)


@pytest.mark.usefixtures("_site")
def test_a_runtime_for_another_format_is_refused_before_it_is_opened() -> None:
    with raises(RuntimeMissing, "runtime 'raising': runs graphs in 'onnx', expected one that runs ['tflite']"):
        open_format(["tflite"], "raising")


ENGINE: Final = {"name": "own", "version": "1", "graph_format": "onnx", "load": print, "errors": (ValueError,)}
RECORD: Final = {"title": "Own", "graph_format": "onnx", "engine": print}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "my own"}, "engine 'my own': name: got 'my own', expected a text without spaces"),
        ({"version": ""}, "engine 'own': version: got '', expected a text without spaces"),
        ({"graph_format": "pt"}, "engine 'own': graph_format: got 'pt', expected one of ['onnx', 'tflite']"),
        (
            {"errors": ValueError},
            "engine 'own': errors: got <class 'ValueError'>, expected a tuple of exception classes",
        ),
        ({"errors": (5,)}, "engine 'own': errors: got (5,), expected a tuple of exception classes"),
        ({"operators": ["Add"]}, "engine 'own': operators: got ['Add'], expected a frozenset of names, or None"),
        (
            {"graph_format": "tflite", "operators": frozenset(["ADD"])},
            "engine 'own': operators: got frozenset({'ADD'}), expected None: fanin lists no operators of tflite files",
        ),
    ],
)
def test_an_engine_with_a_wrong_field_is_refused(wrong: dict[str, Any], message: str) -> None:
    assert GraphEngine(**ENGINE).operators is None
    with raises(InvalidInput, message):
        GraphEngine(**(ENGINE | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"title": ""}, "RuntimeRecord '': title: got '', expected a text"),
        ({"graph_format": "pt"}, "RuntimeRecord 'Own': graph_format: got 'pt', expected one of ['onnx', 'tflite']"),
        ({"engine": None}, "RuntimeRecord 'Own': engine: got None, expected a function without arguments"),
        (
            {"plain_engine": 1},
            "RuntimeRecord 'Own': plain_engine: got 1, expected a function without arguments, or None",
        ),
        ({"libraries": "own"}, "RuntimeRecord 'Own': libraries: got 'own', expected a tuple of package names"),
        ({"extra": None}, "RuntimeRecord 'Own': extra: got None, expected a text"),
        ({"is_default": 1}, "RuntimeRecord 'Own': is_default: got 1, expected true or false"),
    ],
)
def test_a_runtime_record_with_a_wrong_field_is_refused(wrong: dict[str, Any], message: str) -> None:
    assert RuntimeRecord(**RECORD).extra == ""
    with raises(InvalidInput, message):
        RuntimeRecord(**(RECORD | wrong))

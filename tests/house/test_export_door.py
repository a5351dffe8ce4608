"""The public names of ``fanin.edge.export``: complete, documented, and cheap to import until a name is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import package_modules

from fanin.edge import export

GRAPH_LIBRARIES = ("ai_edge_litert", "litert_torch", "onnx", "onnxruntime", "onnxscript", "tflite_runtime")


def loaded_modules(code: str) -> set[str]:
    """Return the modules that a new process has loaded after it has run ``code``."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules, sep='\\n')"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def docstring(path: Path, name: str) -> str:
    """Return the docstring of a function, class or assignment, or "" if it has none."""
    body = ast.parse(path.read_text()).body
    for index, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            match body[index + 1]:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    return text
    return ""


def test_importing_the_door_imports_no_heavy_library() -> None:
    modules = loaded_modules("import fanin.edge.export")
    assert not modules & {"torch", *GRAPH_LIBRARIES}
    assert not {name for name in modules if name.startswith("fanin.edge.export.")}


@pytest.mark.nightly
def test_an_app_that_is_only_trained_needs_no_graph_library() -> None:
    names = ("training.model", "training.parameters", "models.digits_app")
    modules = loaded_modules("import " + ", ".join(f"fanin.datacenter.{name}" for name in names))
    assert "fanin.edge.export.app.app" in modules
    assert not modules & set(GRAPH_LIBRARIES)


def test_every_public_name_has_an_owner() -> None:
    assert sorted(export.OWNERS) == sorted(export.__all__)


@pytest.mark.parametrize("name", export.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    folder, owner = Path(export.__path__[0]), export.OWNERS[name]
    if owner.startswith("fanin.edge."):
        folder, owner = folder.parent, owner.removeprefix("fanin.edge.")
    assert docstring(folder / f"{owner.replace('.', '/')}.py", name)


def test_every_public_name_can_be_used() -> None:
    code = "import fanin.edge.export as door\nfor name in door.__all__: assert getattr(door, name) is not None, name"
    assert "torch" in loaded_modules(code)


def test_each_floor_imports_the_diagnosis_inside_a_function() -> None:
    room = "fanin.edge.export."
    floors = [module for module in package_modules() if module.name.startswith(room)]
    imports = [
        f"{floor.path}: {node.module}"
        for floor in floors
        if not floor.name.startswith(f"{room}diagnosis")
        for node in floor.tree().body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{room}diagnosis")
    ]
    assert len(floors) > 100
    assert imports == []


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'fanin.edge.export' has no attribute 'gone'"):
        _ = export.gone

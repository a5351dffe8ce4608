"""``load_app``: the lookup of an App in a file or a module, and the errors of the App's own code."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fanin.edge.export import load_app
from fanin.protos.errors import InvalidInput, UnsupportedModel

APP_FILE = """
from dataclasses import dataclass
import torch
from fanin.edge.export import App

def make():
    return App(name="filed", module=torch.nn.Linear(4, 2), calibration=torch.zeros(2, 4), batch_size=2, num_classes=2)

app = make()
number = 7
"""


@pytest.fixture
def import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for an App. Afterwards ``sys.path`` and the loaded modules are restored."""
    modules = set(sys.modules)
    # The call saves sys.path, to restore it later. The App's folder itself must not be on it yet.
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    yield tmp_path
    for name in {"fanin_app_app", "fanin_app_my_app", "beside"} - modules:
        sys.modules.pop(name, None)


@pytest.fixture
def app_file(import_path: Path) -> Path:
    """A file with an App, a function that returns an App, and another object."""
    path = import_path / "my_app.py"
    path.write_text(APP_FILE)
    return path


@pytest.mark.parametrize("name", ["app", "make"])
def test_an_app_is_loaded_from_a_file(app_file: Path, name: str) -> None:
    assert load_app(f"{app_file}:{name}").name == "filed"


def test_an_app_is_loaded_from_a_module(app_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(app_file.parent))
    assert load_app("my_app:make").input_shapes == {"x": (4,)}
    sys.modules.pop("my_app")


def test_a_wrong_app_has_a_clear_error(app_file: Path) -> None:
    for where, error, message in (
        ("my_app", InvalidInput, "App: got 'my_app', expected 'package.module:name' or 'path/to/file.py:name'"),
        (
            "no.such.module:app",
            InvalidInput,
            "App: no module 'no' on the path; for a file write path/to/file.py:name",
        ),
        (f"{app_file.parent}/gone.py:app", InvalidInput, "App: no file .*gone.py"),
        (f"{app_file}:gone", InvalidInput, "my_app.py has no 'gone'"),
        (f"{app_file}:number", UnsupportedModel, "got int, expected a fanin.edge.export.App or a function"),
    ):
        with pytest.raises(error, match=message):
            load_app(where)


@dataclass(frozen=True)
class Broken:
    """The text of an App's file and of its helper module; the expected error: its file, its line and its message."""

    app: str
    helper: str
    place: str
    text: str


BROKEN = {
    "import": Broken(
        "import a_library_that_is_not_there", "", "app.py:1", "ModuleNotFoundError{at}: No module named 'a_libr"
    ),
    "top level": Broken("\n1 / 0\n", "", "app.py:2", "ZeroDivisionError{at}: division by zero"),
    "syntax": Broken("x = (\n", "", "app.py:1", "SyntaxError{at}: '(' was never closed"),
    "helper's syntax": Broken("import beside", "\n\ndef", "beside.py:3", "SyntaxError{at}: invalid syntax"),
    "function": Broken("def app():\n    return {}['k']\n", "", "app.py:2", "KeyError{at}: 'k'"),
    "helper": Broken(
        "def app():\n    import beside\n    return beside.make()\n",
        "import json\n\ndef make():\n    return json.loads('{')\n",
        "beside.py:4",
        "JSONDecodeError{at}: Expecting property name",
    ),
    "ends": Broken("import sys\nsys.exit(0)\n", "", "app.py:2", "SystemExit{at}: 0"),
    "fanin's": Broken(
        "from fanin.edge.tensors import TensorTable\nTensorTable.of(3)\n", "", "app.py:2", "{at}: 'int' object"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_the_apps_own_code_is_reported_with_its_file_and_line(import_path: Path, name: str) -> None:
    broken = BROKEN[name]
    (import_path / "app.py").write_text(broken.app)
    (import_path / "beside.py").write_text(broken.helper)
    where = f"{import_path / 'app.py'}:app"
    with pytest.raises(UnsupportedModel) as excinfo:
        load_app(where)
    location = f" at {import_path / broken.place}"
    assert broken.text.format(at=location) in str(excinfo.value)
    assert str(excinfo.value).startswith(f"App {where!r}: its own code raised ")


def test_a_broken_file_leaves_no_module(import_path: Path) -> None:
    (import_path / "app.py").write_text("1 / 0")
    with pytest.raises(UnsupportedModel, match="ZeroDivisionError"):
        load_app(f"{import_path / 'app.py'}:app")
    assert "fanin_app_app" not in sys.modules


def test_an_app_imports_the_modules_beside_its_file(
    import_path: Path, app_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app_file.rename(import_path / "beside.py")
    (import_path / "app.py").write_text(
        "from beside import app\ndef late():\n    import beside\n    return beside.app\n"
    )
    monkeypatch.chdir(import_path)
    assert load_app("app.py:app").name == load_app("app.py:late").name == "filed"
    assert sys.path[0] == str(import_path)
    assert sys.path.count(str(import_path)) == 1

"""A room is a folder with one subject: it holds few modules, and each public class has a unique name."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import PurePath

from house.tree import Module, package_modules

MAX_MODULES = 12
SELF_CONTAINED = "fanin.datacenter.models"
"""Each module here is a complete, self-contained model, so layers of two models may share a name."""


def sizes(modules: Iterable[Module]) -> Counter[str]:
    """Return the number of modules in each folder, without ``__init__`` and migrations, which are steps."""
    paths = (PurePath(module.path) for module in modules)
    return Counter(str(path.parent) for path in paths if path.name != "__init__.py" and path.parent.name != "versions")


def owners(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the modules that define each public class."""
    places = defaultdict(list)
    for module in modules:
        for node in module.tree().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return places


def shared_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the public classes that several modules define."""
    candidates = (module for module in modules if not module.name.startswith(SELF_CONTAINED))
    return {name: places for name, places in owners(candidates).items() if len(places) > 1}


def unlisted_modules(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the modules and subfolders that the docstring of their room's ``__init__`` does not name."""
    docstrings: dict[str, str] = {}
    contents = defaultdict(set)
    for module in modules:
        path = PurePath(module.path)
        if path.name == "__init__.py":
            docstrings[str(path.parent)] = ast.get_docstring(module.tree()) or ""
            contents[str(path.parent.parent)].add(path.parent.name)
        else:
            contents[str(path.parent)].add(path.stem)
    missing = {
        room: sorted(name for name in contents[room] if not re.search(rf"\b{name}\b", docstring))
        for room, docstring in docstrings.items()
    }
    return {room: names for room, names in missing.items() if names}


def test_a_room_contains_few_modules() -> None:
    assert {room: size for room, size in sizes(package_modules()).items() if size > MAX_MODULES} == {}


def test_each_public_class_has_a_unique_name() -> None:
    assert shared_names(package_modules()) == {}


def test_each_room_has_a_docstring() -> None:
    rooms = [module for module in package_modules() if module.path.endswith("__init__.py")]
    undocumented = [
        module.path for module in rooms if "/v1/" not in module.path and not ast.get_docstring(module.tree())
    ]
    assert undocumented == []


def test_each_room_lists_its_modules() -> None:
    assert unlisted_modules(module for module in package_modules() if "/v1/" not in module.path) == {}


def test_a_large_room_is_detected() -> None:
    modules = [Module(path=f"x/m{number}.py", name=f"x.m{number}", text="") for number in range(MAX_MODULES + 1)]
    assert sizes(modules) == {"x": MAX_MODULES + 1}


def test_a_shared_name_is_detected() -> None:
    modules = [Module(path=f"{room}/m.py", name=f"{room}.m", text="class Layout: ...\n") for room in ("a", "b")]
    assert shared_names(modules) == {"Layout": ["a.m", "b.m"]}


def test_an_unlisted_module_is_detected() -> None:
    room = Module(path="x/__init__.py", name="x", text='"""A room: ``first``, ``inner/``."""\n')
    inner = Module(path="x/inner/__init__.py", name="x.inner", text='"""Another room."""\n')
    modules = [Module(path=f"x/{name}.py", name=f"x.{name}", text="") for name in ("first", "second")]
    assert unlisted_modules([room, inner, *modules]) == {"x": ["second"]}

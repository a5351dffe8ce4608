"""Loading an App or another object by name: the one place where fanin finds code by a string, subcommands aside."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from fanin.edge.export.app.app import App
from fanin.protos.errors import FaninError, InvalidInput, UnsupportedModel

T = TypeVar("T")


def _call(function: Callable[[], object]) -> object:
    return function()


def load_app(where: str, call: Callable[[Callable[[], object]], object] = _call) -> App:
    """Load an App.

    Args:
        where: ``package.module:name`` or ``path/to/file.py:name``. ``name`` is an App, or a function without arguments
            that returns one. The folder of a file is inserted at the front of ``sys.path``, as for a Python script. So
            the file may import the modules next to it.
        call: Calls the function, and returns its result.

    Returns:
        The App.

    Raises:
        InvalidInput: The file, the module or the name does not exist.
        UnsupportedModel: The object is not an App, or the App's own code raises. The message names its file and line.
    """
    candidate = load_object("App", where)
    if isinstance(candidate, torch.nn.Module):
        raise UnsupportedModel(
            f"App {where!r}: got a module, {type(candidate).__name__}; put it into a fanin.edge.export.App, "
            "with calibration data",
            code="FN-0704",
        )
    if callable(candidate) and any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in signature(candidate).parameters.values()
    ):
        raise UnsupportedModel(
            f"App {where!r}: got a function with arguments, expected one that needs none; give each argument a default",
            code="FN-0704",
        )
    app = _guarded("App", where, lambda: call(candidate)) if callable(candidate) else candidate
    if not isinstance(app, App):
        advice = ""
        if isinstance(app, torch.nn.Module):
            advice = "; put the module into an App, with calibration data"
        elif app is None:
            advice = "; end the function with return App(...)"
        raise UnsupportedModel(
            f"App {where!r}: got {type(app).__name__}, expected a fanin.edge.export.App or a function that returns one"
            f"{advice}",
            code="FN-0704",
        )
    return app


def load_object(kind: str, where: str) -> object:
    """Return the object with the name ``package.module:name`` or ``path/to/file.py:name``.

    Args:
        kind: The purpose of the object, for errors.
        where: The name.

    Raises:
        InvalidInput: The file, the module or the name does not exist.
        UnsupportedModel: The code of the module raises. The message names its file and line.
    """
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise InvalidInput(
            f"{kind}: got {where!r}, expected 'package.module:name' or 'path/to/file.py:name'", code="FN-0701"
        )
    is_file = source.endswith(".py")
    module = _guarded(kind, where, lambda: _load_file(kind, Path(source)) if is_file else _load_module(kind, source))
    if not hasattr(module, name):
        raise InvalidInput(
            f"{kind} {where!r}: {source} has no {name!r}, expected an {kind} or a function of that name", code="FN-0702"
        )
    return getattr(module, name)


def _guarded(kind: str, where: str, call: Callable[[], T]) -> T:
    """Return the result of a call that runs code of others. Raises UnsupportedModel."""
    try:
        return call()
    except UnsupportedModel as exc:
        from fanin.edge.export.diagnosis.lines import own_line

        # An App that its own code creates is refused there; an error of this module has no such line.
        # The file may create other Apps than the one that is loaded.
        line = own_line(exc)
        raise UnsupportedModel(
            f"{exc} (at {line}, while {where!r} is loaded)" if line else str(exc), code=exc.code
        ) from exc
    except FaninError:
        raise
    except (Exception, SystemExit) as exc:
        # Code of others may raise anything; a script may even call sys.exit.
        from fanin.edge.export.diagnosis.lines import own_line

        line = own_line(exc)
        place = f" at {line}" if line else ""
        raise UnsupportedModel(
            f"{kind} {where!r}: its own code raised {type(exc).__name__}{place}: {exc}", code="FN-0706"
        ) from exc


def _load_module(kind: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        # A module that this code imports in vain is an error of that code.
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise InvalidInput(
            f"{kind}: no module {exc.name!r} on the path; for a file write path/to/file.py:name", code="FN-0702"
        ) from exc


def _load_file(kind: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"{kind}: no file {path}, expected the path of a Python file", code="FN-0702")
    name = f"fanin_app_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look up their module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""The lines of the App's own code: where an exception was raised, where a function begins, and where it returns."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

from torch import nn

from fanin.edge.export.refusals import LOSS, NOT_THE_APPS, Place, Untraceable
from fanin.protos.errors import UnsupportedModel


def place_of(exc: BaseException, root: nn.Module) -> Place:
    """Return the innermost module of ``root`` in an exception's traceback, and the App's line."""
    names = {layer: name for name, layer in root.named_modules()}
    module = kind = line = ""
    for frame, number in _frames(exc):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and own in names:
            # A quantization-aware layer replaces the App's own layer; report that one.
            module, kind = names[own], type(own).__name__.removeprefix("QuantAware")
        if not frame.f_code.co_filename.startswith(NOT_THE_APPS):
            line = f"{Path(frame.f_code.co_filename).name}:{number}"
    return Place(module=module, kind=kind, line=line)


def is_of(exc: Untraceable, loss: Callable[..., object]) -> bool:
    """Return whether an error is one of a loss: of its code, or of its result."""
    code = _code_of(loss)
    return exc.place.kind == LOSS or any(frame.f_code is code for frame, _ in _frames(exc))


def first_line_of(function: Callable[..., object]) -> str:
    """Return ``file:line`` of the begin of a function of the App; "" for a library's function."""
    code = _code_of(function)
    if code is None or code.co_filename.startswith(NOT_THE_APPS):
        return ""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _frames(exc: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames from the outermost one to where the exception was first raised."""
    if exc.__cause__ is not None:
        yield from _frames(exc.__cause__)
        return
    step = exc.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def is_apps(module: nn.Module) -> bool:
    """Return whether the forward of a module is the App's own code, and not a library's."""
    code = _code_of(module)
    return code is not None and not code.co_filename.startswith(NOT_THE_APPS)


def return_line(function: Callable[..., object], call: Callable[[], object]) -> str:
    """Return ``file:line`` of the statement by which a function of the App returns; "" for a library's function.

    Args:
        function: A function, or an object that can be called, such as a loss or a module.
        call: A call of it. An exception of the call is ignored.
    """
    code, lines = _code_of(function), [""]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is code:
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    if code is None or code.co_filename.startswith(NOT_THE_APPS):
        return ""
    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except UnsupportedModel:
        pass
    finally:
        sys.setprofile(previous)
    return lines[-1]


def _code_of(function: Callable[..., object]) -> CodeType | None:
    """Return the code that a call runs: that of ``forward`` for a module, of ``__call__`` for another object."""
    own = getattr(function, "func", function)  # functools.partial
    owner = type(own).forward if isinstance(own, nn.Module) else own if hasattr(own, "__code__") else type(own).__call__
    code = getattr(owner, "__code__", None)
    return code if isinstance(code, CodeType) else None


def own_line(exc: BaseException, *, of_fanin: bool = True) -> str:
    """Return ``file:line`` of the innermost frame in the user's own code; "" if there is none.

    Args:
        exc: The exception.
        of_fanin: Whether a module of fanin may count as the user's code if no other does: it may have an App.
    """
    if isinstance(exc, SyntaxError) and exc.filename and not exc.filename.startswith(NOT_THE_APPS):
        return f"{exc.filename}:{exc.lineno}"
    line = fallback = ""
    for frame, number in _frames(exc):
        if not frame.f_code.co_filename.startswith(NOT_THE_APPS):
            place = f"{frame.f_code.co_filename}:{number}"
            # An App may be a module of fanin itself. Its line is used only as a fallback.
            spec = frame.f_globals.get("__spec__")
            if str(getattr(spec, "name", "") or frame.f_globals.get("__name__", "")).startswith("fanin."):
                fallback = place
            else:
                line = place
    return line or (fallback if of_fanin else "")

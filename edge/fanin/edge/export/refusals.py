"""Errors of code that cannot be traced: the module, the line of the App, and the remedy.

The tracer runs the App's own code, which may raise anything. The error names the type of that exception, the innermost
module and the App's own line.
"""

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, TypeVar

import torch
from torch import nn

from fanin.edge.export.graph.reading import MixedPrecision, ShapeRead, ValueRead
from fanin.edge.export.module.draws import RandomDraw
from fanin.edge.export.module.plain.writing import ViewWrite
from fanin.protos.errors import UnsupportedModel

T = TypeVar("T")
NO_GRADIENT: Final = "does not require grad"
READS_A_VALUE: Final = re.compile(
    r"_local_scalar_dense|[Dd]ata-dependent|data dependent|out of a tracing tensor|not supported for tensor subclasses"
)
"""Messages of torch's tracers for code that reads a tensor's value."""
FIXED: Final = re.compile(r"[Cc]onstraints? violated|specialized it to be a constant")
"""Messages of torch for code that treats the number of samples as a constant."""
KEEP_TENSORS: Final = (
    "avoid Python branches and loops that read tensor values: keep everything computed from x and from parameters a "
    "tensor (torch.where instead of if), compute constants from values that do not change, and remove prints, logs and "
    "asserts of values from the forward"
)
KEEP_SHAPES: Final = (
    "keep all positions and give the others no weight: torch.where(mask, x, 0.0) or x * mask instead of x[mask]; "
    "operators that count or select by value (nonzero, unique, masked_select, bincount) have no such form"
)
KEEP_WHOLE: Final = (
    "write into a copy of the whole tensor: y = y.clone(), then y[:, 0] = y[:, 0] + 1.0 with integers and slices "
    "without a step; or build a new tensor by torch.where, torch.cat or torch.stack"
)
TRACEABLE: Final = (
    "avoid Python branches and loops that read tensor values, and operators whose result has no fixed shape"
)
REPLACE: Final = "replace that part of the model, or freeze it; fanin export --check names it"
"""The remedy for an operator that a format lacks, while the layer is unknown."""
SAMPLES: Final = (
    "write x.shape[0] instead of that number in the forward (x.view(x.shape[0], -1) or x.flatten(1)), and replace "
    "operators that need a fixed number (torch.cdist)"
)
ROOM: Final = str(Path(__file__).parent)
NOT_THE_APPS: Final = (
    ROOM,
    str(Path(torch.__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<",
)
"""Prefixes of files that do not belong to an App: this room, installed libraries, Python, and no file."""
MODES: Final = ("__torch_dispatch__", "__torch_function__")
"""Functions that torch calls for each operator of the App's code. They are between that code and the operator."""


LOSS: Final = "loss"
"""The kind of a place in the loss of an App, which belongs to no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of an error in the App's code. As text, it is "" if nothing is known.

    Attributes:
        module: Name of the innermost module involved; "" if unknown, or for the module itself.
        kind: Class of that module, or ``LOSS``; "" if unknown.
        line: ``file:line`` of the App's code; "" if unknown.
    """

    module: str = ""
    kind: str = ""
    line: str = ""

    def __str__(self) -> str:
        is_module = self.kind not in ("", LOSS)
        module = [f"module {self.module or 'itself'} ({self.kind})"] if is_module else []
        return " ".join([*module, *([f"at {self.line}"] if self.line else [])])


NOWHERE: Final = Place()


class Untraceable(UnsupportedModel):
    """The App's code cannot be traced, for any runtime.

    Args:
        reason: The failure, the received value and the expected one.
        advice: The remedy.
        place: The module and the line involved.
    """

    def __init__(self, reason: str, advice: str = "", place: Place = NOWHERE) -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason, self.advice, self.place = reason, advice, place

    def at(self, line: str) -> "Untraceable":
        """Return the same error with the line of its place, whose text is a part of the reason."""
        place = replace(self.place, line=line)
        return Untraceable(self.reason.replace(str(self.place), str(place), 1), self.advice, place)


class NoGradient(Untraceable):
    """The loss has no gradient in the parameters: the code of the module or that of the loss has none."""


class NoForm(Untraceable):
    """A part that the runtimes of one graph format cannot express, without an operator to name."""


def guarded(what: str, root: nn.Module, call: Callable[[], T]) -> T:
    """Return the result of a call that runs the App's code.

    Args:
        what: Prefix of error messages.
        root: The outermost module of the call. An error names the innermost one.
        call: The call.

    Raises:
        Untraceable: The call raised another exception.
    """
    try:
        return call()
    except UnsupportedModel:
        raise
    except Exception as exc:  # the App's own code may raise anything
        raise _refusal(what, root, exc) from exc


def reads_values(exc: Exception) -> bool:
    """Return whether an exception is that of a tracer for code that reads a tensor's value."""
    return isinstance(exc, ValueRead | ShapeRead) or READS_A_VALUE.search(str(exc)) is not None


def succeeds(root: nn.Module, call: Callable[[], object]) -> bool:
    """Return whether a call that runs the code of ``root`` raises nothing."""
    try:
        guarded("", root, call)
    except UnsupportedModel:
        return False
    return True


def _refusal(what: str, root: nn.Module, exc: Exception) -> Untraceable:
    place = _place(exc, root)
    where, text = str(place), str(exc)
    if NO_GRADIENT in text:
        advice = "an operator between them has none, or the loss does not depend on them; use operators with a gradient"
        return NoGradient(f"{what}: no gradient reaches the parameters that learn from the loss", advice)
    if isinstance(exc, ValueRead) or READS_A_VALUE.search(text):
        how = f", by {text}" if isinstance(exc, ValueRead) else ""
        return Untraceable(
            f"{what} cannot be traced: {where or 'its code'} reads the value of a tensor{how}; "
            "the graph would keep that of the example batch for every batch",
            KEEP_TENSORS,
            place,
        )
    if isinstance(exc, ShapeRead):
        return Untraceable(
            f"{what} cannot be traced: {where or 'its code'} selects by {text}, whose result has a shape that depends "
            "on values, expected one shape for every batch",
            KEEP_SHAPES,
            place,
        )
    if isinstance(exc, ViewWrite):
        return Untraceable(
            f"{what} cannot be traced: {where or 'its code'} calls {text}; its gradient has no form in any format",
            KEEP_WHOLE,
            place,
        )
    if isinstance(exc, MixedPrecision):
        return Untraceable(
            f"{what} cannot be traced: {where or 'its code'} computes in {text} by torch.autocast, expected float32, "
            "in which devices compute",
            "remove torch.autocast from the forward",
            place,
        )
    if isinstance(exc, RandomDraw):
        return Untraceable(f"{what} cannot be traced: {where or 'its code'} draws {text}", exc.advice, place)
    cause = f"{type(exc).__name__}: {text}"
    if type(exc).__module__.startswith("torch"):
        # The further lines are hints for developers of torch.
        cause = f"{type(exc).__name__}: {first_line(exc)}"
        return Untraceable(f"{what} cannot be traced{f', {where}' if where else ''} ({cause})", TRACEABLE, place)
    preposition = " in" if place.kind else ""
    return Untraceable(f"{what} fails{preposition}{f' {where}' if where else ''} ({cause})", "", place)


def _place(exc: BaseException, root: nn.Module) -> Place:
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


def running_line() -> str:
    """Return ``file:line`` of the App's code that called the caller of this function; "" if only libraries did."""
    caller: FrameType | None = sys._getframe(1)
    is_outside = False
    while caller is not None:
        file = caller.f_code.co_filename
        if not file.startswith(NOT_THE_APPS):
            return f"{Path(file).name}:{caller.f_lineno}"
        is_mode = caller.f_code.co_name in MODES
        if file.startswith(ROOM) and is_outside and not is_mode:
            return ""  # the code that runs the App's module
        is_outside = is_outside or not file.startswith(ROOM)
        caller = caller.f_back
    return ""


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


def first_line(exc: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__

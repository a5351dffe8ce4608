"""What is told where no graph can be made of an App's code: which of its modules, which line, and what to do.

The tracer runs that code, which may raise anything; what it raised is told with its type, and with the innermost module
and the App's own line that it came through.
"""

import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

import torch
from torch import nn

from fanin.edge.export.tracing.reading import ValueRead
from fanin.protos.errors import UnsupportedModel

Result = TypeVar("Result")
NO_GRADIENT: Final = "does not require grad"
READS_A_VALUE: Final = re.compile(
    r"_local_scalar_dense|[Dd]ata-dependent|data dependent|out of a tracing tensor|not supported for tensor subclasses"
)
"""What torch's tracers say of code that looks at a value."""
FIXED: Final = re.compile(r"[Cc]onstraints? violated|specialized it to be a constant")
"""What torch says of code that computes with the number of samples as if it never varied."""
KEEP_TENSORS: Final = (
    "avoid Python branches and loops that look at tensor values: keep what is computed from x and from parameters a "
    "tensor (torch.where for if), and take constants from what does not change"
)
TRACEABLE: Final = (
    "avoid Python branches and loops that look at tensor values, and operators whose result has no fixed shape"
)
REPLACE: Final = "replace that part of the model, or freeze it; fanin export --check names it"
"""What to do about an operator that a format lacks, for who has not asked which layer it is in."""
SAMPLES: Final = (
    "write x.shape[0] where the forward has that number (x.view(x.shape[0], -1) or x.flatten(1)), and replace an "
    "operator that must know it (torch.cdist)"
)
NOT_THE_APPS: Final = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<",
)
"""Where files begin that are no App's: this room, installed libraries, Python's own, and what has no file."""


class Untraceable(UnsupportedModel):
    """No graph can be made of an App's code, for whatever runtime.

    ``module`` and ``kind`` are the innermost module's that it concerns, as far as that is known.
    """

    def __init__(self, reason: str, advice: str = "", module: str = "", kind: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason, self.advice, self.module, self.kind = reason, advice, module, kind


class NoForm(Untraceable):
    """What the runtimes of one graph format have no form for, though others may, and no operator's name tells it."""


def guarded(what: str, root: nn.Module, call: Callable[[], Result]) -> Result:
    """What ``call`` gives, which runs the code of ``root``; ``what`` begins an error's message. Raises Untraceable."""
    try:
        return call()
    except UnsupportedModel:
        raise
    except Exception as exc:  # it is the App's own code, which may raise anything
        raise _told(what, root, exc) from exc


def succeeds(root: nn.Module, call: Callable[[], object]) -> bool:
    """Whether ``call``, which runs the code of ``root``, raises nothing."""
    try:
        guarded("", root, call)
    except UnsupportedModel:
        return False
    return True


def _told(what: str, root: nn.Module, exc: Exception) -> Untraceable:
    module, kind, line = _place(exc, root)
    where = " ".join([*([f"module {module or 'itself'} ({kind})"] if kind else []), *([f"at {line}"] if line else [])])
    text = str(exc)
    if NO_GRADIENT in text:
        reason = "an operator between them has none, or the loss is of something else; use one that torch derives"
        return Untraceable(f"{what}: no gradient comes from the loss to what learns", reason)
    if isinstance(exc, ValueRead) or READS_A_VALUE.search(text):
        how = f", by {text}" if isinstance(exc, ValueRead) else ""
        return Untraceable(
            f"{what} cannot be traced: {where or 'it'} looks at the value of a tensor{how}, "
            "which would be that of the example batch for ever",
            KEEP_TENSORS,
            module,
            kind,
        )
    said = f"{type(exc).__name__}: {text}"
    if type(exc).__module__.startswith("torch"):
        return Untraceable(f"{what} cannot be traced{f', {where}' if where else ''} ({said})", TRACEABLE, module, kind)
    return Untraceable(f"{what} fails{f' in {where}' if where else ''} ({said})", "", module, kind)


def _place(exc: BaseException, root: nn.Module) -> tuple[str, str, str]:
    """(name, kind, the App's line) of the innermost module of ``root`` that an exception came through."""
    names = {layer: name for name, layer in root.named_modules()}
    module = kind = line = ""
    for frame, number in _frames(exc):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and own in names:
            # A layer that rounds is the App's own layer.
            module, kind = names[own], type(own).__name__.removeprefix("QuantAware")
        if not frame.f_code.co_filename.startswith(NOT_THE_APPS):
            line = f"{Path(frame.f_code.co_filename).name}:{number}"
    return module, kind, line


def _frames(exc: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames from the outermost to where it was raised at first."""
    if exc.__cause__ is not None:
        yield from _frames(exc.__cause__)
        return
    step = exc.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def own_line(exc: BaseException) -> str:
    """Return ``file:line`` of the innermost code of a user's that an exception came through; "" if there is none."""
    if isinstance(exc, SyntaxError) and exc.filename and not exc.filename.startswith(NOT_THE_APPS):
        return f"{exc.filename}:{exc.lineno}"
    line = fallback = ""
    for frame, number in _frames(exc):
        if not frame.f_code.co_filename.startswith(NOT_THE_APPS):
            place = f"{frame.f_code.co_filename}:{number}"
            # An App may itself be a module of fanin's: its line is told if there is no other.
            if str(frame.f_globals.get("__name__", "")).startswith("fanin."):
                fallback = place
            else:
                line = place
    return line or fallback


def first_line(exc: BaseException) -> str:
    """The beginning of what an exception says, or its type."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__

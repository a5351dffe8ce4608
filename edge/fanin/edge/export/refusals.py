"""What an export refuses: exceptions of code that cannot be traced, and the errors that they become.

The tracer runs the App's own code. A mode of the tracer raises an exception where that code does what no graph can. The
error that a user sees has the module, the line of the App and the remedy (``diagnosis``).
"""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from fanin.edge.runtimes.available import runtimes_of
from fanin.protos.errors import UnsupportedModel

REPLACE: Final = "replace that part of the model, or freeze it; fanin export --check names it"
"""The remedy for an operator that a format lacks, while the layer is unknown."""
KEEP_DRAWS: Final = (
    "draw in training only (if self.training, or F.dropout(x, p, self.training)), by dropout, torch.rand, randn or "
    "bernoulli, in each pass in the same order and of the same shapes"
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
FORM: Final = "form"
RUN: Final = "run"
INT8: Final = "int8"


class ValueRead(RuntimeError):
    """The module's code reads the value of a tensor that depends on the graph's inputs."""


class ChanceRead(RuntimeError):
    """The module's code branches on a random value."""


class ShapeRead(RuntimeError):
    """The module's code calls an operator whose result has a shape that depends on values of the graph's inputs."""


class MixedPrecision(RuntimeError):
    """The module's code computes in another dtype by ``torch.autocast``."""


class RandomDraw(RuntimeError):
    """The module's code draws random numbers that a graph cannot have as an input.

    Args:
        draw: The draw, and the expected one.
        advice: The remedy.
    """

    def __init__(self, draw: str, advice: str = KEEP_DRAWS) -> None:
        super().__init__(draw)
        self.advice = advice


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

    def __init__(self, reason: str, advice: str = "", place: Place = NOWHERE, *, code: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason, code=code)
        self.reason, self.advice, self.place = reason, advice, place


class NoGradient(Untraceable):
    """The loss has no gradient in the parameters: the code of the module or that of the loss has none."""


class NoForm(Untraceable):
    """A part that the runtimes of one graph format cannot express, without an operator to name."""


class WrongOutput(Untraceable):
    """The output of the module has another form than the loss needs."""


class FixedBatch(Untraceable):
    """The code treats the number of samples as a constant."""


class Unconverted(UnsupportedModel):
    """A graph that a format cannot express or run, because of an operator of one of its parts.

    Args:
        reason: The failure and its cause.
    """

    def __init__(self, reason: str, *, code: str = "") -> None:
        super().__init__(f"{reason}; {REPLACE}", code=code)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of the module that cannot be exported.

    Args:
        module: Name of the part in the App's module; "" is the module itself.
        kind: Class of that part; ``LOSS`` if the part is the loss of the App.
        graph_format: The format that lacks a form of it; "" if no graph can be traced at all.
        operator: The operator that has no form; "" if unknown.
        reason: The full error message.
        advice: The remedy; "" if the reason has it.
        call: The function that the forward of ``module`` calls between its layers; "" for a layer, or if unknown.
        line: ``file:line`` of the App's code that calls the operator or the layer; "" if unknown.
        step: The step of the export that fails: ``FORM`` if there is no graph, ``RUN`` if a runtime does not run the
            graph or does not compute what torch computes, ``INT8`` if int8 costs too much.
    """

    module: str
    kind: str
    graph_format: str
    operator: str
    reason: str
    advice: str
    call: str = ""
    line: str = ""
    step: str = FORM

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The runtimes that cannot run the part; empty if the problem does not depend on a runtime."""
        return runtimes_of(self.graph_format) if self.graph_format else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFailure:
    """The failure of an export in one format.

    Attributes:
        reason: The error message of the export, with the parts.
        code: Its code.
        findings: One or more parts that make it fail.
    """

    reason: str
    code: str
    findings: tuple[Finding, ...]


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


def first_line(exc: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__

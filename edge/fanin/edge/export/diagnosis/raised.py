"""The error for an exception of the App's code during a trace: the module, the line and the remedy.

The code may raise anything. The error names the type of that exception, the innermost module and the App's own line.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fanin.edge.export.diagnosis.lines import own_line, place_of
from fanin.edge.export.refusals import (
    ChanceRead,
    FixedBatch,
    MixedPrecision,
    NoGradient,
    RandomDraw,
    ShapeRead,
    Untraceable,
    ValueRead,
    first_line,
)
from fanin.protos.errors import UnsupportedModel

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
KEEP_LAYERS: Final = (
    "let no layer be skipped by chance: layerdrop=0.0 (in transformers also encoder_layerdrop and decoder_layerdrop of "
    "the config), or .eval() on the module that skips; or skip for each sample by a product: "
    "x + keep * (layer(x) - x), where keep is (torch.rand(x.shape[0], 1, 1) >= p).to(x.dtype) in training"
)
KEEP_SHAPES: Final = (
    "keep all positions and give the others no weight: torch.where(mask, x, 0.0) or x * mask instead of x[mask]; "
    "operators that count or select by value (nonzero, unique, masked_select, bincount) have no such form"
)
TRACEABLE: Final = (
    "avoid Python branches and loops that read tensor values, and operators whose result has no fixed shape"
)
KEPT: Final = "the graph would keep that of the example batch for every batch"
CLAUSES: Final[Mapping[type[Exception], tuple[str, str, str]]] = MappingProxyType(
    {
        ValueRead: (f"reads the value of a tensor, by {{}}; {KEPT}", KEEP_TENSORS, "FN-0769"),
        ChanceRead: (
            "branches on a random value, {}, and the graph would keep one branch for every step",
            KEEP_LAYERS,
            "FN-0771",
        ),
        ShapeRead: (
            "selects by {}, whose result has a shape that depends on values, expected one shape for every batch",
            KEEP_SHAPES,
            "FN-0770",
        ),
        MixedPrecision: (
            "computes in {} by torch.autocast, expected float32, in which devices compute",
            "remove torch.autocast from the forward",
            "FN-0772",
        ),
        RandomDraw: ("draws {}", "", "FN-0773"),
    }
)
"""What the code does, with a place for the text of the exception; the remedy (a draw has its own); the error code."""


def refusal(what: str, root: nn.Module, exc: Exception) -> Untraceable:
    """Return the error for an exception of a call that runs the App's code.

    Args:
        what: Prefix of the message.
        root: The outermost module of the call. The error names the innermost one.
        exc: The exception.
    """
    place = place_of(exc, root)
    where, text = str(place), str(exc)
    if NO_GRADIENT in text:
        advice = "an operator between them has none, or the loss does not depend on them; use operators with a gradient"
        return NoGradient(
            f"{what}: no gradient reaches the parameters that learn from the loss", advice, code="FN-0776"
        )
    clause, advice, code = CLAUSES.get(type(exc), ("", "", "FN-0769"))
    if not clause and READS_A_VALUE.search(text):
        clause, advice = f"reads the value of a tensor; {KEPT}", KEEP_TENSORS
    if clause:
        advice = exc.advice if isinstance(exc, RandomDraw) else advice
        return Untraceable(
            f"{what} cannot be traced: {where or 'its code'} {clause.format(text)}", advice, place, code=code
        )
    kind = FixedBatch if FIXED.search(text) else Untraceable
    if type(exc).__module__.startswith("torch"):
        # The further lines are hints for developers of torch.
        cause = f"{type(exc).__name__}: {first_line(exc)}"
        return kind(
            f"{what} cannot be traced{f', {where}' if where else ''} ({cause})", TRACEABLE, place, code="FN-0774"
        )
    preposition = " in" if place.kind else ""
    cause = f"{type(exc).__name__}: {text}"
    return kind(f"{what} fails{preposition}{f' {where}' if where else ''} ({cause})", "", place, code="FN-0775")


def refusal_of_form(what: str, exc: Exception) -> UnsupportedModel:
    """Return the error for an exception of an App's own decomposition."""
    line = Path(own_line(exc, of_fanin=False)).name
    where = f" at {line}" if line else ""
    is_read = isinstance(exc, ValueRead | ShapeRead) or READS_A_VALUE.search(str(exc)) is not None
    if isinstance(exc, DataDependentOutputException | DynamicOutputShapeException) or is_read:
        return UnsupportedModel(
            f"{what}: got a function that reads values of a tensor{where}, expected one of operators "
            "alone, because an export traces it once; use torch.where instead of a branch",
            code="FN-0792",
        )
    return UnsupportedModel(
        f"{what}: the function fails{where} ({type(exc).__name__}: {first_line(exc)}), expected a result for all "
        "arguments of the operator; correct it, or return NotImplemented to leave the operator as it is",
        code="FN-0792",
    )

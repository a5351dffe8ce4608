"""A prepared App for one of its lengths.

The export of an App with ``lengths`` is one export for each length. Each traces the same prepared module on the
calibration data cut to that length. So tracing, conversion and verification do not depend on lengths.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fanin.edge.export.module.prepare import Prepared
from fanin.edge.lengths import TARGETS
from fanin.edge.signatures import TRAIN
from fanin.protos.errors import UnsupportedModel


def at_length(prepared: Prepared, size: int) -> Prepared:
    """Return a prepared App for one of its lengths: the same module, and all of its data cut to that length."""
    app = prepared.app
    lengths = app.lengths
    assert lengths is not None, "the caller knows the lengths"

    def cut(name: str, value: Tensor) -> Tensor:
        axis = lengths.axes.get(name)
        return value if axis is None else value.narrow(axis, 0, size).contiguous()

    declared = app.declared_targets
    single = replace(
        app,
        lengths=None,
        validation=None,
        calibration={name: cut(name, value) for name, value in app.inputs.items()},
        targets=None if declared is None else cut(TARGETS, declared),
    )
    return replace(prepared, app=single, length=size)


def each_length(prepared: Prepared) -> Iterator[tuple[str, Prepared]]:
    """Yield the name of the train Signature and the App for each single length, the longest last."""
    lengths = prepared.app.lengths
    if lengths is None:
        yield TRAIN, prepared
        return
    for size in lengths.sizes:
        yield lengths.signature(TRAIN, size), at_length(prepared, size)


def check_targets(prepared: Prepared) -> None:
    """Raise UnsupportedModel if the targets of an App with lengths have the length, and the App does not say so."""
    lengths = prepared.app.lengths
    if lengths is None or TARGETS in lengths.axes or lengths.longest == 1:
        return
    # With a single length there are no graphs of another one to compare with.
    longest, shorter = (at_length(prepared, size).app.target_shape for size in (lengths.longest, lengths.longest - 1))
    if longest is not None and shorter is not None and longest != shorter:
        raise UnsupportedModel(
            f"{prepared.what}: lengths: got an output for each position, whose targets y have the length of the "
            f"inputs, but axes {dict(lengths.axes)}; add the axis of y, such as {TARGETS!r}: "
            f"{1 + next(dim for dim, size in enumerate(longest) if size != shorter[dim])}",
            code="FN-0741",
        )

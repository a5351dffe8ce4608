"""The first part of a module that returns NaN or infinity, for errors about values that are not finite.

Infinity within a module is no error: a mask of attention may use it. So the search runs only after a pass has failed.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export.diagnosis.watched import events_of
from fanin.edge.export.refusals import Place

KINDS: Final = {"NaN": torch.isnan, "infinity": torch.isinf}
"""Values that are not finite. NaN often follows from an earlier infinity, so the first place of each is reported."""

KEEP_FINITE: Final = (
    "keep the arguments of divisions, logarithms and roots away from 0 (x.clamp(min=1e-6)), and those of exponentials "
    "below 88"
)


def first_not_finite(module: nn.Module, call: Callable[[], object]) -> str:
    """Return which module returns NaN first in a call, and which infinity, with the App's lines; "" if none does.

    Args:
        module: The module that the call runs.
        call: A call that raises nothing.
    """
    places: dict[str, str] = {}
    with torch.no_grad():
        events = events_of(module, call)
    for event in events:
        floats = [value for value in event.returned if isinstance(value, Tensor) and value.is_floating_point()]
        for kind, is_of in KINDS.items():
            if kind not in places and any(bool(is_of(value).any()) for value in floats):
                place = event.place if event.place.kind else Place(kind=type(module).__name__, line=event.place.line)
                places[kind] = f"{place} returns {kind}"
    return ", then ".join(places.values())

"""The check that module and loss are a function of their batch, sample by sample, as a graph is.

Any other value that a forward uses during the trace becomes a constant of the graph: a draw of Python's ``random`` or
of numpy, a counter of calls or a clock. Torch's own draws are inputs of the graph (``module.draws``). A device pads
the last batch of its data, so a sample's output and loss must not depend on the other samples.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fanin.edge.export.refusals import NOWHERE, Untraceable

TOLERANCE: Final = 1e-3
"""Largest difference of two equal results, relative to their largest value: above other orders of additions."""
DRAW_WITH_TORCH: Final = (
    "draw with torch (nn.Dropout, torch.rand or torch.randn in training): each device then draws new numbers in each "
    "step; keep counters, clocks and files out of the forward and the loss"
)
ONE_BY_ONE: Final = (
    "compute it from that sample alone: the last batch of a device is padded, so a result over pairs of samples or "
    "over the whole batch would count samples that do not exist"
)


def check_repeats(what: str, module: nn.Module, call: Callable[[], object]) -> None:
    """Check that a second pass has the same result.

    Args:
        what: Prefix of the message.
        module: The module that the pass calls.
        call: A pass of the module and the loss. It repeats torch's draws.

    Raises:
        Untraceable: The second pass has another result. The message has the place of the first call whose results
            differ.
    """
    if _are_close(_leaves(call()), _leaves(call())):
        return
    from fanin.edge.export.diagnosis.watched import events_of, first_difference

    place = first_difference(events_of(module, call), events_of(module, call), _are_close)
    where = "its forward or its loss" if place == NOWHERE else str(place) if place.kind else f"its loss {place}"
    raise Untraceable(
        f"{what} cannot be exported: {where} returns two results for one batch, and the graph would keep the first "
        "values for every step",
        DRAW_WITH_TORCH,
        place,
    )


def check_samples(what: str, module: nn.Module, call: Callable[[slice], object], num: int) -> None:
    """Check that a sample's result does not depend on the other samples.

    Args:
        what: The name of the result, as the prefix of the message.
        module: The module that the call runs.
        call: Returns tensors (n, ...) for some rows of a batch, from these rows alone.
        num: Samples of the batch.

    Raises:
        Untraceable: The first half of the batch alone has other results. The message has the place of the first call
            whose results differ.
    """
    half, total = slice((num + 1) // 2), slice(num)

    def are_close(of_all: list[object], of_half: list[object]) -> bool:
        if len(of_all) != len(of_half):
            return False
        return _are_close([_first_rows(*pair, (num, half.stop)) for pair in zip(of_all, of_half, strict=True)], of_half)

    if not are_close(_leaves(call(total)), _leaves(call(half))):
        from fanin.edge.export.diagnosis.watched import events_of, first_difference

        of_all, of_half = (events_of(module, partial(call, rows)) for rows in (total, half))
        place = first_difference(of_all, of_half, are_close)
        where = "" if place == NOWHERE else f", first in {place}" if place.kind else f", first {place}"
        raise Untraceable(f"{what} depends on the other samples of its batch{where}", ONE_BY_ONE, place)


def _first_rows(of_all: object, of_half: object, nums: tuple[int, int]) -> object:
    """Return the values of a tensor for the first samples, if one dimension has all samples, or several for each.

    Args:
        of_all: The tensor of all samples.
        of_half: That of the first samples alone.
        nums: The number of all samples, and of the first ones.
    """
    if not isinstance(of_all, Tensor) or not isinstance(of_half, Tensor) or of_all.dim() != of_half.dim():
        return of_all
    pairs = zip(of_all.shape, of_half.shape, strict=True)
    dims = [dim for dim, (size, half) in enumerate(pairs) if size != half]
    if len(dims) != 1 or of_all.shape[dims[0]] * nums[1] != of_half.shape[dims[0]] * nums[0]:
        return of_all
    return of_all.narrow(dims[0], 0, of_half.shape[dims[0]])


def _leaves(output: object) -> list[object]:
    """Return the parts of a result. Tensors are copied, because another pass may write to them."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


def _are_close(one: list[object], two: list[object]) -> bool:
    return len(one) == len(two) and all(map(_is_close, one, two))


def _is_close(one: object, two: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    limit = TOLERANCE * float(torch.nan_to_num(one).abs().max())
    return torch.allclose(one, two, rtol=0.0, atol=limit, equal_nan=True)

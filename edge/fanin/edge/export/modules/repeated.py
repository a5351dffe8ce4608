"""The check that module and loss are a function of their batch, sample by sample, as a graph is.

Any other value that a forward uses during the trace becomes a constant of the graph: a draw of Python's ``random`` or
of numpy, a counter of calls or a clock. Torch's own draws are inputs of the graph (``modules.draws``). A device pads
the last batch of its data, so a sample's output and loss must not depend on the other samples.
"""

import random
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fanin.edge.export.refusals import Untraceable

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

Call = tuple[nn.Module, list[object], list[object]]
"""A module, its inputs and its outputs."""


def check_repeats(what: str, module: nn.Module, call: Callable[[], object]) -> None:
    """Check that a pass uses only its inputs, the parameters and torch's draws.

    Args:
        what: Prefix of the message.
        module: The module that the pass calls, to name the layer.
        call: A pass of the module and the loss. It repeats torch's draws.

    Raises:
        Untraceable: The pass changes the state of Python's or numpy's generator, or a second pass has another result.
            The message names the innermost module where the two differ.
    """
    before = _generators()
    first = _leaves(call())
    drawn = " and ".join(name for name, state in _generators().items() if state != before[name])
    if not drawn and _are_close(first, _leaves(call())):
        return
    cause = f"draws from {drawn}" if drawn else "returns two results for one batch"
    raise Untraceable(
        f"{what} cannot be exported: {_first_difference(module, call)} {cause}, and the graph would keep the first "
        "values for every step",
        DRAW_WITH_TORCH,
    )


def check_samples(what: str, call: Callable[[slice], object], num: int) -> None:
    """Check that a sample's result does not depend on the other samples.

    Args:
        what: The name of the result, as the prefix of the message.
        call: Returns tensors (n, ...) for some rows of a batch, from these rows alone.
        num: Samples of the batch.

    Raises:
        Untraceable: The first half of the batch alone has other results.
    """
    half = slice((num + 1) // 2)
    expected = [
        leaf[half] if isinstance(leaf, Tensor) and len(leaf) == num else leaf for leaf in _leaves(call(slice(num)))
    ]
    if not _are_close(expected, _leaves(call(half))):
        raise Untraceable(f"{what} depends on the other samples of its batch", ONE_BY_ONE)


def _generators() -> dict[str, str]:
    return {"Python's random": repr(random.getstate()), "numpy.random": repr(_numpy_state())}


def _numpy_state() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, np.asarray(keys).tobytes(), *rest)


def _first_difference(module: nn.Module, call: Callable[[], object]) -> str:
    """Return the first module that makes two passes differ: its output differs, and its input does not."""
    names = {layer: name for name, layer in module.named_modules()}
    passes: list[list[Call]] = []
    for _ in range(2):
        calls: list[Call] = []
        hooks = [layer.register_forward_hook(_recorder(calls), with_kwargs=True) for layer in names]
        passes.append(calls)
        try:
            call()
        finally:
            for hook in hooks:
                hook.remove()
    for (layer, received, returned), (_, *other) in zip(*passes, strict=False):
        if not _are_close(received, other[0]):
            # The caller of the layer differs. Modules end before those that contain them, so it has not ended yet.
            owner = names[layer].rpartition(".")[0]
            return f"module {owner or 'itself'} ({type(module.get_submodule(owner)).__name__})"
        if not _are_close(returned, other[1]):
            return f"module {names[layer] or 'itself'} ({type(layer).__name__})"
    return "its forward or its loss"


def _recorder(calls: list[Call]) -> Callable[..., None]:
    return lambda layer, args, kwargs, output: calls.append((layer, _leaves((args, kwargs)), _leaves(output)))


def _leaves(output: object) -> list[object]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


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

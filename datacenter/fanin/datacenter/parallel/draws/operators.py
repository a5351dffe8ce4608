"""Torch's random operators, computed from given values, also on DTensors.

The operators and their forms are those of ``edge.export.modules.draws``. Here the values are on the device of the
operator, and of a DTensor only the local shard is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fanin.edge.export.module.draws import Draws
from fanin.edge.export.refusals import RandomDraw
from fanin.edge.runtimes.randomness import RandomKind

Values = Callable[[RandomKind, tuple[int, ...], torch.device], Tensor]
"""Returns the float32 values of a draw of this kind and local shape."""
CHANCES: Final = ("dropout_p", "dropout")
"""The names of the argument by which a fused attention or recurrent layer drops values."""


class LocalDraws(Draws):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """While active, each random operator takes its values from ``values``.

    Raises:
        RandomDraw: A random operator has no form over uniform or normal values.
    """

    def __init__(self, values: Values) -> None:
        super().__init__(lambda kind, shape: values(kind, shape, self._device))
        self._device = torch.device("cpu")

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute a random operator from given values, and call any other one."""
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _drops_nothing(func, args, named):
            return func(*args, **named)
        if named.get("generator") is not None:
            raise RandomDraw(f"{func.overloadpacket} with a generator of its own, expected torch's default generator")
        tensors = [value for value in tree_leaves((args, named)) if isinstance(value, Tensor)]
        # A factory without a tensor, such as torch.rand, names its device.
        device = tensors[0].device if tensors else named.get("device") or torch.get_default_device()
        self._device = torch.device(cast("torch.device", device))
        spread = next((value for value in tensors if isinstance(value, DTensor)), None)
        if spread is None:
            return super().__torch_dispatch__(func, types, args, named)
        local_args, local_named = tree_map_only(DTensor, lambda value: value._local_tensor, (args, named))
        result = super().__torch_dispatch__(func, types, local_args, local_named)
        if func._schema.is_mutable:
            return spread
        return tree_map_only(
            Tensor,
            lambda value: DTensor.from_local(value, spread.device_mesh, spread.placements, run_check=False),
            result,
        )


def _drops_nothing(func: OpOverload, args: Sequence[object], named: Mapping[str, object]) -> bool:
    """Return whether a fused operator is called with a chance of 0."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in CHANCES:
            chance = args[index] if index < len(args) else named.get(argument.name, argument.default_value)
            return chance == 0.0
    return False

"""Tensor parallelism: each layer's matrices split over the ranks of ``tp``, by a plan of module names.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): columns, then rows, one sum forward and one backward for attention
and for feed-forward each. Every parameter becomes a DTensor on one mesh, also those that every rank has whole: clipping
and optimizers refuse a mixture. All ranks begin with the same values, so nothing is sent to split them.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fanin.datacenter.parallel.layout import Layout, Style
from fanin.datacenter.parallel.pipeline import Skip


class Whole(ParallelStyle):
    """Every rank has the module whole; what goes in and comes out are plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def plain(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            return output.to_local() if isinstance(output, DTensor) else output

        _make_whole(module, device_mesh)
        module.register_forward_hook(plain)
        return module


class FewHeads(ParallelStyle):
    """A projection to fewer key and value heads than ranks: computed whole, of which each rank takes its head.

    A head that several ranks take gets from each a part of its gradient, so the parameters' gradients come out as
    sums still to be made (``Partial``); ``gradients.settle`` makes them.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mine = device_mesh.get_local_rank() * self.num_heads // device_mesh.size()

        def taken(module: nn.Module, inputs: object, output: DTensor) -> Tensor:
            return output.to_local(grad_placements=[Partial()]).chunk(self.num_heads, dim=-1)[mine]

        _make_whole(module, device_mesh)
        module.register_forward_hook(taken)
        return module


class Shared(ParallelStyle):
    """The first tensor that a module is given, by place or by name, becomes one whole DTensor for all within it.

    Its gradient is then summed over the ranks once, not once for each of the matrices that it is multiplied with.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shared(
            module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if inputs:
                return (_whole(inputs[0], device_mesh), *inputs[1:]), named
            first = next(iter(named))
            return inputs, named | {first: _whole(named[first], device_mesh)}

        module.register_forward_pre_hook(shared, with_kwargs=True)
        return module


def _whole(value: object, mesh: DeviceMesh) -> object:
    """A plain tensor that every rank has whole, as a DTensor; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def _make_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own parameters, and the tensors that it is given, DTensors that every rank has whole."""

    def whole(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(_whole(value, mesh) for value in inputs)

    for key, value in module.named_parameters(recurse=False):
        spread = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(spread, requires_grad=value.requires_grad))
    module.register_forward_pre_hook(whole)


def arrived(module: nn.Module, inputs: object, output: object) -> object:
    """A forward hook: a tensor that may still be on its way from other ranks, once it is here.

    To one that is not, the backward pass of a layer that torch 2.13 compiled gives a plain tensor instead of a DTensor.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def style_of(style: Style, num_kv_heads: int, num_ranks: int) -> ParallelStyle:
    """torch's style, or ours, for a word of the plan."""
    match style:
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(input_layouts=Shard(-1))
        case "kv":
            return ColwiseParallel() if num_kv_heads % num_ranks == 0 else FewHeads(num_kv_heads)
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate())
        case "logits":
            return ColwiseParallel(output_layouts=Replicate())
        case "shared":
            return Shared()
        case "whole":
            return Whole()


def matching(name: str, plan: Mapping[str, Style]) -> Style | None:
    """What the plan says of a module; the first pattern that fits counts, piece by piece between the dots."""
    pieces = name.split(".")
    for pattern, style in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(pieces) and all(map(fnmatchcase, pieces, wanted)):
            return style
    return None


def apply_tensor_parallel(part: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Split a part in place over the one axis of ``mesh``. Tied weights come apart here and are tied again after."""
    styles: dict[str, ParallelStyle] = {}
    for name, module in part.named_modules():
        style = None if isinstance(module, Skip) else matching(name, layout.plan)
        if style is None and next(module.parameters(recurse=False), None) is not None:
            style = "whole"
        if style is not None:
            styles[name] = style_of(style, layout.sizes.num_kv_heads, mesh.size())
    parallelize_module(part, mesh, styles, src_data_rank=None)

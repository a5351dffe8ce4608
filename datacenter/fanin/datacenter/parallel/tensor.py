"""Tensor parallelism: each layer's matrices split over the ranks of ``tp``, by a plan of module names.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): columns, then rows, one sum forward and one backward for attention
and for feed-forward each. Every parameter becomes a DTensor on one mesh, also those that every rank has whole: clipping
and optimizers refuse a mixture. All ranks begin with the same values, so nothing is sent to split them.

What stands between the matrices (norms, residuals, dropout) every rank has whole; with sequence parallelism each has
its part of the places (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): matrices then gather the sequence
where they took it whole, and scatter the sums that they all-reduced; a ring sends as much. It is one placement,
``stream``.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fanin.datacenter.parallel.layout import Layout, Style
from fanin.datacenter.parallel.pipelines.pipeline import Skip
from fanin.protos.errors import InvalidInput

SEQUENCE_DIM: Final = 1
"""Of what layers hand on, (B, T, width)."""


class Whole(ParallelStyle):
    """Every rank has the module whole; what goes in and comes out are plain tensors, of ``stream``'s placement.

    Of parts of a sequence the parameters' gradients come out as ``Partial``. torch's own SequenceParallel does the same
    for a norm, but makes frozen parameters train.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def plain(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            return output.to_local() if isinstance(output, DTensor) else output

        _make_whole(module, device_mesh, self.stream)
        module.register_forward_hook(plain)
        return module


class Taken(ParallelStyle):
    """Computed whole, of which each rank takes one of some pieces: the head it needs, or its part of the places.

    From each rank comes a part of the gradient, so the parameters' gradients come out as sums still to be made
    (``Partial``); ``gradients.settle`` makes them.
    """

    def __init__(self, num_pieces: int, dim: int) -> None:
        super().__init__()
        self.num_pieces = num_pieces
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mine = device_mesh.get_local_rank() * self.num_pieces // device_mesh.size()

        def taken(module: nn.Module, inputs: object, output: DTensor) -> Tensor:
            return output.to_local(grad_placements=[Partial()]).chunk(self.num_pieces, dim=self.dim)[mine]

        _make_whole(module, device_mesh, Replicate())
        module.register_forward_hook(taken)
        return module


class Shared(ParallelStyle):
    """The first tensor that a module is given, by place or by name, becomes one whole DTensor for all within it.

    Its gradient is then summed over the ranks once, not once for each of the matrices that it is multiplied with.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(value: object) -> object:
            found = _spread(value, device_mesh, self.stream)
            return found.redistribute(placements=[Replicate()]) if isinstance(found, DTensor) else found

        def shared(
            module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if inputs:
                return (whole(inputs[0]), *inputs[1:]), named
            first = next(iter(named))
            return inputs, named | {first: whole(named[first])}

        module.register_forward_pre_hook(shared, with_kwargs=True)
        return module


def _spread(value: object, mesh: DeviceMesh, placement: Placement) -> object:
    """A plain tensor that ranks have so, as a DTensor; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [placement], run_check=False)


def _make_whole(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Make a module's own parameters DTensors that every rank has whole, and the tensors that it is given ones too."""

    def given(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(_spread(value, mesh, stream) for value in inputs)

    for key, value in module.named_parameters(recurse=False):
        spread = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(spread, requires_grad=value.requires_grad))
    module.register_forward_pre_hook(given)


def arrived(module: nn.Module, inputs: object, output: object) -> object:
    """A forward hook: a tensor that may still be on its way from other ranks, once it is here.

    To one that is not, the backward pass of a layer that torch 2.13 compiled gives a plain tensor instead of a DTensor.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def style_of(style: Style, num_kv_heads: int, num_ranks: int, stream: Placement) -> ParallelStyle:
    """torch's style, or ours, for a word of the plan; ``stream``: how ranks have what stands between the matrices."""
    match style:
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(input_layouts=Shard(-1), output_layouts=stream)
        case "kv":
            return ColwiseParallel() if num_kv_heads % num_ranks == 0 else Taken(num_kv_heads, dim=-1)
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        case "places":
            return Whole(stream) if stream.is_replicate() else Taken(num_ranks, dim=-2)
        case "logits":
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
        case "shared":
            return Shared(stream)
        case "whole":
            return Whole(stream)


def matching(name: str, plan: Mapping[str, Style]) -> Style | None:
    """What the plan says of a module; the first pattern that fits counts, piece by piece between the dots."""
    pieces = name.split(".")
    for pattern, style in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(pieces) and all(map(fnmatchcase, pieces, wanted)):
            return style
    return None


def apply_tensor_parallel(part: nn.Module, layout: Layout, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split a part in place over the one axis of ``mesh``, and with ``sequence`` what stands between its matrices too.

    Tied weights come apart here and are tied again after.
    """
    stream: Placement = Shard(SEQUENCE_DIM) if sequence else Replicate()
    outside: tuple[str, ...] = layout.inputs if layout.sequence == "layers" else ()
    styles: dict[str, ParallelStyle] = {}
    for name, module in part.named_modules():
        style = None if isinstance(module, Skip) else matching(name, layout.plan)
        if style is None and next(module.parameters(recurse=False), None) is not None:
            style = "whole"
            if next(module.buffers(recurse=False), None) is not None:
                raise InvalidInput(
                    f"tp: got {name}, a {type(module).__name__}, expected no module that keeps values beside its "
                    "parameters: torch 2.13 does not compute it over ranks of tp; take tp=1, or a GroupNorm"
                )
        if style is not None:
            around = any(f"{name}.".startswith(f"{each}.") for each in outside)
            styles[name] = style_of(style, layout.sizes.num_kv_heads, mesh.size(), Replicate() if around else stream)
    parallelize_module(part, mesh, styles, src_data_rank=None)
    if sequence and layout.sequence == "layers":
        _split_between(part, layout, mesh)


def _split_between(part: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Have a stage's first layer take this rank's places of what it is given, and its last hand on all of them again.

    The model's outputs, where they follow, gather the places themselves.
    """
    part_of_it = Shard(SEQUENCE_DIM)

    def taken(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return _between(inputs[0], mesh, Replicate(), part_of_it), *inputs[1:]

    def put_together(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return _between(output, mesh, part_of_it, Replicate())

    layers = [each for each in part.get_submodule(layout.layers).children() if not isinstance(each, Skip)]
    layers[0].register_forward_pre_hook(taken)
    if all(isinstance(part.get_submodule(name), Skip) for name in layout.outputs):
        layers[-1].register_forward_hook(put_together)


def _between(value: Tensor, mesh: DeviceMesh, old: Placement, new: Placement) -> Tensor:
    spread = DTensor.from_local(value, mesh, [old], run_check=False)
    return spread.redistribute(placements=[new]).to_local()

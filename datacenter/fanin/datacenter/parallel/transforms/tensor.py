"""Tensor parallelism: splits the matrices of each layer over the ranks of ``tp``, by a plan of module names.

The first matrix of attention and of feed-forward is split by columns and the second by rows. Each then needs one sum in
the forward pass and one in the backward pass. Every parameter becomes a DTensor on one mesh, also replicated ones,
because clipping and optimizers reject a mixture. All ranks start with the same values, so splitting them sends nothing.

Every rank has the full activations between the matrices (norms, residuals, dropout). With sequence parallelism each
rank has its part of the positions instead. Matrices then gather the sequence, and scatter the sums that they would
all-reduce; a ring sends as many bytes. The placement of these activations is called ``stream`` here.

Reference:
    Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3.
    Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2, for sequence parallelism.
"""

from collections.abc import Mapping
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

from fanin.datacenter.parallel.layout import Layout, Style, patterns_of
from fanin.datacenter.parallel.pipelines.stages import Skip
from fanin.protos.errors import InvalidInput

SPLIT_KINDS: Final[Mapping[Style, type[nn.Module]]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "kv": nn.Linear,
    "logits": nn.Linear,
    "vocabulary": nn.Embedding,
}
"""The kind of module that a style can split. Other styles apply to any module."""
SEQUENCE_DIM: Final = 1
"""The dimension of the positions in the activations between layers, (B, T, width)."""


class ReplicatedModule(ParallelStyle):
    """A complete module on every rank. Its inputs and outputs are plain tensors with the placement ``stream``.

    If a rank has only its part of a sequence, the gradients of the parameters are ``Partial``. torch's SequenceParallel
    does the same for a norm, but makes frozen parameters trainable.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_local(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            return output.to_local() if isinstance(output, DTensor) else output

        _replicate(module, device_mesh, self.stream)
        module.register_forward_hook(to_local)
        return module


class SelectedChunk(ParallelStyle):
    """A module that every rank computes completely. Each rank then uses one chunk of its output.

    The chunk is the key or value head that the rank needs, or its part of the positions. Each rank contributes a part
    of the gradient, so the gradients of the parameters are ``Partial``; ``gradients.settle`` sums them.
    """

    def __init__(self, num_chunks: int, dim: int) -> None:
        super().__init__()
        self.num_chunks = num_chunks
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_chunk = device_mesh.get_local_rank() * self.num_chunks // device_mesh.size()

        def select(module: nn.Module, inputs: object, output: DTensor) -> Tensor:
            return output.to_local(grad_placements=[Partial()]).chunk(self.num_chunks, dim=self.dim)[own_chunk]

        _replicate(module, device_mesh, Replicate())
        module.register_forward_hook(select)
        return module


class GatheredInput(ParallelStyle):
    """A module whose first argument, positional or named, is gathered into one full DTensor for all of its matrices.

    The gradient of the argument is then summed over the ranks once, instead of once for each matrix.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(value: object) -> object:
            tensor = _to_dtensor(value, device_mesh, self.stream)
            return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor

        def gather_first(
            module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if inputs:
                return (gathered(inputs[0]), *inputs[1:]), named
            first = next(iter(named))
            return inputs, named | {first: gathered(named[first])}

        module.register_forward_pre_hook(gather_first, with_kwargs=True)
        return module


def _to_dtensor(value: object, mesh: DeviceMesh, placement: Placement) -> object:
    """Wrap a plain tensor with this placement in a DTensor. Return any other value unchanged."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [placement], run_check=False)


def _replicate(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Convert a module's own parameters to replicated DTensors, and its plain inputs to DTensors."""

    def wrap_inputs(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(_to_dtensor(value, mesh, stream) for value in inputs)

    for key, value in module.named_parameters(recurse=False):
        replica = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(replica, requires_grad=value.requires_grad))
    module.register_forward_pre_hook(wrap_inputs)


def wait_for_output(module: nn.Module, inputs: object, output: object) -> object:
    """Forward hook: return the output of a module after its collective has finished.

    For an output whose collective is still running, the backward pass of a layer compiled by torch 2.13 returns a plain
    tensor instead of a DTensor.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def torch_style(
    style: Style, num_kv_heads: int, num_ranks: int, stream: Placement, *, gather: bool = True
) -> ParallelStyle:
    """Return the ParallelStyle for a style of the plan.

    Args:
        style: the style of a module in ``Layout.plan``.
        num_kv_heads: key and value heads of the model.
        num_ranks: ranks of tp.
        stream: placement of the activations between the matrices.
        gather: whether logits are gathered.
    """
    match style:
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(input_layouts=Shard(-1), output_layouts=stream)
        case "kv":
            return ColwiseParallel() if num_kv_heads % num_ranks == 0 else SelectedChunk(num_kv_heads, dim=-1)
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        case "places":
            return ReplicatedModule(stream) if stream.is_replicate() else SelectedChunk(num_ranks, dim=-2)
        case "logits":
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate() if gather else Shard(-1))
        case "shared":
            return GatheredInput(stream)
        case "whole":
            return ReplicatedModule(stream)


def style_of_module(name: str, plan: Mapping[str, Style]) -> Style | None:
    """Return the style of a module in a plan, or None if no pattern matches its name."""
    patterns = patterns_of(name, plan)
    return plan[patterns[0]] if patterns else None


def head_of(layout: Layout) -> str | None:
    """Return the name of the module whose split outputs are the logits of the model, or None if it has no such one."""
    names = [name for name in layout.outputs[-1:] if style_of_module(name, layout.plan) == "logits"]
    return names[0] if names and list(layout.plan.values()).count("logits") == 1 else None


def apply_tensor_parallel(part: nn.Module, layout: Layout, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split a part of the model in place over the ranks of ``mesh``. Tied weights are separated.

    Args:
        part: a stage, or the complete model.
        layout: the splitting plan.
        mesh: the ranks of tp, a mesh of one axis.
        sequence: whether the activations between the matrices are also split along the sequence.

    Raises:
        InvalidInput: a module with parameters has buffers, such as a BatchNorm, or its style is for another kind.
    """
    stream: Placement = Shard(SEQUENCE_DIM) if sequence else Replicate()
    outside: tuple[str, ...] = layout.inputs if layout.sequence == "layers" else ()
    styles: dict[str, ParallelStyle] = {}
    for name, module in part.named_modules():
        style = None if isinstance(module, Skip) else style_of_module(name, layout.plan)
        if style is None and next(module.parameters(recurse=False), None) is not None:
            style = "whole"
            if next(module.buffers(recurse=False), None) is not None:
                raise InvalidInput(
                    f"tp: got {name}, a {type(module).__name__}, expected no module that has buffers in addition "
                    "to parameters: torch 2.13 cannot compute it over ranks of tp; use tp=1, or a GroupNorm",
                    code="FN-1289",
                )
        if style is not None:
            _check_kind(name, module, style)
            is_outside = any(f"{name}.".startswith(f"{each}.") for each in outside)
            styles[name] = torch_style(
                style,
                layout.sizes.num_kv_heads,
                mesh.size(),
                Replicate() if is_outside else stream,
                gather=layout.gathers_logits,
            )
    parallelize_module(part, mesh, styles, src_data_rank=None)
    if sequence and layout.sequence == "layers":
        _split_layer_stream(part, layout, mesh)


def check_widths(module: nn.Module, layout: Layout, num_ranks: int) -> None:
    """Check that tp gives each rank as many outputs of a column or kv layer, or inputs of a row layer, as any other.

    Args:
        module: the complete model.
        layout: the splitting plan.
        num_ranks: ranks of tp.

    Raises:
        InvalidInput: the size of a layer is no multiple of ``num_ranks``. The message names its weight.
    """
    for name, part in module.named_modules():
        style = style_of_module(name, layout.plan)
        # With fewer heads than ranks, no rank has a shard of a key or value layer.
        split = ("column", "row", "kv") if layout.sizes.num_kv_heads % num_ranks == 0 else ("column", "row")
        if not isinstance(part, nn.Linear) or style not in split:
            continue
        what, size = ("inputs", part.in_features) if style == "row" else ("outputs", part.out_features)
        if size % num_ranks:
            raise InvalidInput(
                f"tp: got {name}.weight of {list(part.weight.shape)}, whose {size} {what} the style {style!r} splits, "
                f"and tp {num_ranks}, expected a multiple of tp; build the module with another size, choose a tp that "
                f"divides {size}, or remove the styles of this block from the plan",
                code="FN-1290",
            )


def _check_kind(name: str, module: nn.Module, style: Style) -> None:
    kind = SPLIT_KINDS.get(style, nn.Module)
    if not isinstance(module, kind):
        raise InvalidInput(
            f"layout: got the style {style!r} for {name}, a {type(module).__name__}, expected a {kind.__name__}: torch "
            "splits no other module in this way; use another style, or leave the module out of the plan",
            code="FN-1289",
        )


def _split_layer_stream(part: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Split the activations between the layers of a stage along the sequence.

    The first layer selects this rank's positions of its input, and the last layer gathers all positions. If the model's
    outputs are in the same stage, they gather the positions themselves.
    """
    shard = Shard(SEQUENCE_DIM)

    def select_positions(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return _redistribute(inputs[0], mesh, Replicate(), shard), *inputs[1:]

    def gather_positions(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return _redistribute(output, mesh, shard, Replicate())

    layers = [each for each in part.get_submodule(layout.layers).children() if not isinstance(each, Skip)]
    layers[0].register_forward_pre_hook(select_positions)
    if all(isinstance(part.get_submodule(name), Skip) for name in layout.outputs):
        layers[-1].register_forward_hook(gather_positions)


def _redistribute(value: Tensor, mesh: DeviceMesh, old: Placement, new: Placement) -> Tensor:
    tensor = DTensor.from_local(value, mesh, [old], run_check=False)
    return tensor.redistribute(placements=[new]).to_local()

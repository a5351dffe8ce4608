"""Puts a model on its ranks. The order is the rule of this room; each line stands on the one before:

1. freeze           before anything asks which parameters train
2. split            a pipeline's stages, by names
3. tensor parallel  every parameter becomes a DTensor
4. tie              what step 3 took apart
5. recompute        inside of what follows, so that hooks run once
6. compile          a layer each, what it computes again included
7. data parallel    over the parameters as steps 3 and 4 left them
8. optimizer        over the parameters as step 7 left them
9. stages, schedule around all of it
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from torch.optim import Optimizer

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.mesh import PIPELINE, TENSOR
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.datacenter.parallel.pipelines.pipeline import Skip, Stage, hand_on, owners, split
from fanin.datacenter.parallel.pipelines.shapes import keep_buffers
from fanin.datacenter.parallel.recompute import apply_recompute
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings, check_job
from fanin.datacenter.parallel.shard import HALF, apply_data_parallel
from fanin.datacenter.parallel.steps.optimizer import build_optimizer
from fanin.datacenter.parallel.tensor import apply_tensor_parallel, arrived
from fanin.datacenter.parallel.ties import Tie, check_shared, check_still_shared, retie, shared_names, tie_of
from fanin.protos.errors import InvalidInput

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A module with all its parameters, the same on every rank, what its parts are called, and its objective."""

    module: nn.Module
    layout: Layout
    objective: Objective = TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One whole parameter: the stage that has it, its shape and its dtype."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model on one rank.

    ``parts``: the rank's stages by their number, or the whole model as stage 0. ``runners``: what a step calls, the
    parts or what is around them. ``table``: the whole model's parameters by name, in its order.
    """

    objective: Objective
    parallel: ParallelSettings
    training: TrainingSettings
    mesh: DeviceMesh | None
    device: torch.device
    parts: dict[int, nn.Module]
    runners: dict[int, nn.Module]
    optimizers: tuple[Optimizer, ...]
    schedule: Schedule | None
    tie: Tie | None
    table: dict[str, Entry]


def build(
    model: Model,
    parallel: ParallelSettings,
    training: TrainingSettings,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> Built:
    """Put a model on this rank; ``mesh`` None is one process by itself. Raises InvalidInput.

    The module's own parameters move into the parts: it is of no use afterwards, and of a pipeline holds no values.
    """
    layout = model.layout
    check_job(layout, parallel, training, 1 if mesh is None else mesh.size())
    if parallel.offload and mesh is None:
        raise InvalidInput("parallel: got offload and no mesh, expected one, of one rank: FSDP2 knows of ranks alone")
    apply_freeze(model.module, training.freeze)
    table, shared = parameter_table(model, parallel), shared_names(model.module)
    stages = _stages(model, parallel, mesh)
    runners = {stage.index: _spread(stage, layout, parallel, mesh, device) for stage in stages}
    parts = {stage.index: stage.part for stage in stages}
    for part in parts.values():
        check_still_shared(part, shared)
    optimizers = [build_optimizer(part, training) for part in parts.values()]
    schedule, tie = None, None
    if parallel.pipelined and mesh is not None:
        schedule = build_schedule(runners, model.objective, parallel, mesh, device)
        tie = None if layout.tied is None else tie_of(parts, layout.tied, parallel.pipeline(), mesh)
    return Built(
        objective=model.objective,
        parallel=parallel,
        training=training,
        mesh=mesh,
        device=device,
        parts=parts,
        runners=runners,
        optimizers=tuple(each for each in optimizers if each is not None),
        schedule=schedule,
        tie=tie,
        table=table,
    )


def parameter_table(model: Model, parallel: ParallelSettings) -> dict[str, Entry]:
    """All parameters of a model that is still whole, in its order.

    Raises InvalidInput if a cut would leave some out, and UnsupportedModel if the mesh would untie shared ones.
    """
    num_stages = parallel.pipeline().num_stages if parallel.pipelined else 1
    stage_of = owners(model.module, model.layout, num_stages, parallel.times, every_name=True)
    check_shared(model.module, model.layout, parallel.mesh, stage_of)
    return {
        name: Entry(stage=stage_of[name], shape=value.shape, dtype=value.dtype)
        for name, value in model.module.named_parameters()
    }


def apply_freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Keep the parameters whose names fit a pattern as they are.

    Raises InvalidInput if one fits none, or if nothing is left to train.
    """
    for pattern in patterns:
        found = [value for name, value in module.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            raise InvalidInput(f"freeze: no parameter's name fits {pattern!r}")
        for value in found:
            value.requires_grad_(False)
    if not any(value.requires_grad for value in module.parameters()):
        raise InvalidInput(
            f"freeze: nothing is left to train (patterns {list(patterns)}), expected at least one parameter"
        )


def _stages(model: Model, parallel: ParallelSettings, mesh: DeviceMesh | None) -> list[Stage]:
    if not parallel.pipelined or mesh is None:
        return [Stage(index=0, part=model.module)]
    rank = mesh.get_local_rank(PIPELINE)
    stages = split(model.module, model.layout, parallel.pipeline(), rank, parallel.times)
    # Else whoever holds the model holds the values of all stages to the job's end.
    model.module.to("meta")
    return stages


def _spread(
    stage: Stage, layout: Layout, parallel: ParallelSettings, mesh: DeviceMesh | None, device: torch.device
) -> nn.Module:
    """Steps 3 to 7 on one stage; what a step calls."""
    part = stage.part
    if mesh is not None and parallel.mesh.tp > 1:
        apply_tensor_parallel(part, layout, mesh[TENSOR], sequence=parallel.sequence_parallel)
    if mesh is None or not parallel.sharded:
        # After the split, and not where FSDP2 is to come: a device may have no room for the whole of a stage. What
        # splits moves a parameter or a layer at a time by itself.
        part.to(device)
    if layout.tied is not None:
        retie(part, layout.tied)
    layers = list(dict.fromkeys(layers_of(part.get_submodule(layout.layers))))
    apply_recompute(layers, parallel.recompute)
    if parallel.compile:
        for name in layout.inputs:
            part.get_submodule(name).register_forward_hook(arrived)
        for layer in layers:
            layer.compile()
    half = HALF.get(parallel.precision)
    if half is not None and not parallel.sharded:
        # FSDP2 has a policy of its own for it.
        part.forward = torch.autocast(device.type, half)(part.forward)
    return part if mesh is None else apply_data_parallel(part, layers, mesh, parallel)


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module is a row of; what only holds others, as a list does, stands for those.

    Nobody calls it: what is put around its forward would never run.
    """
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from layers_of(child)
        elif not isinstance(child, Skip):
            yield child


def divided_loss(objective: Objective) -> Callable[[Tensor, Tensor, float, list[Tensor] | None], Tensor]:
    """An objective as a pipeline's last stage calls it. ``scores``: for those of an evaluation, else None."""

    def loss(outputs: Tensor, targets: Tensor, divisor: float, scores: list[Tensor] | None) -> Tensor:
        if scores is not None and objective.observer is not None:
            scores.append(objective.observer.score(outputs, targets))
        return objective.loss_sum(outputs, targets) / divisor

    return loss


def build_schedule(
    runners: dict[int, nn.Module],
    objective: Objective,
    parallel: ParallelSettings,
    mesh: DeviceMesh,
    device: torch.device,
) -> Schedule:
    """Step 9: a rank's runners, by number of their stage, as stages of a pipeline."""
    pipeline = parallel.pipeline()
    if pipeline.rules.splits_backward:
        for index, runner in runners.items():
            if index < pipeline.num_stages - 1:
                runner.register_forward_hook(hand_on)
    stages = [
        PipelineStage(runner, index, pipeline.num_stages, device, group=mesh.get_group(PIPELINE))
        for index, runner in runners.items()
    ]
    for stage in stages:
        # Its methods are replaced for this one object, which types do not foresee.
        keep_buffers(stage)  # type: ignore[arg-type]
    kind = get_schedule_class(pipeline.rules.torch_name)
    held = stages[0] if pipeline.rules.single else stages
    # The loss was divided already; torch would divide once more, by the microbatches.
    schedule: Schedule = kind(held, pipeline.microbatches, loss_fn=divided_loss(objective), scale_grads=False)
    return schedule

"""Puts a model on this rank. The order of the steps is the rule of this room; each step relies on those before it:

1. freeze           before anything reads which parameters train
2. split            cuts a pipeline's stages by module names
3. draws            inside of the modules that draw random numbers, so that all of the following steps repeat them
4. tensor parallel  turns every parameter into a DTensor
5. tie              shares the weights again that step 4 separated
6. recompute        inside the hooks of the following steps, so that these run once
7. compile          one layer each, its recomputation included
8. data parallel    over the parameters as steps 4 and 5 left them
9. optimizer        over the parameters as step 8 left them
10. schedule        around all of it

A model in ``double`` precision is converted to float64 before the first step.

Parameters may be on the meta device. They are then allocated as late as possible: before DistributedDataParallel in
step 8, or after FSDP2 has split them. Their values are uninitialized, so load them before the first step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from torch.optim import SGD, AdamW, Optimizer

from fanin.datacenter.parallel.checks import check_job
from fanin.datacenter.parallel.draws.sites import LOSS, NO_DRAWS, ModelDraws
from fanin.datacenter.parallel.draws.step import RankDraws
from fanin.datacenter.parallel.layout import Layout, check_layout
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.datacenter.parallel.pipelines.stages import (
    Skip,
    StageModule,
    check_draws,
    check_skips,
    sendable_gradient,
    sendable_output,
    split,
    stage_of_parameters,
)
from fanin.datacenter.parallel.pipelines.torch_stage import ObservedStage, check_torch
from fanin.datacenter.parallel.settings import ParallelSettings, Precision, TrainingSettings
from fanin.datacenter.parallel.transforms.data import HALF, apply_data_parallel
from fanin.datacenter.parallel.transforms.meta import is_on_meta, materialize
from fanin.datacenter.parallel.transforms.recompute import apply_recompute
from fanin.datacenter.parallel.transforms.tensor import apply_tensor_parallel, check_widths, head_of, wait_for_output
from fanin.datacenter.parallel.transforms.ties import (
    Tie,
    build_tie,
    check_shared,
    check_still_shared,
    other_names,
    retie,
    shared_names,
)
from fanin.datacenter.parallel.vocabulary import VocabularyShard
from fanin.datacenter.ranks.axes import Axes
from fanin.datacenter.ranks.mesh import PIPELINE, TENSOR
from fanin.protos.errors import InvalidInput

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableModel:
    """A model to train: a module, the layout of its names and its objective.

    The module has all of its parameters, identical on every rank, or none: they are on the meta device.

    Attributes:
        module: the module.
        layout: the names of its modules.
        objective: the loss and its count.
        draws: the random numbers that the module and the loss draw, from ``find_draws``. A model whose draws are not
            listed here cannot be trained.
    """

    module: nn.Module
    layout: Layout
    objective: Objective = TOKENS
    draws: ModelDraws = NO_DRAWS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """The stage, shape and dtype of one full parameter, and its other names if several modules share it."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A model on one rank, ready to train.

    Attributes:
        objective: the loss and its count.
        parallel: the distribution of the model over ranks.
        training: the settings of the training.
        mesh: the ranks; None for a single process.
        device: the device of this rank.
        parts: the modules of this rank by the index of their stage. Without a pipeline the complete model is stage 0.
        runners: the modules that a step calls: the parts, or DistributedDataParallel around them.
        optimizers: one for each part that has trainable parameters.
        schedule: torch's pipeline schedule; None without a pipeline.
        tie: this rank's ends of a tied weight; None without a pipeline or without a tied weight.
        table: the parameters of the complete model by name, in the order of the model.
        draws: the random numbers of this rank.
    """

    objective: Objective
    parallel: ParallelSettings
    training: TrainingSettings
    mesh: DeviceMesh | None
    device: torch.device
    parts: dict[int, nn.Module]
    runners: dict[int, nn.Module]
    optimizers: tuple[Optimizer, ...]
    schedule: TorchSchedule | None
    tie: Tie | None
    table: dict[str, ParameterEntry]
    draws: RankDraws

    @property
    def axes(self) -> Axes:
        """The groups that sums run over, and this rank's part of a batch."""
        return Axes(shape=self.parallel.mesh, mesh=self.mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a stage is put: the ranks, this rank's device and its random numbers."""

    mesh: DeviceMesh | None
    device: torch.device
    draws: RankDraws


def build(
    model: TrainableModel,
    parallel: ParallelSettings,
    training: TrainingSettings,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> RankModel:
    """Put a model on this rank, in the ten steps listed above.

    The parameters of ``model.module`` move into the parts of the result, so do not use the module afterwards. A module
    that was cut into stages is on the meta device.

    Args:
        model: the module. If its parameters are on the meta device, this rank allocates only its own slices. The caller
            then loads their values, for example with ``import_weights``.
        parallel: the distribution of the model over ranks.
        training: the settings of the training.
        mesh: the ranks; None for a single process.
        device: the device of this rank.

    Raises:
        InvalidInput: the settings do not fit the model, the mesh or the batch size.
        UnsupportedModel: the model cannot be spread over an axis of this mesh.
    """
    layout = model.layout
    check_job(layout, parallel, training, 1 if mesh is None else mesh.size())
    check_layout(layout, model.module)
    check_widths(model.module, layout, parallel.mesh.tp)
    if parallel.offload and mesh is None:
        raise InvalidInput(
            "parallel: got offload and no mesh, expected a mesh of one rank or more, which FSDP2 needs; set mesh",
            code="FN-1271",
        )
    apply_precision(model.module, parallel.precision)
    apply_freeze(model.module, training.freeze)
    table, shared = parameter_table(model, parallel), shared_names(model.module)
    sharded = _sharded_objective(model, mesh if parallel.mesh.tp > 1 else None)
    objective, layout = sharded or model.objective, replace(layout, gathers_logits=sharded is None)
    draws = RankDraws(model.draws, (0, 1) if mesh is None else (mesh.get_local_rank(TENSOR), parallel.mesh.tp))
    objective = replace(objective, loss_sum=draws.of(LOSS, objective.loss_sum))
    stages = _stages(model, parallel, mesh)
    place = _Place(mesh=mesh, device=device, draws=draws)
    runners = {stage.index: _apply_to_stage(stage, layout, parallel, place) for stage in stages}
    parts = {stage.index: stage.part for stage in stages}
    for part in parts.values():
        check_still_shared(part, shared)
    optimizers = [build_optimizer(part, training) for part in parts.values()]
    schedule, tie = None, None
    if parallel.pipelined and mesh is not None:
        schedule = build_schedule(runners, objective, parallel, place)
        tie = None if layout.tied is None else build_tie(parts, layout.tied, parallel.pipeline(), mesh)
    return RankModel(
        objective=objective,
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
        draws=draws,
    )


def parameter_table(model: TrainableModel, parallel: ParallelSettings) -> dict[str, ParameterEntry]:
    """Return the entry of every parameter of a model, in the model's order, before the model is spread.

    Raises:
        InvalidInput: the layout does not cover a parameter, so a pipeline would lose it, or a module that draws.
        UnsupportedModel: the mesh would separate shared parameters, or a step may skip all of its first stage.
    """
    num_stages = parallel.pipeline().num_stages if parallel.pipelined else 1
    stage_of = stage_of_parameters(model.module, model.layout, num_stages, parallel.times, every_name=True)
    check_shared(model.module, model.layout, parallel.mesh, stage_of)
    check_draws(model.draws, model.layout, num_stages, parallel.times)
    check_skips(model.draws, model.module, model.layout, num_stages, parallel.times)
    others = other_names(model.module)
    return {
        name: ParameterEntry(stage=stage_of[name], shape=value.shape, dtype=value.dtype, others=others.get(name, ()))
        for name, value in model.module.named_parameters()
    }


def apply_precision(module: nn.Module, precision: Precision) -> None:
    """Convert the parameters and floating-point buffers of a module to float64 if the precision is ``double``."""
    if precision == "double":
        module.double()


def apply_freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match a pattern from training.

    Raises:
        InvalidInput: a pattern matches no name, or no parameter is left to train.
    """
    for pattern in patterns:
        matches = [value for name, value in module.named_parameters() if fnmatchcase(name, pattern)]
        if not matches:
            raise InvalidInput(f"freeze: no parameter's name matches {pattern!r}; correct or remove it", code="FN-1242")
        for value in matches:
            value.requires_grad_(False)
    if not any(value.requires_grad for value in module.parameters()):
        raise InvalidInput(
            f"freeze: nothing is left to train (patterns {list(patterns)}), expected at least one parameter",
            code="FN-1243",
        )


def _sharded_objective(model: TrainableModel, mesh: DeviceMesh | None) -> Objective | None:
    """Return the objective on this rank's columns of the logits, or None if the ranks of tp must gather them."""
    name = head_of(model.layout)
    if mesh is None or name is None or model.objective.sharded is None:
        return None
    weight = model.module.get_submodule(name).get_parameter("weight")
    shard = VocabularyShard.of(mesh.get_group(TENSOR), len(weight))
    return replace(model.objective.sharded(shard), observer=model.objective.observer)


def _stages(model: TrainableModel, parallel: ParallelSettings, mesh: DeviceMesh | None) -> list[StageModule]:
    if not parallel.pipelined or mesh is None:
        return [StageModule(index=0, part=model.module)]
    rank = mesh.get_local_rank(PIPELINE)
    stages = split(model.module, model.layout, parallel.pipeline(), rank, parallel.times)
    # Otherwise a reference to the model would keep the values of all stages in memory until the job ends.
    model.module.to("meta")
    return stages


def _apply_to_stage(stage: StageModule, layout: Layout, parallel: ParallelSettings, place: _Place) -> nn.Module:
    """Apply steps 3 to 8 to one stage. Return the module that a training step calls."""
    part, mesh, device = stage.part, place.mesh, place.device
    place.draws.wrap(part)
    if mesh is not None and parallel.mesh.tp > 1:
        apply_tensor_parallel(part, layout, mesh[TENSOR], sequence=parallel.sequence_parallel)
    if mesh is None or not parallel.sharded:
        # After the split, and not if FSDP2 follows: a device may be too small for a complete stage. Tensor parallelism
        # and FSDP2 move one parameter or one layer at a time.
        materialize(part, device)
    if layout.tied is not None:
        retie(part, layout.tied)
    layers = list(dict.fromkeys(layers_of(part.get_submodule(layout.layers))))
    apply_recompute(layers, parallel.recompute, place.draws)
    if parallel.compile:
        for name in layout.inputs:
            part.get_submodule(name).register_forward_hook(wait_for_output)
        for layer in layers:
            layer.compile()
    half = HALF.get(parallel.precision)
    if half is not None and not parallel.sharded:
        # FSDP2 has its own policy for half precision.
        part.forward = torch.autocast(device.type, half)(part.forward)
    may_skip = place.draws.may_skip
    runner = part if mesh is None else apply_data_parallel(part, layers, mesh, parallel, may_skip=may_skip)
    if parallel.sharded and is_on_meta(part):
        materialize(part, torch.device("cpu") if parallel.offload else device)
    return runner


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in a module.

    A container without a ``forward``, such as a ModuleList, is replaced by its own layers. It is never called, so a
    wrapper of its forward would never run.
    """
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from layers_of(child)
        elif not isinstance(child, Skip):
            yield child


def divided_loss(objective: Objective) -> Callable[[Tensor, Tensor, float, list[Tensor] | None], Tensor]:
    """Return the loss function of a pipeline's last stage.

    Its ``scores`` is a list for the observer's scores of an evaluation, and None in training.
    """

    def loss(outputs: Tensor, targets: Tensor, divisor: float, scores: list[Tensor] | None) -> Tensor:
        if scores is not None and objective.observer is not None:
            scores.append(objective.observer.score(objective.predict(outputs), targets))
        return objective.loss_sum(outputs, targets) / divisor

    return loss


def build_schedule(
    runners: dict[int, nn.Module],
    objective: Objective,
    parallel: ParallelSettings,
    place: _Place,
) -> TorchSchedule:
    """Build the schedule that runs this rank's stages (step 10).

    Args:
        runners: the rank's modules by the index of their stage.
        objective: the loss that the last stage computes.
        parallel: the schedule and its sizes.
        place: the ranks, the device and the random numbers of this rank.
    """
    check_torch()
    assert place.mesh is not None, "a pipeline has ranks"
    pipeline = parallel.pipeline()
    for index, runner in runners.items():
        if index < pipeline.num_stages - 1:
            runner.register_forward_hook(sendable_output)
        if index > 0:
            runner.register_forward_pre_hook(sendable_gradient)
    stages = [
        ObservedStage(runner, index, pipeline.num_stages, place.device, group=place.mesh.get_group(PIPELINE))
        for index, runner in runners.items()
    ]
    for stage in stages:
        stage.before = place.draws.select
    schedule_class = get_schedule_class(pipeline.rules.torch_name)
    own_stages = stages[0] if pipeline.rules.single_stage else stages
    # The loss is divided already. With scale_grads torch would divide it again by the number of microbatches.
    schedule: TorchSchedule = schedule_class(
        own_stages, pipeline.microbatches, loss_fn=divided_loss(objective), scale_grads=False
    )
    return schedule


def build_optimizer(part: nn.Module, settings: TrainingSettings) -> Optimizer | None:
    """Build the optimizer of the trainable parameters of a part. Return None if there are none."""
    values = [value for value in part.parameters() if value.requires_grad]
    if not values:
        return None
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        # torch 2.13 has no fused SGD for sharded parameters.
        return SGD(values, lr=rate, momentum=settings.momentum, weight_decay=decay)
    return AdamW(values, lr=rate, betas=settings.betas, eps=settings.epsilon, weight_decay=decay, fused=True)

"""The step: a model that is spread over ranks, trained as one process would train it.

    engine = build_engine(model, parallel, training, mesh)   # mesh None: one process
    engine.share                     -> (index, count): which part of each global batch this rank is given
    engine.step(batch, count=None)   -> Stepped(loss, norm, count): one optimizer step; ``batch`` is this rank's part
    engine.evaluate(batch)           -> (loss_sum, count) of all ranks' parts together
    engine.set_learning_rate(rate)
    engine.full_parameters()         -> name to whole CPU tensor, as of one process; a collective, on every rank
    engine.load_parameters(values)   -> name to whole tensor into the ranks' shards
    engine.parts, engine.optimizers, engine.table   for checkpoints: modules by stage, their optimizers, name to Entry

All ranks call the same things in the same order. What makes the numbers those of one process: the loss of a piece is a
sum, divided by the count of the whole global batch; gradients are summed over ranks, turns and microbatches, never
averaged; they are settled, tied and measured over all axes before they are clipped.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fanin.datacenter.jobs.devices import device_type, rank_device
from fanin.datacenter.parallel.build import Built, Entry, Model, build
from fanin.datacenter.parallel.gather import load_whole, whole_parameters
from fanin.datacenter.parallel.mesh import PIPELINE, REPLICATE, SHARD
from fanin.datacenter.parallel.quiet import quiet
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings, check_sequence
from fanin.datacenter.parallel.shard import reshard
from fanin.datacenter.parallel.steps import gradients
from fanin.datacenter.parallel.steps.noise import PartNorms, RateOf
from fanin.datacenter.parallel.steps.scaling import LossScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A rank's part of a global batch, samples first; ``extra`` are further arguments of the model by name."""

    inputs: Tensor
    targets: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def chunks(self, num: int) -> "Iterator[Batch]":
        """The batch in equal pieces."""
        if len(self.inputs) % num:
            raise ValueError(f"got a part of {len(self.inputs)} samples for {num} pieces, expected a multiple")
        extra = {name: value.chunk(num) for name, value in self.extra.items()}
        for index, (inputs, targets) in enumerate(zip(self.inputs.chunk(num), self.targets.chunk(num), strict=True)):
            yield Batch(inputs=inputs, targets=targets, extra={name: pieces[index] for name, pieces in extra.items()})

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        inputs, targets = (value.to(device, non_blocking=True) for value in (self.inputs, self.targets))
        return Batch(inputs=inputs, targets=targets, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The result of a step, the same on every rank: the mean loss before it, the gradients' norm, the count.

    ``norm``: before clipping; with local steps it is this rank's own. ``skipped``: the loss or the norm is not finite
    on some rank, and no rank changed anything. ``overflowed``: it was skipped for an overflow in fp16, whose scale was
    lowered; it happens now and then.
    """

    loss: Tensor
    norm: Tensor
    count: int
    skipped: bool = False
    overflowed: bool = False


def build_engine(
    model: Model,
    parallel: ParallelSettings,
    training: TrainingSettings,
    mesh: DeviceMesh | None,
    device: torch.device | None = None,
) -> "Engine":
    """An engine on this rank, by default on what the mesh or, without one, the machine has. Raises InvalidInput."""
    quiet()
    place = device or rank_device(device_type(parallel.device) if mesh is None else mesh.device_type)
    return Engine(build(model, parallel, training, mesh, place))


class Engine:
    """A model on one rank of a mesh."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self._training = [value for part in built.parts.values() for value in part.parameters() if value.requires_grad]
        copied = None if built.tie is None else built.tie.copied
        # Both ends of a tie have the sum: their norm counts once.
        self._measured = [value for value in self._training if value is not copied]
        # Only fp16, and jobs that may skip steps, go on after a step that changes nothing.
        skips = built.training.max_skips > 0 or built.parallel.precision == "fp16"
        self._statistics = [value for part in built.parts.values() for value in _statistics(part)] if skips else []
        self._groups = _groups(built)
        self._pipeline = built.mesh.get_group(PIPELINE) if built.mesh is not None and built.schedule else None
        self._scale = LossScale() if built.parallel.precision == "fp16" else None
        self._shapes: dict[bool, torch.Size] = {}
        self._noise: PartNorms | None = None

    @property
    def parts(self) -> Mapping[int, nn.Module]:
        """This rank's modules by the number of their stage."""
        return self.built.parts

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """One for each part that trains."""
        return self.built.optimizers

    @property
    def table(self) -> Mapping[str, Entry]:
        """All parameters of the model by name, and the stage, shape and dtype of each."""
        return self.built.table

    @property
    def share(self) -> tuple[int, int]:
        """(which, of how many): this rank's part of each global batch."""
        mesh, shape = self.built.mesh, self.built.parallel.mesh
        if mesh is None:
            return 0, 1
        return mesh.get_local_rank(REPLICATE) * shape.dp_shard + mesh.get_local_rank(SHARD), shape.num_parts

    def step(self, batch: Batch, count: int | None = None) -> Stepped:
        """One optimizer step. ``count``: of the whole global batch, where the caller knows it; else it is summed."""
        batch = self._taken(batch)
        total = self._total_count(batch.targets) if count is None else count
        self._set_mode(training=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        kept = [value.clone() for value in self._statistics]
        share = self._forward_backward(batch, max(1, total))
        if self._noise is not None:
            self.set_learning_rate(self._noise.rate())
        norm = self._measure_gradients()
        loss, finite = self._agreed(share, norm)
        # In half precision the loss itself may overflow, too.
        overflowed = not finite and self._scale is not None and self._scale.overflowed()
        if finite:
            self._update(norm)
        else:
            # A forward pass has moved the running statistics already.
            for value, before in zip(self._statistics, kept, strict=True):
                value.copy_(before)
        return Stepped(loss=loss, norm=norm, count=total, skipped=not finite, overflowed=overflowed)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """(sum of the losses, their count) of the parts that all ranks are given; nothing is trained.

        The objective's observer is shown this rank's outputs.
        """
        batch = self._taken(batch)
        self._set_mode(training=False)
        loss = torch.zeros((), dtype=torch.float64, device=self.built.device)
        observer, scores = self.built.objective.observer, list[Tensor]()
        if self.built.schedule is not None:
            losses: list[Tensor] = []
            # A folded schedule of torch 2.13 cannot go forward alone: it goes back too, and the gradients are dropped.
            with torch.set_grad_enabled(self.built.parallel.folded):
                self._run_schedule(batch, 1.0, losses, scores)
            # Torch may infer sizes first, by a loss of values that are nobody's.
            scores = scores[-self.built.parallel.microbatches :]
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss = sum((each.detach() for each in losses), loss)
        else:
            part = self.parts[0]
            for piece in batch.chunks(self.built.parallel.microbatches):
                outputs = part(piece.inputs, **piece.extra)
                loss = loss + self.built.objective.loss_sum(outputs, piece.targets)
                if observer is not None:
                    scores.append(observer.score(outputs, piece.targets))
        for part in self.parts.values():
            reshard(part)
        if observer is not None:
            for score in scores:
                observer.add(score)
        return float(self._sum(loss, pipeline=True)), self._total_count(batch.targets)

    @property
    def scale_state(self) -> dict[str, float]:
        """What fp16's loss scale is at, by name, for a checkpoint; nothing in other precisions."""
        return {} if self._scale is None else self._scale.state

    def load_scale_state(self, values: Mapping[str, float]) -> None:
        """Go on with a loss scale where ``values`` has one; in other precisions there is none to go on with."""
        if self._scale is not None:
            self._scale.load(values)

    def measure_noise(self, rate_of: RateOf) -> None:
        """Have ``rate_of`` say each following step's rate by how much the gradients of a batch's parts differ.

        For one process by itself, and for copies that DistributedDataParallel keeps alike.
        """
        self._noise = PartNorms(self.built.runners[0], self.built.training.accumulate, rate_of)

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the following steps."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters whole and on the CPU, by the names and in the order of one process; on every rank."""
        return dict(whole_parameters(self.built))

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Take over whole parameters. Raises ValueError, and changes nothing, if they are not the model's."""
        load_whole(self.built, values)

    def _taken(self, batch: Batch) -> Batch:
        """A batch on this rank's device. Raises InvalidInput if ranks cannot share out its sequences as they are to."""
        if self.built.parallel.sequence_parallel:
            check_sequence(self.built.parallel, batch.inputs.shape[1])
        return batch.to(self.built.device)

    def _forward_backward(self, batch: Batch, count: int) -> Tensor:
        """The gradients of this rank's part; its share of the mean loss."""
        parallel = self.built.parallel
        turns = self.built.training.accumulate
        loss = torch.zeros((), dtype=torch.float64, device=self.built.device)
        if self.built.schedule is not None:
            for piece in batch.chunks(turns):
                losses: list[Tensor] = []
                self._run_schedule(piece, float(count), losses)
                loss = sum((each.detach() for each in losses), loss)
            return loss
        scale = self._copies if self._scale is None else self._copies * self._scale.factor
        num = turns * parallel.microbatches
        if self._noise is not None:
            self._noise.begin()
        for index, piece in enumerate(batch.chunks(num)):
            with self._synchronized(last=index == num - 1):
                outputs = self.built.runners[0](piece.inputs, **piece.extra)
                share = self.built.objective.loss_sum(outputs, piece.targets) / count
                torch.autograd.backward(share * scale)
            if self._noise is not None:
                self._noise.turn_ended(last=index == num - 1)
            loss = loss + share.detach()
        return loss

    @property
    def _copies(self) -> int:
        """What DistributedDataParallel, which averages over copies, divides by and the loss is multiplied with."""
        parallel = self.built.parallel
        return 1 if parallel.sharded else parallel.mesh.dp_replicate

    def _synchronized(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients meet those of other ranks in the last piece alone."""
        runner = self.built.runners[0]
        if isinstance(runner, FSDPModule):
            runner.set_requires_gradient_sync(last)
        if isinstance(runner, DistributedDataParallel) and not last:
            waiting: AbstractContextManager[None] = runner.no_sync()
            return waiting
        return nullcontext()

    def _run_schedule(
        self, batch: Batch, divisor: float, losses: list[Tensor], scores: list[Tensor] | None = None
    ) -> None:
        """One run of the pipeline; the last stage's losses, one a microbatch, are put into ``losses``.

        An evaluation gives ``scores`` for the observer's.
        """
        schedule, parts = self.built.schedule, self.parts
        assert schedule is not None
        training = torch.is_grad_enabled()
        if self._shapes.setdefault(training, batch.inputs.shape) != batch.inputs.shape:
            # A receive into a buffer of the old size says nothing and keeps it.
            raise ValueError(
                f"got inputs of {list(batch.inputs.shape)} for a pipeline that began with "
                f"{list(self._shapes[training])}, expected the same in each step; pad them"
            )
        num_stages = self.built.parallel.pipeline().num_stages
        inputs = (batch.inputs,) if 0 in parts else ()
        target, found = (batch.targets, losses) if num_stages - 1 in parts else (None, None)
        shared = {"divisor": divisor, "scores": scores}
        if training:
            schedule.step(*inputs, target=target, losses=found, return_outputs=False, loss_kwargs=shared, **batch.extra)
        else:
            schedule.eval(*inputs, target=target, losses=found, return_outputs=False, loss_kwargs=shared, **batch.extra)

    def _measure_gradients(self) -> Tensor:
        """Complete the gradients; their norm before clipping."""
        gradients.settle(self._training)
        if self.built.tie is not None:
            self.built.tie.add_gradients()
        if self._scale is not None:
            gradients.scale(self._training, 1.0 / self._scale.factor)
        return gradients.total_norm(self._measured, self._pipeline, self.built.device)

    def _agreed(self, share: Tensor, norm: Tensor) -> tuple[Tensor, bool]:
        """(the mean loss, whether it and the gradients are finite), the same on all ranks.

        Ranks of ``tp`` need no message: each has the whole loss, and the norm of all of them. Copies that take local
        steps have a norm each, so whether it is finite travels with the loss.
        """
        told = torch.stack([share, norm.isfinite().logical_not().to(share)])
        loss, num_broken = self._sum(told, pipeline=True)
        return loss, bool(loss.isfinite()) and not bool(num_broken)

    def _update(self, norm: Tensor) -> None:
        """Clip the gradients, and have the optimizers take them."""
        limit = self.built.training.clip_norm
        if limit is not None:
            gradients.clip(self._training, norm, limit)
        for optimizer in self.optimizers:
            optimizer.step()
        if self._scale is not None:
            self._scale.succeeded()

    def _set_mode(self, *, training: bool) -> None:
        for runner in self.built.runners.values():
            if runner.training != training:
                runner.train(training)

    def _total_count(self, targets: Tensor) -> int:
        """The count over all parts of the global batch."""
        return int(self._sum(self.built.objective.count(targets).double(), pipeline=False))

    def _sum(self, value: Tensor, *, pipeline: bool) -> Tensor:
        """The sum over the ranks with other samples, and over the stages, of which the last alone has a loss."""
        for group in self._groups:
            dist.all_reduce(value, group=group)
        if pipeline and self._pipeline is not None:
            dist.all_reduce(value, group=self._pipeline)
        return value


def _groups(built: Built) -> list[dist.ProcessGroup]:
    sizes = built.parallel.mesh.sizes
    return [] if built.mesh is None else [built.mesh.get_group(axis) for axis in (SHARD, REPLICATE) if sizes[axis] > 1]


def _statistics(part: nn.Module) -> list[Tensor]:
    """The buffers of a part that belong to its state."""
    kept = part.state_dict().keys()
    return [value for name, value in part.named_buffers() if name in kept]

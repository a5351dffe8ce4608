"""Training from the first step to the last: the one loop behind ``fanin train`` and a federation's datacenter jobs.

It feeds an engine, which makes any mesh compute what one process would, with batches whose order knows no ranks
(samples.py) at rates that are functions of the step (rates.py). Where it stands is one record, so that it goes on from
a checkpoint, on another mesh too, as if nothing had been. The test set is nowhere near.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fanin.clients.data.examples import Int64s
from fanin.datacenter.data.samples import Cursor, Order, Samples, part_of
from fanin.datacenter.jobs.config import TrainConfig
from fanin.datacenter.jobs.jobfiles import Evaluated, Trained
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.mesh import PIPELINE, REPLICATE, SHARD
from fanin.datacenter.training.communication import apply_communication, average_copies
from fanin.datacenter.training.objectives import Scored
from fanin.datacenter.training.rates import ADASCALE, Noise, Rates, rates_of
from fanin.datacenter.watch.meters import DATA, STEP
from fanin.datacenter.watch.timeline import Timeline
from fanin.protos.errors import Diverged, InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a job stands, the same on every rank and on any mesh.

    ``looks``: evaluations so far, of which number ``best`` (from 1) had ``best_loss``. ``loss_sum`` and ``count`` are
    of the steps since the last one. ``noise``: what AdaScale has seen. ``skipped``: steps so far that were left out,
    of which the last ``skips`` came in succession because their loss or gradients were not finite. ``num_samples``:
    of the order that the last step followed, 0 before the first step. ``rate_steps``: over which its learning rate
    decays, 0 for a constant one.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    looks: int = 0
    best: int = 0
    best_loss: float = math.inf
    loss_sum: float = 0.0
    count: int = 0
    noise: Noise = field(default_factory=Noise)
    skipped: int = 0
    skips: int = 0
    num_samples: int = 0
    rate_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is trained on and what is held out."""

    train: Samples
    held_out: Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The last step: its loss and rate, the gradients' norm, AdaScale's gain, and the tokens or samples in it.

    A number that is not finite is None."""

    loss: float | None
    rate: float
    norm: float | None
    units: int
    gain: float | None = None


@dataclass(slots=True)
class Speed:
    """Time in steps, and what they took, from the second on: the first warms up."""

    seconds: float = 0.0
    units: int = 0
    steps: int = 0

    def add(self, seconds: float, units: int) -> None:
        """One more step."""
        self.steps += 1
        if self.steps > 1:
            self.seconds += seconds
            self.units += units

    @property
    def units_per_second(self) -> float:
        """0.0 before there were two steps."""
        return self.units / self.seconds if self.seconds else 0.0


class Trainer:
    """A model in training. ``state`` is where it begins; ``scored`` the objective that the engine was given.

    Raises InvalidInput if the state is of a job with other samples or another decay of the learning rate.
    """

    def __init__(
        self, engine: Engine, scored: Scored, config: TrainConfig, parts: Parts, state: State | None = None
    ) -> None:
        self.engine = engine
        self._rates = _rates(config, len(parts.train))
        self.state = state or State()
        _check_resumed(self.state, len(parts.train), self._rates)
        self.speed = Speed()
        self.last = Last(loss=0.0, rate=0.0, norm=None, units=0)
        self.timeline = Timeline(0)
        self.around_step: Callable[[], AbstractContextManager[object]] = nullcontext
        self.after_batch: Callable[[], None] = lambda: None
        """Called after each batch of an evaluation."""
        self._scored = scored
        self._config = config
        self._parts = parts
        self._order = Order(len(parts.train), config.seed)
        self._groups = data_groups(engine)
        self._losses: list[float | None] = []
        self._evaluated: list[Evaluated] = []
        self._kept: dict[str, Tensor] = {}
        self._full = True
        self._rate = 0.0
        self._gain: float | None = None
        apply_communication(engine.rank_model.runners.get(0), config.communication)
        if config.rate.scale == ADASCALE:
            engine.measure_noise(self._scaled_rate)
            if not self.state.noise.count:
                # What was trained without it counts as every other rule counts it.
                self.state = replace(self.state, noise=Noise(steps=float(self.state.step)))

    def remember(self, losses: Sequence[float | None], evaluated: Sequence[Evaluated]) -> None:
        """What was told before ``state``, for whoever is told the rest."""
        self._losses, self._evaluated = list(losses), list(evaluated)

    def run(self, after_step: Callable[[], bool] = lambda: False) -> Trained:
        """Train to the end; the parts end with what they are to keep.

        ``after_step`` is called when a step is done, on every rank, and may end the training there and then by True.
        Raises Diverged, on all ranks, if a loss, or the gradients of a step, are not finite and may not be skipped.
        """
        while not (self._at_limit() or self.flat):
            ended_epoch = self.step()
            every = self._config.evaluation.every
            if ended_epoch if every == 0 else self.state.step % every == 0:
                self.look()
            if after_step():
                return self.trained
        if self.state.count or not self.state.looks:
            self.look()
        if self._config.evaluation.keep == "best" and self._kept:
            restore(self.engine, self._kept)
        return self.trained

    @property
    def trained(self) -> Trained:
        """What came of it so far."""
        return Trained(
            losses=tuple(self._losses),
            evaluated=tuple(self._evaluated),
            best=self.state.best,
            flat=self.flat,
            skipped=self.state.skipped,
        )

    @property
    def flat(self) -> bool:
        """Whether as many evaluations as there is patience for brought nothing."""
        patience = self._config.evaluation.patience
        return 0 < patience <= self.state.looks - self.state.best

    def step(self) -> bool:
        """One optimizer step on the next global batch; whether it was an epoch's last. Raises Diverged."""
        state, size = self.state, self._config.training.batch_size
        started_s = time.perf_counter()
        samples, self._rate = self._parts.train.of_epoch(state.cursor.epoch), self._rates.at(state.step)
        with self.timeline.phase(DATA):
            indices, after = self._order.next_batch(state.cursor, size)
            batch, count = self._part(samples, indices, size), samples.count(indices)
            self._full = len(indices) == size
        with self.timeline.phase(STEP), self.around_step():
            self.engine.set_learning_rate(self._rate)
            stepped = self.engine.step(batch, count)
            loss, norm = float(stepped.loss), float(stepped.norm)
        broken = stepped.skipped and not stepped.overflowed
        if broken and state.skips >= self._config.training.max_skips:
            # Nothing has changed: the state is that of the step before.
            raise self._diverged(state, loss, norm)
        self.last = Last(
            loss=_finite(loss), rate=self._rate, norm=_finite(norm), units=samples.units(indices), gain=self._gain
        )
        self._losses.append(self.last.loss)
        self.state = replace(
            self.state,
            step=state.step + 1,
            cursor=after,
            loss_sum=state.loss_sum + (loss * count if math.isfinite(loss) else 0.0),
            count=state.count + (count if math.isfinite(loss) else 0),
            noise=state.noise if stepped.skipped else self.state.noise,
            skipped=state.skipped + stepped.skipped,
            skips=state.skips + 1 if broken else 0,
            num_samples=len(self._parts.train),
            rate_steps=self._rates.decay_steps,
        )
        period = self._config.communication.local_period
        if self._took_local_steps and self.state.step % period == 0:
            self._average()
        self.speed.add(time.perf_counter() - started_s, self.last.units)
        return after.epoch > state.cursor.epoch

    def _diverged(self, state: State, loss: float, norm: float) -> Diverged:
        """The error of a step that is not finite; ``state`` is the one before it."""
        most = self._config.training.max_skips
        skipped = f" after {state.skips} steps in succession were skipped (max_skips {most})" if most else ""
        return Diverged(
            f"training: step {state.step + 1}: got loss {loss:g} and gradient norm {norm:g} (learning rate "
            f"{self._rate:g}){skipped}, expected finite numbers; the step changed nothing; lower the learning rate, "
            f"set clip_norm, look at the samples of epoch {state.cursor.epoch} from {state.cursor.taken} on, or raise "
            f"max_skips ({most}) to leave such steps out"
        )

    def evaluate(self) -> tuple[float, float]:
        """(mean loss, accuracy) over the held-out part, the same on every rank; a model of values has accuracy 0."""
        settings = self._config.evaluation
        samples = self._parts.held_out
        num = min(len(samples), settings.num_samples or len(samples))
        self._settle()
        loss_sum, count = 0.0, 0
        size = self._config.evaluation_size
        for start in range(0, num, size):
            batch = self._part(samples, np.arange(start, min(start + size, num)), size)
            part_sum, part_count = self.engine.evaluate(batch)
            loss_sum, count = loss_sum + part_sum, count + part_count
            self.after_batch()
        found = self._scored.take()
        for group in self._groups:
            dist.all_reduce(found, group=group)
        return loss_sum / max(1, count), float(found[0] / found[1].clamp(min=1.0))

    def _part(self, samples: Samples, indices: Int64s, size: int) -> Batch:
        """This rank's part of a batch that has ``size`` samples if it is a full one."""
        built = self.engine.rank_model
        pieces = built.parallel.mesh.num_parts * built.training.accumulate * built.parallel.microbatches
        # A pipeline's batches all have one shape; elsewhere no more is added than it takes to share them out.
        return part_of(samples, indices, self.engine.share, size if built.parallel.pipelined else pieces)

    def look(self) -> None:
        """Evaluate, and keep the parameters if they are the best so far."""
        settings, state = self._config.evaluation, self.state
        loss, accuracy = self.evaluate()
        train_loss = state.loss_sum / max(1, state.count)
        if not math.isfinite(loss):
            raise Diverged(
                f"evaluation: step {state.step}: got validation loss {loss:g} (train loss {train_loss:g}), expected a "
                f"finite one; lower the learning rate ({self._config.training.learning_rate:g}), or look at the "
                "held-out samples"
            )
        self._evaluated.append(
            Evaluated(
                step=state.step,
                epoch=state.cursor.epoch,
                train_loss=train_loss,
                validation_loss=loss,
                validation_accuracy=accuracy,
            )
        )
        better = loss < state.best_loss - settings.min_delta
        self.state = replace(state, looks=state.looks + 1, loss_sum=0.0, count=0)
        if better:
            self.state = replace(self.state, best=self.state.looks, best_loss=loss)
        if better and settings.keep == "best":
            self._kept = snapshot(self.engine)

    def _scaled_rate(self, parts_square: float, mean_square: float) -> float:
        """AdaScale's rate of the step whose gradients are there."""
        if not (math.isfinite(parts_square) and math.isfinite(mean_square)):
            # The step will be left out.
            return self._rate
        training, noise = self._config.training, self.state.noise
        num_parts = training.batch_size // self._config.rate.base_batch
        if self._full:
            # Of an epoch's last batch some parts may be empty; it takes the gain of those before it.
            noise = noise.seen(parts_square, mean_square, num_parts)
        self._gain = noise.gain(num_parts)
        self.state = replace(self.state, noise=replace(noise, steps=noise.steps + self._gain))
        self._rate = self._rates.at(int(noise.steps)) * self._gain
        return self._rate

    def _at_limit(self) -> bool:
        stop, state = self._config.stop, self.state
        steps = state.noise.steps if self._config.rate.scale == ADASCALE else state.step
        return 0 < stop.steps <= steps or 0 < stop.epochs <= state.cursor.epoch

    def _settle(self) -> None:
        """Have ranks that differ by data alone agree on running statistics, which each has from its own samples."""
        # After local steps copies are alike only where they were averaged; the end may lie between.
        if self._took_local_steps and self.state.step % self._config.communication.local_period:
            self._average()
        buffers = [
            value for part in self.engine.parts.values() for value in part.buffers() if value.is_floating_point()
        ]
        for group in data_groups(self.engine, pipeline=False):
            average_copies(buffers, group)

    @property
    def _took_local_steps(self) -> bool:
        """Whether copies have gone by themselves yet."""
        communication = self._config.communication
        return communication.local_period > 0 and self.state.step > communication.dense_steps

    def _average(self) -> None:
        runner = self.engine.rank_model.runners[0]
        assert isinstance(runner, DistributedDataParallel)
        average_copies(list(runner.parameters()), runner.process_group)


def data_groups(engine: Engine, *, pipeline: bool = True) -> list[dist.ProcessGroup]:
    """The groups over which what ranks have seen adds up; with ``pipeline`` over its stages, too."""
    mesh, sizes = engine.rank_model.mesh, engine.rank_model.parallel.mesh.sizes
    axes = (SHARD, REPLICATE, PIPELINE) if pipeline else (SHARD, REPLICATE)
    return [] if mesh is None else [mesh.get_group(axis) for axis in axes if sizes[axis] > 1]


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """This rank's parameters and statistics, copied."""
    return {name: value.detach().clone() for name, value in _tensors(engine)}


@torch.no_grad()
def restore(engine: Engine, kept: Mapping[str, Tensor]) -> None:
    """Take a snapshot back."""
    for name, value in _tensors(engine):
        value.copy_(kept[name])


def _tensors(engine: Engine) -> list[tuple[str, Tensor]]:
    def of(stage: int, part: nn.Module) -> list[tuple[str, Tensor]]:
        return [(f"{stage}.{name}", value) for name, value in (*part.named_parameters(), *part.named_buffers())]

    return [pair for stage, part in engine.parts.items() for pair in of(stage, part)]


def _check_resumed(state: State, num_samples: int, rates: Rates) -> None:
    """Raise InvalidInput if the job that came to this state had another order of samples, or other learning rates."""
    if not state.num_samples:
        return
    if state.num_samples != num_samples:
        raise InvalidInput(
            f"checkpoints: got {num_samples} samples to train on, expected {state.num_samples} as in the checkpoint "
            f"after {state.step} steps: another number has another order, so samples would be seen twice or never; "
            "resume with the same data and held_fraction, or start a new job from its weights ([model] initial)"
        )
    if state.rate_steps != rates.decay_steps:
        raise InvalidInput(
            f"checkpoints: got a learning rate that decays over {rates.decay_steps} steps, expected {state.rate_steps} "
            f"as in the checkpoint after {state.step} steps (0: no decay), or the rate would jump; set [rate] "
            f"decay_steps = {state.rate_steps}, or start a new job from its weights ([model] initial)"
        )


def _finite(value: float) -> float | None:
    """A number that JSON has, or None."""
    return value if math.isfinite(value) else None


def _rates(config: TrainConfig, num_train: int) -> Rates:
    size = config.rate.base_batch if config.rate.scale == ADASCALE else config.training.batch_size
    per_epoch = -(-num_train // size)
    limits = [limit for limit in (config.stop.steps, config.stop.epochs * per_epoch) if limit]
    num_steps = config.rate.decay_steps or min(limits)
    return rates_of(config.rate, config.training.learning_rate, config.training.batch_size, num_steps)

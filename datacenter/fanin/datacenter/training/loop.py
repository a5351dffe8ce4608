"""The training loop, from the first step to the last: the one loop behind ``fanin train`` and a federation's jobs.

The loop feeds batches to an engine. On any mesh, the engine computes the same numbers as one process. The order of the
samples does not depend on the ranks (``data.samples``), and the learning rate is a function of the step (``rates``).
All state outside of the tensors is one record (``state.LoopState``), so a job can resume from a checkpoint on any mesh.
The loop never uses a test set.

The loop publishes its progress as events (``observers.events``). Measurements, the watchdog, the checkpoints and the
user's observers receive them. A decision of an observer ends the training after the current step, on all ranks.
"""

import math
import time
from dataclasses import replace

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.rates import ADASCALE
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, SampleOrder, Samples, batch_share, samples_digest
from fanin.datacenter.files.jobfiles import HeldOutEvaluation, TrainingHistory
from fanin.datacenter.observers.events import (
    DataRead,
    EvaluationBatch,
    EvaluationEnded,
    StepComputed,
    StepEnded,
    StepSettled,
    StepStarted,
    TrainingEnded,
    TrainingFailed,
    TrainingStarted,
)
from fanin.datacenter.observers.observer import Failure, Finish, Interrupt, Verdict
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.draws.step import evaluation_key, step_key
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.objective import ScoredObjective
from fanin.datacenter.parallel.pipelines.torch_stage import observe_stages
from fanin.datacenter.parallel.steps.replicas import check_replicas
from fanin.datacenter.training.communication import apply_communication, average_copies, average_statistics
from fanin.datacenter.training.decisions import agree
from fanin.datacenter.training.rates import Noise, Rates, rates_of
from fanin.datacenter.training.snapshot import restore, snapshot
from fanin.datacenter.training.state import LoopStart, LoopState, Throughput, check_resumed
from fanin.edge.tensors import Int64s
from fanin.protos.errors import Diverged, InvalidInput
from fanin.protos.texts import counted


class TrainingLoop:
    """The training of one model on this rank.

    Args:
        engine: The engine, built with ``scored.objective``.
        scored: The objective, with its accuracy counter.
        config: The job's config.
        data: The samples to train and to evaluate on.
        start: The state to start from, and the observers.

    Attributes:
        state: The current state.
        throughput: Tokens or samples a second.
        interrupted: Whether a decision ended the training at once, so that it has to be resumed.
        failure: The error of an observer that failed when no step was left; empty if none did. The result is complete.

    Raises:
        InvalidInput: The state belongs to a job with other samples, or another decay of the learning rate.
    """

    def __init__(
        self,
        engine: Engine,
        scored: ScoredObjective,
        config: TrainConfig,
        data: DataSplit,
        start: LoopStart | None = None,
    ) -> None:
        self.engine = engine
        self._rates = _rates(config, len(data.train))
        start = start or LoopStart()
        self.state = start.state
        self._digest = samples_digest(data.train)
        check_resumed(self.state, len(data.train), self._digest, self._rates)
        self.throughput = Throughput()
        self.interrupted = False
        self.failure = ""
        self._failed_together = False
        self._observers = start.observers
        self._scored = scored
        self._config = config
        self._data = data
        self._order = SampleOrder(len(data.train), config.seed)
        self._losses = list(start.losses)
        self._evaluations = list(start.evaluations)
        self._best_values: dict[str, Tensor] = {}
        self._full = True
        self._rate = 0.0
        self._gain: float | None = None
        apply_communication(engine.rank_model.runners.get(0), config.communication)
        if config.rate.scale == ADASCALE:
            engine.measure_noise(self._scaled_rate)
            if not self.state.noise.count:
                # Steps of a job that started without AdaScale count one each, as under every other rule.
                self.state = replace(self.state, noise=Noise(steps=float(self.state.step)))
        schedule = engine.rank_model.schedule
        if schedule is not None and self._observers:
            observe_stages(schedule, self._observers.publish)

    def run(self) -> TrainingHistory:
        """Train to the end. The model then has its final parameters, or the best ones if the config selects them.

        Raises:
            Diverged: A loss or gradient is not finite and the step may not be skipped. Raised on all ranks.
            InvalidInput: An observer has failed before the last step, on any rank. Raised on all ranks.
        """
        publish = self._observers.publish
        publish(TrainingStarted(num_steps=self.state.step))
        try:
            reason = self._take_steps()
            publish(TrainingEnded(num_steps=self.state.step, reason=reason, interrupted=self.interrupted))
        except BaseException as exc:
            together = self._failed_together or isinstance(exc, Diverged)
            error = f"{type(exc).__name__}: {exc}"
            publish(TrainingFailed(num_steps=self.state.step, error=error, on_all_ranks=together))
            raise
        verdict = self._verdict()
        if isinstance(verdict, Failure):
            self.failure = (
                f"{verdict.reason}; the job has ended after step {self.state.step}, and its files are written; correct "
                "this observer"
            )
        return self.history

    def _take_steps(self) -> str:
        """Take all steps, and return the reason why there are no more."""
        reason = self._limit()
        while not reason:
            ended_epoch = self.step()
            every = self._config.evaluation.every
            if ended_epoch if every == 0 else self.state.step % every == 0:
                self.record_evaluation()
            self._observers.publish(StepSettled(num_steps=self.state.step))
            verdict, reason = self._verdict(), self._limit()
            if isinstance(verdict, Failure) and not reason:
                self._failed_together = True
                raise InvalidInput(
                    f"{verdict.reason}; the job ends after step {self.state.step}; correct this observer",
                    code="FN-1362",
                )
            if isinstance(verdict, Interrupt):
                self.interrupted = True
                return verdict.reason
            if isinstance(verdict, Finish):
                reason = verdict.reason
        if self.state.count or not self.state.num_evaluations:
            self.record_evaluation()
        if self._config.evaluation.keep == "best" and self._best_values:
            restore(self.engine, self._best_values)
        return reason

    def _verdict(self) -> Verdict | None:
        """Return the verdict of all ranks. A collective, if the observers are shared."""
        verdict = self._observers.verdict()
        return agree(verdict) if self._observers.shared else verdict

    @property
    def history(self) -> TrainingHistory:
        """The losses and evaluations so far."""
        return TrainingHistory(
            losses=tuple(self._losses),
            evaluated=tuple(self._evaluations),
            # The evaluations of a lost trace are missing at the start of the list.
            best=max(0, self.state.best - (self.state.num_evaluations - len(self._evaluations))),
            flat=self.flat,
            skipped=self.state.skipped,
        )

    @property
    def flat(self) -> bool:
        """Whether the last ``patience`` evaluations brought no improvement."""
        patience = self._config.evaluation.patience
        return 0 < patience <= self.state.num_evaluations - self.state.best

    def step(self) -> bool:
        """Take one optimizer step on the next global batch; return whether it ended an epoch. Raises Diverged."""
        state, size = self.state, self._config.training.batch_size
        publish, started_s = self._observers.publish, time.perf_counter()
        publish(StepStarted(step=state.step))
        samples, self._rate = self._data.train.of_epoch(state.cursor.epoch), self._rates.at(state.step)
        indices, after = self._order.next_batch(state.cursor, size)
        batch, count = self._share(samples, indices, size), samples.count(indices)
        self._full = len(indices) == size
        read_s = time.perf_counter()
        publish(DataRead(step=state.step, started_s=started_s, seconds=read_s - started_s))
        read_s = time.perf_counter()
        try:
            self.engine.set_learning_rate(self._rate)
            stepped = self.engine.step(batch, count, step_key(self._config.seed, state.step))
            loss, norm = float(stepped.loss), float(stepped.norm)
        finally:
            publish(StepComputed(step=state.step, started_s=read_s, seconds=time.perf_counter() - read_s))
        broken = stepped.skipped and not stepped.overflowed
        if broken and state.skips >= self._config.training.max_skips:
            # Nothing has changed: the state is still that of the previous step.
            raise self._diverged(state, loss, norm)
        units = samples.units(indices)
        # A skipped step changed nothing, so no mean has its loss, also if only a gradient was not finite.
        counts = not stepped.skipped
        recorded = loss if counts else None
        self._losses.append(recorded)
        self.state = replace(
            self.state,
            step=state.step + 1,
            cursor=after,
            loss_sum=state.loss_sum + (loss * count if counts else 0.0),
            count=state.count + (count if counts else 0),
            noise=state.noise if stepped.skipped else self.state.noise,
            skipped=state.skipped + stepped.skipped,
            skips=state.skips + 1 if broken else 0,
            num_samples=len(self._data.train),
            data_digest=self._digest,
            rate_steps=self._rates.decay_steps,
        )
        period = self._config.communication.local_period
        if self._took_local_steps and self.state.step % period == 0:
            self._average()
        self.throughput.add(time.perf_counter() - started_s, units)
        publish(
            StepEnded(
                step=state.step,
                loss=recorded,
                rate=self._rate,
                norm=_finite(norm),
                units=units,
                gain=self._gain,
                skipped=stepped.skipped,
            )
        )
        return after.epoch > state.cursor.epoch

    def _diverged(self, state: LoopState, loss: float, norm: float) -> Diverged:
        """Return the error of a step with numbers that are not finite; ``state`` is the one before it."""
        most = self._config.training.max_skips
        skipped = f" after {counted(state.skips, 'step')} in succession were skipped (max_skips {most})" if most else ""
        return Diverged(
            f"training: step {state.step + 1}: got loss {loss:g} and gradient norm {norm:g} (learning rate "
            f"{self._rate:g}){skipped}, expected finite numbers; the step changed nothing; lower the learning rate, "
            f"set clip_norm, look at the samples of epoch {state.cursor.epoch} from {state.cursor.taken} on, or raise "
            f"max_skips ({most}) to leave such steps out",
            code="FN-1333",
        )

    def evaluate(self) -> tuple[float, float]:
        """Return (mean loss, accuracy) on the held-out samples, equal on every rank.

        The accuracy is 0 if the targets are floating-point values.
        """
        settings = self._config.evaluation
        samples = self._data.held_out
        num = min(len(samples), settings.num_samples or len(samples))
        self._synchronize()
        loss_sum, count = 0.0, 0
        size = self._config.evaluation_size
        for start in range(0, num, size):
            indices = np.arange(start, min(start + size, num))
            # The count is that of a step: a sample without any target counts, and padding does not.
            share, key = self._share(samples, indices, size), evaluation_key(self._config.seed, start)
            loss_sum += self.engine.evaluate(share, key)[0]
            count += samples.count(indices)
            self._observers.publish(EvaluationBatch(num_steps=self.state.step))
        score = self._scored.take()
        for group in self.engine.axes.loss_groups:
            dist.all_reduce(score, group=group)
        return loss_sum / max(1, count), float(score[0] / score[1].clamp(min=1.0))

    def _share(self, samples: Samples, indices: Int64s, size: int) -> Batch:
        """Return this rank's share of a batch, which has ``size`` samples when it is full."""
        built = self.engine.rank_model
        pieces = built.parallel.mesh.batch_multiple(built.training.accumulate, built.parallel.microbatches)
        # A pipeline needs batches of one shape. Otherwise the padding only makes the batch divisible.
        return batch_share(samples, indices, self.engine.share, size if built.parallel.pipelined else pieces)

    def record_evaluation(self) -> None:
        """Evaluate, add the result to the history, and keep the parameters if they are the best so far.

        Raises:
            Diverged: The validation loss is not finite.
            UnsupportedModel: The copies of a parameter, on ranks of tp or of dp_replicate, differ.
        """
        settings, state = self._config.evaluation, self.state
        check_replicas(self.engine.rank_model)
        loss, accuracy = self.evaluate()
        train_loss = state.loss_sum / state.count if state.count else None
        if not math.isfinite(loss):
            raise Diverged(
                f"evaluation: step {state.step}: got validation loss {loss:g} (train loss {train_loss}), expected a "
                f"finite one; lower the learning rate ({self._config.training.learning_rate:g}), or look at the "
                "held-out samples",
                code="FN-1334",
            )
        self._evaluations.append(
            HeldOutEvaluation(
                step=state.step,
                epoch=state.cursor.epoch,
                train_loss=train_loss,
                validation_loss=loss,
                validation_accuracy=accuracy,
            )
        )
        better = loss < state.best_loss - settings.min_delta
        self.state = replace(state, num_evaluations=state.num_evaluations + 1, loss_sum=0.0, count=0)
        if better:
            self.state = replace(self.state, best=self.state.num_evaluations, best_loss=loss)
        if better and settings.keep == "best":
            self._best_values = snapshot(self.engine)
        self._observers.publish(
            EvaluationEnded(
                num_steps=state.step,
                epoch=state.cursor.epoch,
                train_loss=train_loss,
                validation_loss=loss,
                validation_accuracy=accuracy,
                best=better,
            )
        )

    def _scaled_rate(self, parts_square: float, mean_square: float) -> float:
        """Return AdaScale's rate for the step whose gradients have these squared norms."""
        if not (math.isfinite(parts_square) and math.isfinite(mean_square)):
            # The engine will skip this step.
            return self._rate
        training, noise = self._config.training, self.state.noise
        num_parts = training.batch_size // self._config.rate.base_batch
        if self._full:
            # In an epoch's short last batch some parts may be empty. It uses the estimates of the earlier batches.
            noise = noise.updated(parts_square, mean_square, num_parts)
        self._gain = noise.gain(num_parts)
        self.state = replace(self.state, noise=replace(noise, steps=noise.steps + self._gain))
        self._rate = self._rates.at(int(noise.steps)) * self._gain
        return self._rate

    def _limit(self) -> str:
        """Return the limit that the training has reached; empty if there is none yet."""
        stop, state = self._config.stop, self.state
        steps = state.noise.steps if self._config.rate.scale == ADASCALE else state.step
        if 0 < stop.steps <= steps:
            return "steps"
        if 0 < stop.epochs <= state.cursor.epoch:
            return "epochs"
        return "patience" if self.flat else ""

    def _synchronize(self) -> None:
        """Average the separate values of data-parallel ranks: running statistics, and parameters after local steps."""
        # Copies agree only at the end of a local period. Training may end inside of one.
        if self._took_local_steps and self.state.step % self._config.communication.local_period:
            self._average()
        buffers = [
            value for part in self.engine.parts.values() for value in part.buffers() if value.is_floating_point()
        ]
        for group in self.engine.axes.sample_groups:
            average_statistics(buffers, group)

    @property
    def _took_local_steps(self) -> bool:
        """Whether copies have already taken steps without communication."""
        communication = self._config.communication
        return communication.local_period > 0 and self.state.step > communication.dense_steps

    def _average(self) -> None:
        runner = self.engine.rank_model.runners[0]
        assert isinstance(runner, DistributedDataParallel)
        average_copies(list(runner.parameters()), runner.process_group)


def _finite(value: float) -> float | None:
    """Return a number that JSON can represent, or None."""
    return value if math.isfinite(value) else None


def _rates(config: TrainConfig, num_train: int) -> Rates:
    size = config.rate.base_batch if config.rate.scale == ADASCALE else config.training.batch_size
    per_epoch = -(-num_train // size)
    limits = [limit for limit in (config.stop.steps, config.stop.epochs * per_epoch) if limit]
    num_steps = config.rate.decay_steps or min(limits)
    return rates_of(config.rate, config.training.learning_rate, config.training.batch_size, num_steps)

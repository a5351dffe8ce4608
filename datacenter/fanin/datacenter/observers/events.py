"""The events of a training on one rank, as frozen records.

Each optimizer step publishes::

    StepStarted  DataRead  [StageComputed ...]  StepComputed  StepEnded
    [EvaluationBatch ...  EvaluationEnded]  StepSettled  [CheckpointWaited ...  CheckpointWritten]

A training begins with TrainingStarted, and ends with TrainingEnded or TrainingFailed. Every rank publishes its own
events. StepEnded and EvaluationEnded have equal values on all ranks. Times are seconds of ``time.perf_counter``.
Releases may add events, so an observer must accept events that it does not know. Nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Literal

StageWork = Literal["forward", "backward", "weights"]
"""The work of a stage. ``weights`` is a backward pass for the weights alone, in schedules that split this pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStarted:
    """The training begins. ``num_steps`` steps are complete, which is more than 0 if the job resumes."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """An optimizer step begins. ``step`` is its number, from 0."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """The batch of a step is ready."""

    step: int
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageComputed:
    """A pipeline stage has computed a microbatch, in a step or in an evaluation.

    On a GPU the time is that to launch the kernels.
    """

    stage: int
    work: StageWork
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """The engine has computed a step, or has failed in it. The time includes all communication."""

    step: int
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The result of an optimizer step.

    Attributes:
        step: Number of the step, from 0.
        loss: Loss of the global batch before the step; None if the step was skipped.
        rate: Learning rate.
        norm: Norm of the gradient; None if it is not finite.
        units: Tokens or samples of the global batch, without padding.
        gain: AdaScale's gain; None without AdaScale.
        skipped: Whether the step changed nothing, because its loss or gradients were not finite.
    """

    step: int
    loss: float | None
    rate: float
    norm: float | None
    units: int
    gain: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBatch:
    """A batch of an evaluation is complete."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """The result of an evaluation on the held-out samples.

    Attributes:
        num_steps: Steps completed.
        epoch: Current epoch, from 0.
        train_loss: Mean training loss of the steps since the last evaluation that were not skipped; None without one.
        validation_loss: Mean loss on the held-out samples.
        validation_accuracy: Share of correct labels or tokens; 0 if the targets are floating-point values.
        best: Whether this is the lowest validation loss so far.
    """

    num_steps: int
    epoch: int
    train_loss: float | None
    validation_loss: float
    validation_accuracy: float
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettled:
    """A step is complete, with the evaluation after it if one was due. The state may be saved now."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWaited:
    """The training waits for a checkpoint that is still written. Published several times a second."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """The checkpoint after ``num_steps`` steps is durable on all ranks.

    Published when the training next waits for its checkpoints, which is at the next save or at the end.
    """

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """The training is over.

    Attributes:
        num_steps: Steps completed.
        reason: ``steps``, ``epochs``, ``patience``, or the reason of the decision that ended it.
        interrupted: Whether it was interrupted, to be resumed later: there is no final evaluation.
    """

    num_steps: int
    reason: str
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFailed:
    """The training ends with an error.

    Attributes:
        num_steps: Steps completed.
        error: Class and text of the error.
        on_all_ranks: Whether all ranks end with this error, after the same step.
    """

    num_steps: int
    error: str
    on_all_ranks: bool = False


Event = (
    TrainingStarted
    | StepStarted
    | DataRead
    | StageComputed
    | StepComputed
    | StepEnded
    | EvaluationBatch
    | EvaluationEnded
    | StepSettled
    | CheckpointWaited
    | CheckpointWritten
    | TrainingEnded
    | TrainingFailed
)

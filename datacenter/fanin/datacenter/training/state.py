"""State of a training loop, and how a loop begins.

``LoopState`` is everything that decides the next steps, apart from the tensors. A checkpoint stores it, so a job that
resumes from one, on any mesh, continues as if it had not stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fanin.datacenter.data.samples import Cursor
from fanin.datacenter.files.jobfiles import HeldOutEvaluation
from fanin.datacenter.observers.observer import Observers
from fanin.datacenter.training.rates import Noise, Rates
from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of a job: equal on every rank, and independent of the mesh.

    Attributes:
        step: Optimizer steps completed.
        cursor: Position in the data.
        num_evaluations: Evaluations so far.
        best: Number of the best evaluation, from 1; 0 before the first one.
        best_loss: Validation loss of the best evaluation.
        loss_sum: Sum of the training loss since the last evaluation.
        count: Divisor of ``loss_sum``.
        noise: AdaScale's estimates.
        skipped: Steps skipped so far.
        skips: Steps skipped in succession until now, because their loss or gradients were not finite.
        num_samples: Samples in the order that the last step followed; 0 before the first step.
        data_digest: Digest of these samples.
        rate_steps: Steps over which the learning rate decays; 0 if it is constant.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_evaluations: int = 0
    best: int = 0
    best_loss: float = math.inf
    loss_sum: float = 0.0
    count: int = 0
    noise: Noise = field(default_factory=Noise)
    skipped: int = 0
    skips: int = 0
    num_samples: int = 0
    data_digest: int = 0
    rate_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStart:
    """The start of a loop; by default a new job without observers.

    Attributes:
        state: The state to start from.
        losses: Losses of the steps before it.
        evaluations: Evaluations before it.
        observers: The receivers of the loop's events.
    """

    state: LoopState = field(default_factory=LoopState)
    losses: Sequence[float | None] = ()
    evaluations: Sequence[HeldOutEvaluation] = ()
    observers: Observers = field(default_factory=Observers)


@dataclass(slots=True)
class Throughput:
    """Time and work of all steps except the first, which includes warm-up costs."""

    seconds: float = 0.0
    units: int = 0
    steps: int = 0

    def add(self, seconds: float, units: int) -> None:
        """Add one step."""
        self.steps += 1
        if self.steps > 1:
            self.seconds += seconds
            self.units += units

    @property
    def units_per_second(self) -> float:
        """Tokens or samples a second; 0.0 before the second step."""
        return self.units / self.seconds if self.seconds else 0.0


def check_resumed(state: LoopState, num_samples: int, digest: int, rates: Rates) -> None:
    """Raise InvalidInput unless a job has the samples and the learning rates of the state it resumes from."""
    if not state.num_samples:
        return
    if state.num_samples != num_samples:
        raise InvalidInput(
            f"checkpoints: got {num_samples} samples to train on, expected {state.num_samples} as in the checkpoint "
            f"after {state.step} steps: another number has another order, so samples would be seen twice or never; "
            "resume with the same data and held_fraction, or start a new job from its weights ([model] initial)",
            code="FN-1342",
        )
    if state.data_digest != digest:
        raise InvalidInput(
            f"checkpoints: got other samples to train on, or another order of them (digest {digest:012x}), expected "
            f"those of the checkpoint after {state.step} steps ({state.data_digest:012x}): samples would be seen twice "
            "or never; resume with the same data, or start a new job from its weights ([model] initial)",
            code="FN-1342",
        )
    if state.rate_steps != rates.decay_steps:
        raise InvalidInput(
            f"checkpoints: got a learning rate that decays over {rates.decay_steps} steps, expected {state.rate_steps} "
            f"as in the checkpoint after {state.step} steps (0: no decay), or the rate would jump; set [rate] "
            f"decay_steps = {state.rate_steps}, or start a new job from its weights ([model] initial)",
            code="FN-1344",
        )

"""The update pipeline of a device: the stages of its Assignment in their order, then the codec.

Each stage is called with a function ``send``, which is the rest of the pipeline. The result of ``send`` is what the
coordinator reads from the payload, so a stage knows exactly what was lost behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fanin.edge.codecs.fixed import Encoded, codec_named
from fanin.edge.codecs.stage import GroupStage, Stage, StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Vector, VectorLayout
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import CodecSpec

States = Mapping[str, State]
"""The state of each stage, by its name."""
Sent = Mapping[str, Float64s]
"""The groups as the coordinator reads them (num_values,), by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """The result of the pipeline.

    Attributes:
        encoded: The payload.
        states: The states of the stages after it.
    """

    encoded: Encoded
    states: States


def first_states(stages: Mapping[str, Stage], num_values: int) -> States:
    """Return the states with which a device begins: zeros."""
    return {
        name: {tensor: np.zeros(num_values, np.float32) for tensor in stage.tensors} for name, stage in stages.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePipeline:
    """The pipeline of one Assignment.

    Attributes:
        codec: The codec of the Run.
        grid: An exponent for each block of the vector.
        learning_rate: Learning rate of the training.
        stages: The stages by name, in their order.
        layout: The layout of the vector.
        downlink: The auxiliary tensors of the Version (num_values,), by name.
        rng_of: Returns the generator of a purpose and of the values that it rounds, the same for a repeated training.
    """

    codec: CodecSpec
    grid: Sequence[int]
    learning_rate: float
    stages: Mapping[str, Stage]
    layout: VectorLayout
    downlink: Mapping[str, Float32s]
    rng_of: Callable[[str, Float32s], np.random.Generator]

    def apply(self, change: Float32s, num_steps: int, states: States) -> StagedUpdate:
        """Take a change through the stages and the codec.

        Args:
            change: New parameters minus the parameters of the Version (num_values,).
            num_steps: Optimizer steps of the training.
            states: The states before.

        Raises:
            InvalidInput: A stage breaks its contract; the text names it.
            ValueError: Values are not finite.
        """
        passing = _Pass(num_steps=num_steps, before=states)
        self._send(passing, tuple(self.stages), {PARAMETERS: change})
        assert passing.encoded is not None, "each stage sends once, so the codec was reached"
        return StagedUpdate(encoded=passing.encoded, states={name: passing.after[name] for name in self.stages})

    def _send(self, passing: "_Pass", names: Sequence[str], vector: Vector) -> Sent:
        """Take a vector through these stages and the codec."""
        if not names:
            passing.encoded = self._encode(vector)
            return self._sent(passing.encoded)
        name, stage, sent = names[0], self.stages[names[0]], list[Sent]()

        def send(changed: Vector) -> Sent:
            if sent:
                raise InvalidInput(f"stage {name}: sent two vectors, expected one; correct the stage")
            _check_vector(name, stage, vector, changed)
            sent.append(self._send(passing, names[1:], changed))
            return sent[0]

        context = StageContext(
            send=send,
            downlink=self.downlink,
            num_steps=passing.num_steps,
            learning_rate=self.learning_rate,
            rng=self.rng_of(name, vector[PARAMETERS]),
        )
        state = stage.apply(vector, passing.before[name], context)
        if not sent:
            raise InvalidInput(f"stage {name}: sent no vector, expected one; correct the stage")
        passing.after[name] = _checked_state(name, stage, state, self.layout.table.num_values)
        return sent[0]

    def _encode(self, vector: Vector) -> Encoded:
        flat, codec = self.layout.join(vector), codec_named(self.codec.name)
        rng = self.rng_of("", flat) if codec.is_stochastic else np.random.default_rng(0)
        return codec.encode(self.layout.whole, flat, self.grid, self.codec.max_shift, rng)

    def _sent(self, encoded: Encoded) -> Sent:
        """Return what the coordinator reads, by group. Without stages nothing reads it, so nothing is decoded."""
        if not self.stages:
            return {}
        codec, whole = codec_named(self.codec.name), self.layout.whole
        values = codec.decode(memoryview(encoded.payload)).astype(np.float64)
        for spec, start, exponent, shift in zip(whole.specs, whole.offsets, self.grid, encoded.shifts, strict=True):
            block = values[start : start + spec.num_values]
            np.ldexp(block, exponent + shift, out=block)
        return {group.name: values[slice(*self.layout.span(group.name))] for group in self.layout.groups}


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass through the pipeline."""

    num_steps: int
    before: States
    after: dict[str, State] = field(default_factory=dict)
    encoded: Encoded | None = None


def _check_vector(name: str, stage: Stage, before: Vector, after: Vector) -> None:
    """Raise InvalidInput unless a stage sends on the groups that it got, and its own, each of the same form."""
    added = {group.name for group in stage.groups} if isinstance(stage, GroupStage) else set()
    if set(after) != set(before) | added:
        raise InvalidInput(
            f"stage {name}: sent the groups {sorted(after)}, expected {sorted({*before, *added})}; correct the stage"
        )
    form = before[PARAMETERS]
    for group, values in after.items():
        if values.shape != form.shape or values.dtype != form.dtype:
            raise InvalidInput(
                f"stage {name}: sent {values.dtype} {values.shape} for the group {group!r}, expected {form.dtype} "
                f"{form.shape}; correct the stage"
            )


def _checked_state(name: str, stage: Stage, state: State, num_values: int) -> State:
    """Return the next state of a stage. Raises InvalidInput if it has another form."""
    if sorted(state) != sorted(stage.tensors):
        raise InvalidInput(
            f"stage {name}: returned the state {sorted(state)}, expected {sorted(stage.tensors)}; correct the stage"
        )
    for tensor, values in state.items():
        if values.shape != (num_values,) or values.dtype != np.float32 or not np.isfinite(values).all():
            raise InvalidInput(
                f"stage {name}: returned {values.dtype} {values.shape} as its state {tensor!r}, expected finite "
                f"float32 ({num_values},); correct the stage"
            )
    return state

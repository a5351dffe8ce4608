"""The update pipeline of a device: the stages of its Assignment in their order, then the codec.

Each stage is called with a function ``send``, which runs the following stages and the codec. The result of ``send`` is
the coordinator's reading of the payload, so a stage knows the exact error of the later steps.

A stage sees the values of trained parameters alone, without gaps (``codecs.trained``). Statistics and counters go from
the training to the codec unchanged: a norm that is clipped together with them, or a residual that adds up from Round to
Round, would make wrong statistics of right ones. In the groups of stages their values are zero.

A stage may come from another package. Each of its exceptions, and each invalid value that it sends or returns, becomes
an InvalidInput that names the stage. The stage receives arrays as read-only views.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from fanin.edge.codecs.fixed import Encoded, RunCodec, decoded
from fanin.edge.codecs.stage import CountingStage, GroupStage, LocalSteps, Stage, StageContext, State
from fanin.edge.codecs.trained import Numbers, TrainedPart
from fanin.edge.codecs.vector import PARAMETERS, Vector, VectorLayout
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import FaninError, InvalidInput, foreign_text
from fanin.protos.plans import Training

States = Mapping[str, State]
"""The state of each stage, by its name."""
Decoded = Mapping[str, Float64s]
"""The groups as the coordinator reads them (num_values,), by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """The result of the pipeline.

    Attributes:
        encoded: The payload.
        states: The states of the stages after it.
        counts: The statistics that the stages add.
    """

    encoded: Encoded
    states: States
    counts: Mapping[str, int] = field(default_factory=dict)


def first_states(stages: Mapping[str, Stage], num_trained: int) -> States:
    """Return the states with which a device begins: zeros, one for each value of the trained parameters."""
    return {
        name: {tensor: np.zeros(num_trained, np.float32) for tensor in stage.tensors} for name, stage in stages.items()
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
        downlink: The auxiliary tensors of the Version (num_trained,), by name: without statistics and counters.
        counts: The counts of the trainer, by name.
        steps: The steps of the training; None without stages.
        is_clipped: Whether the codec clips the change. It then sends zeros for one that is not finite.
        rng_of: Returns the generator of a purpose and of the values that it rounds, the same for a repeated training.
    """

    codec: RunCodec
    grid: Sequence[int]
    learning_rate: float
    stages: Mapping[str, Stage]
    layout: VectorLayout
    downlink: Mapping[str, Float32s]
    rng_of: Callable[[str, Float32s], np.random.Generator]
    counts: Mapping[str, int] = field(default_factory=dict)
    steps: LocalSteps | None = None
    is_clipped: bool = False

    def apply(self, change: Float32s, num_steps: int, states: States) -> StagedUpdate:
        """Take a change through the stages and the codec.

        Args:
            change: New parameters minus the parameters of the Version (num_values,).
            num_steps: Optimizer steps of the training.
            states: The states before.

        Raises:
            InvalidInput: A stage breaks its contract; the text names it.
            ValueError: The change is not finite. The text names the first such tensor.
        """
        self.layout.check_group(PARAMETERS, change)
        if not self.is_clipped and not np.isfinite(change).all():
            name = next(
                name for name, values in self.layout.table.views(change).items() if not np.isfinite(values).all()
            )
            raise ValueError(
                f"update: tensor {name!r}: got NaN or infinity, expected finite values; the training diverged"
            )
        part = TrainedPart(self.layout.table)
        trained, averaged = part.split(change, 0) if self.stages else (change, change[:0])
        passing = _Pass(num_steps=num_steps, before=states, part=part, averaged=averaged)
        self._send(passing, tuple(self.stages), {PARAMETERS: trained})
        assert passing.encoded is not None, "each stage sends once, so the codec was reached"
        states = {name: passing.after[name] for name in self.stages}
        return StagedUpdate(encoded=passing.encoded, states=states, counts=passing.counts)

    def _send(self, passing: "_Pass", names: Sequence[str], vector: Vector) -> Decoded:
        """Take a vector through these stages and the codec."""
        if not names:
            passing.encoded = self._encode(passing.completed(vector))
            return self._decoded(passing.encoded, passing.part)
        name, stage, results = names[0], self.stages[names[0]], list[Decoded]()
        problems = list[Exception]()

        def send(changed: Vector) -> Decoded:
            try:
                if results:
                    raise InvalidInput(
                        f"stage {name}: sent two vectors, expected one; correct the stage", code="FN-0384"
                    )
                _check_vector(name, stage, vector, changed)
                results.append(self._send(passing, names[1:], changed))
            except Exception as exc:
                # The stage may handle the exception, but not hide it.
                problems.append(exc)
                raise
            return results[0]

        def report(statistic: str, count: int) -> None:
            if not isinstance(stage, CountingStage) or statistic not in stage.statistics:
                raise InvalidInput(
                    f"stage {name}: reported {statistic!r}, expected one of its statistics; correct the stage",
                    code="FN-0384",
                )
            passing.counts[statistic] = count

        context = StageContext(
            send=send,
            steps=self.steps or _steps_of(passing.num_steps, self.learning_rate),
            counts=MappingProxyType(dict(self.counts)),
            report=report,
            downlink=read_only(self.downlink),
            num_steps=passing.num_steps,
            learning_rate=self.learning_rate,
            rng=self.rng_of(name, vector[PARAMETERS]),
        )
        try:
            state = stage.apply(read_only(vector), read_only(passing.before[name]), context)
        except Exception as exc:  # Any error: the code may come from another package.
            if problems:
                raise problems[0] from None
            raise stage_error(name, "apply", exc) from exc
        if problems:
            raise problems[0]
        if not results:
            raise InvalidInput(f"stage {name}: sent no vector, expected one; correct the stage", code="FN-0384")
        passing.after[name] = _checked_state(name, stage, state, passing.part.trained.num_values)
        return results[0]

    def _encode(self, vector: Vector) -> Encoded:
        flat, codec = self.layout.join(vector), self.codec.codec
        rng = self.rng_of("", flat) if codec.is_stochastic else np.random.default_rng(0)
        return codec.encode(self.layout.total_table, flat, self.grid, self.codec.max_shift, rng)

    def _decoded(self, encoded: Encoded, part: TrainedPart) -> Decoded:
        """Return the coordinator's reading of the trained values by group. Without stages nothing needs it."""
        if not self.stages:
            return {}
        table = self.layout.total_table
        values = decoded(self.codec.codec, encoded.payload, table.num_values).astype(np.float64)
        for spec, start, exponent, shift in zip(table.specs, table.offsets, self.grid, encoded.shifts, strict=True):
            block = values[start : start + spec.num_values]
            np.ldexp(block, exponent + shift, out=block)
        spans = {group.name: slice(*self.layout.span(group.name)) for group in self.layout.groups}
        return read_only({name: part.split(values[span], 0)[0] for name, span in spans.items()})


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass through the pipeline."""

    num_steps: int
    before: States
    part: TrainedPart
    averaged: Float32s
    after: dict[str, State] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    encoded: Encoded | None = None

    def completed(self, vector: Vector) -> Vector:
        """Return a vector with the values that no stage sees: in its groups of stages, zeros."""
        zeros = np.zeros_like(self.averaged)
        others = {name: self.averaged if name == PARAMETERS else zeros for name in vector}
        return {name: self.part.join(values, others[name], 0) for name, values in vector.items()}


def _steps_of(num_steps: int, learning_rate: float) -> LocalSteps:
    """Return the steps of a training of which only the number and the rate are known."""
    training = Training(learning_rate=learning_rate)
    return LocalSteps(training=training, num_steps=num_steps, planned_steps=num_steps, round=1)


def read_only(arrays: Mapping[str, npt.NDArray[Numbers]]) -> Mapping[str, npt.NDArray[Numbers]]:
    """Return read-only views of arrays, in a mapping that cannot be changed."""
    views = {name: values.view() for name, values in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return MappingProxyType(views)


def stage_error(name: str, member: str, exc: Exception) -> FaninError:
    """Return the error for an exception of a stage: one line that names the stage. A FaninError is returned unchanged.

    Args:
        name: The name of the stage.
        member: The method that raised the exception.
        exc: The exception.
    """
    if isinstance(exc, FaninError):
        return exc
    return InvalidInput(f"stage {name}: {member} raised {foreign_text(exc)}; correct the stage", code="FN-0213")


def form_of(values: object) -> str:
    """Return dtype and shape of an array or of a scalar of numpy for an error message, or the type of another value."""
    return f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray | np.generic) else type(values).__name__


def check_mapping(name: str, verb: str, value: object, expected: str) -> None:
    """Raise InvalidInput unless a stage has sent or returned a mapping."""
    if not isinstance(value, Mapping):
        raise InvalidInput(
            f"stage {name}: {verb} {form_of(value)}, expected {expected}; correct the stage", code="FN-0384"
        )


def _check_vector(name: str, stage: Stage, before: Vector, after: Vector) -> None:
    """Raise InvalidInput unless a stage sends the groups that it received, and its own, each of the same form."""
    added = {group.name for group in stage.groups} if isinstance(stage, GroupStage) else set()
    expected = sorted({*before, *added})
    check_mapping(name, "sent", after, f"a mapping of the groups {expected}")
    if set(after) != set(expected):
        raise InvalidInput(
            f"stage {name}: sent the groups {sorted(map(str, after))}, expected {expected}; correct the stage",
            code="FN-0384",
        )
    form = form_of(before[PARAMETERS])
    for group, values in after.items():
        if form_of(values) != form:
            raise InvalidInput(
                f"stage {name}: sent {form_of(values)} for the group {group!r}, expected {form}; correct the stage",
                code="FN-0384",
            )
        if not np.isfinite(values).all():
            raise InvalidInput(
                f"stage {name}: sent NaN or infinity in the group {group!r}, expected finite values; correct the stage",
                code="FN-0384",
            )


def _checked_state(name: str, stage: Stage, state: State, num_values: int) -> State:
    """Return the next state of a stage. Raises InvalidInput if it has another form."""
    check_mapping(name, "returned", state, f"its state, a mapping of {sorted(stage.tensors)}")
    if set(state) != set(stage.tensors):
        raise InvalidInput(
            f"stage {name}: returned the state {sorted(map(str, state))}, expected {sorted(stage.tensors)}; correct "
            "the stage",
            code="FN-0384",
        )
    form = f"float32 ({num_values},)"
    for tensor, values in state.items():
        if form_of(values) != form or not np.isfinite(values).all():
            raise InvalidInput(
                f"stage {name}: returned {form_of(values)} as its state {tensor!r}, expected finite {form}; correct "
                "the stage",
                code="FN-0384",
            )
    return dict(state)

"""The Protocol ``Trainer``, and the conversion of its Change by stages and codec to an Update on the Round's grid.

A training and its Update can be repeated after a crash. So the stages start from the state that the Assignment names,
never from the newest one. Their random numbers are derived from the Assignment and the change.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.protocols import StoredStates
from fanin.clients.device.storage.states import StateLabel
from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.clipped import clipping, has_clip_bit, with_clip_bit
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import Encoded
from fanin.edge.codecs.pipeline import (
    StagedUpdate,
    States,
    UpdatePipeline,
    check_mapping,
    first_states,
    form_of,
    read_only,
    stage_error,
)
from fanin.edge.codecs.stage import GroupStage, LocalSteps, Stage
from fanin.edge.codecs.stages import added_groups, layout_of
from fanin.edge.codecs.statistics import fitted
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.ranges import RANGES
from fanin.edge.tensors import Float32s, TensorTable, sha256_hex
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import Corrupted, InvalidInput, InvalidVersion, NotFound
from fanin.protos.plans.schedule import mean_rate

LOG = logging.getLogger("fanin.clients")
ROUNDING_STREAM: Final = 0x726E6464
"""Separates the generators of an Update from those of the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The result of training. The session adds the encoding, the duration and the traffic.

    Attributes:
        values: New parameters minus the parameters of the Version (num_values,), float32, finite. They do not include
            personal parameters, which are never sent.
        counts: Statistics: integer sums over examples. ``examples`` is the weight of the Update. Undeclared statistics
            are dropped, and those beyond their bound are cut.
        num_steps: Optimizer steps, for the telemetry and the stages.
        planned_steps: Steps of the complete work, if this device did fewer; 0 if it did all.
        local: New personal parameters (num_local_values,), float32, finite; with Ditto the new copy of all parameters
            (num_values,). None if the Run has neither.
        ranges: The ranges of the Version's activations on some of the examples, if the Assignment asks for them and
            the trainer can measure them. ``RuntimeTrainer`` does.

    Raises:
        ValueError: A field has another type, or ``num_steps`` is negative.
    """

    values: Float32s
    counts: Mapping[str, int]
    num_steps: int = 0
    planned_steps: int = 0
    local: Float32s | None = None
    ranges: m.RangeCounts = field(default_factory=m.RangeCounts)

    def __post_init__(self) -> None:
        # The fields may come from the code of an app, without types.
        for name, values in (("values", self.values), ("local", self.local)):
            if not isinstance(values, np.ndarray) and (name, values) != ("local", None):
                raise ValueError(f"change: got {type(values).__name__} for {name}, expected an array of float32")
        if not isinstance(self.counts, Mapping):
            raise ValueError(f"change: got {type(self.counts).__name__} for counts, expected a mapping of statistics")
        for name, count in self.counts.items():
            if not _is_whole(count):
                raise ValueError(f"change: got {count!r} for the count {name!r}, expected a whole number")
            if name in (m.EXAMPLES, m.EVAL_EXAMPLES) and count > m.MAX_COUNT:
                raise ValueError(f"change: got {name} = {count}, expected at most {m.MAX_COUNT}")
        for name, steps in (("num_steps", self.num_steps), ("planned_steps", self.planned_steps)):
            if not _is_whole(steps) or steps < 0:
                raise ValueError(f"change: got {steps!r} for {name}, expected a whole number of at least 0")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)


class UnfitExamples(ValueError):
    """The examples of this device do not fit the model of a Bundle: it trains again after either has changed.

    Args:
        text: What does not fit, and how to convert it.
        has_changed: Returns whether the device has other examples now.
    """

    def __init__(self, text: str, has_changed: Callable[[], bool]) -> None:
        super().__init__(text)
        self.has_changed = has_changed


class Trainer(Protocol):
    """Trains a model on a device's examples.

    ``fanin.clients.device.contract.check_trainer`` checks an implementation.
    """

    @property
    def runtime(self) -> str:
        """The library and its version."""
        ...

    @property
    def graph_format(self) -> str:
        """The format of the graphs that the trainer runs."""
        ...

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Train for one Round and return the change of the parameters.

        A training may be repeated, after an interruption or a crash. It must then return bit-identical values, so
        derive all random numbers from ``app_seed(model, assignment, partition)``. On a device, the coordinator cannot
        compute this seed.

        Args:
            model: The Bundle and the parameters to start from. Do not change them. ``model.values()`` has all
                parameters of the graphs.
            assignment: Epochs, learning rate and seed.
            should_continue: Call it before each batch, also before each batch of an evaluation. It returns True, or
                raises Interrupted if the device must stop. Do not catch the exception.

        Raises:
            Interrupted: ``should_continue`` raised it.
            Diverged: The loss or the parameters are not finite.
            UnfitExamples: The examples do not fit the model.
            InvalidInput: The graph does not fit the model.
        """
        ...


@runtime_checkable
class ReportsSteps(Protocol):
    """A trainer that knows how far it is. Other trainers are reported as working, without steps."""

    def progress_of(self, assignment_id: str) -> m.TrainingProgress:
        """Return the last step of the training of an Assignment. May be called from any thread."""
        ...


def progress_of(trainer: object, assignment_id: str) -> m.TrainingProgress:
    """Return how far a trainer is; no steps if it does not know."""
    if not isinstance(trainer, ReportsSteps):
        return m.TrainingProgress()
    try:
        return trainer.progress_of(assignment_id)
    except Exception:
        # The trainer may be the app's code. The device works, whatever its trainer says about its steps.
        LOG.debug("progress: the trainer failed", exc_info=True)
        return m.TrainingProgress()


@runtime_checkable
class SizingTrainer(Trainer, Protocol):
    """A Trainer that knows the lengths of its rows before it trains."""

    def row_sizes(self, bundle: Bundle) -> Collection[int]:
        """Return those of a Bundle's lengths whose graphs the next training runs.

        Raises:
            UnfitExamples: The examples do not fit the model.
            InvalidInput: The examples cannot be read.
        """
        ...


def row_sizes(trainer: Trainer, bundle: Bundle) -> Collection[int]:
    """Return the lengths whose graphs a Trainer needs: all of the Bundle's, unless it knows its rows. Raises as it."""
    if bundle.manifest.lengths is None:
        return ()
    if not isinstance(trainer, SizingTrainer):
        return bundle.manifest.lengths.sizes
    return trainer.row_sizes(bundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The stages of an Assignment, with everything that they read.

    Attributes:
        stages: The stages by name, in their order.
        table: Names, shapes and roles of the parameters.
        states: The states before the Update.
        downlink: The auxiliary tensors of the Version (num_trained,), by name: without statistics and counters.
        device_seed: Seed of what the stages draw; None in a simulation.
        momentum: Momentum of the optimizer in the train graph, if the Plan does not set it.
    """

    stages: Mapping[str, Stage]
    table: TensorTable
    states: States
    downlink: Mapping[str, Float32s]
    device_seed: bytes | None = None
    momentum: float = 0.0

    @property
    def has_state(self) -> bool:
        """Whether there is anything to store with the Update."""
        return any(stage.tensors for stage in self.stages.values())

    def inputs(self) -> Mapping[str, Float32s]:
        """Return the inputs of the train graph (num_values,), by kind. They are zero for statistics and counters.

        Raises:
            InvalidInput: A stage raised an exception, an input has another form, or two stages set it. The text names
                the stage.
        """
        inputs: dict[str, Float32s] = {}
        part = TrainedPart(self.table)
        zeros = np.zeros(part.averaged.num_values, np.float32)
        for name, stage in self.stages.items():
            if not isinstance(stage, GroupStage):
                continue
            try:
                theirs = stage.prepare(read_only(self.states[name]), read_only(self.downlink))
            except Exception as exc:  # Any error: the code may come from another package.
                raise stage_error(name, "prepare", exc) from exc
            check_mapping(name, "returned", theirs, "a mapping of the inputs of the train graph")
            for kind, values in theirs.items():
                form = f"float32 ({part.trained.num_values},)"
                if kind in inputs or form_of(values) != form or not np.isfinite(values).all():
                    raise InvalidInput(
                        f"stage {name}: got {form_of(values)} for the input {kind!r} of the train graph, expected "
                        f"finite {form}, from one stage only; correct the stage",
                        code="FN-0839",
                    )
                inputs[kind] = part.join(values, zeros, 0)
        return inputs


def unstaged(table: TensorTable) -> Staging:
    """Return no stages, for parameters with this table."""
    return Staging(stages={}, table=table, states={}, downlink={})


def downlink_names(assignment: m.Assignment, stages: Mapping[str, Stage]) -> tuple[str, ...]:
    """Return the names of the auxiliary tensors to download: none in the first Version of a lineage.

    Raises:
        InvalidInput: The state is of no earlier Round, or of a later lineage.
        InvalidVersion: The first Version of a lineage has auxiliary tensors of stages.
    """
    state, version = assignment.state, assignment.version
    if not stages:
        return ()
    if state.round >= assignment.round or state.lineage > version.number:
        raise InvalidInput(
            f"assignment {assignment.assignment_id}: got the state of round {state.round}, lineage {state.lineage}, "
            f"expected a round before {assignment.round} and a lineage up to version {version.number}",
            code="FN-0831",
        )
    if state.lineage < version.number:
        return tuple(group.name for group in added_groups(stages))
    if tensors := sorted(set(version.auxiliary) - {RANGES}):
        raise InvalidVersion(
            f"version {version.number} of run {version.run_id}: got the auxiliary tensors {tensors}, "
            "expected none in the first version of a lineage",
            code="FN-0831",
        )
    return ()


def begin_stages(
    assignment: m.Assignment, stages: Mapping[str, Stage], model: OpenedModel, stored: StoredStates
) -> Staging:
    """Return the stages with the state that the Assignment names.

    A missing or unusable state is logged, and the stages start from zeros.
    """
    table = table_in(model.bundle.manifest, assignment.flower)
    part = TrainedPart(table)
    states = first_states(stages, part.trained.num_values)
    if assignment.state.round and any(states.values()):
        try:
            states = stored.get(state_label(assignment, assignment.state.round), states)
        except (NotFound, Corrupted) as exc:
            LOG.warning("%s; the stages begin with zeros", exc)
    zeros = np.zeros(table.num_values, np.float32)
    downlink = {group.name: part.split(model.auxiliary.get(group.name, zeros), 0)[0] for group in added_groups(stages)}
    setting, seed = model.bundle.manifest.optimizer.get("momentum"), model.device_seed
    momentum = 0.0 if setting is None else setting.default
    return Staging(stages=stages, table=table, states=states, downlink=downlink, device_seed=seed, momentum=momentum)


def state_label(assignment: m.Assignment, number: int) -> StateLabel:
    """Return the label of the state after the device's Update of a Round, in the lineage of an Assignment."""
    return StateLabel(run_id=assignment.run_id, lineage=assignment.state.lineage, round=number)


def apply_stages(assignment: m.Assignment, change: Change, staging: Staging) -> StagedUpdate:
    """Take a Change through the stages and the codec.

    Args:
        assignment: Names the codec, the grid and the learning rate.
        change: The result of training.
        staging: The stages.

    Raises:
        InvalidPlan: The codec is unknown, its options are wrong, or it breaks its contract.
        InvalidInput: The change has another shape or dtype, or a stage breaks its contract.
        ValueError: The change is not finite.
    """
    training, planned = assignment.training, change.planned_steps or change.num_steps
    pipeline = UpdatePipeline(
        codec=clipping(codec_of(assignment.codec), assignment.privacy),
        is_clipped=assignment.privacy is not None,
        grid=assignment.grid,
        learning_rate=mean_rate(training, change.num_steps, planned, assignment.round),
        counts=change.counts,
        steps=LocalSteps(
            training=training,
            num_steps=change.num_steps,
            planned_steps=planned,
            round=assignment.round,
            momentum=training.optimizer.get("momentum", staging.momentum),
        ),
        stages=staging.stages,
        layout=layout_of(staging.table, staging.stages),
        downlink=staging.downlink,
        rng_of=partial(generator, assignment, staging.device_seed),
    )
    return pipeline.apply(change.values, change.num_steps, staging.states)


def header_of(assignment: m.Assignment, encoded: Encoded, change: Change, telemetry: m.Telemetry) -> m.UpdateHeader:
    """Return the header of an Update.

    Args:
        assignment: The Assignment.
        encoded: The payload.
        change: The result of the training, whose statistics and ranges are sent.
        telemetry: Runtime, times and traffic.
    """
    counts = dict(change.counts) | {m.ROUNDED: encoded.num_rounded, m.SATURATED: encoded.num_saturated}
    has_bit = has_clip_bit(assignment)
    if assignment.privacy is not None:
        # Both depend on data. The Assignment declares no count but the weight, and the clip bit if the clip norm
        # adapts; ``fitted`` drops the others.
        telemetry = replace(telemetry, train_s=0.0, num_steps=0)
        if has_bit:
            counts[m.CLIP_BITS] = encoded.clip_bit
    return m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=assignment.assignment_id,
        run_id=assignment.run_id,
        round=assignment.round,
        version_sha256=assignment.version.sha256,
        codec=assignment.codec.name,
        shifts=encoded.shifts,
        payload=artifact_of(encoded.payload),
        statistics=m.Statistics(counts=MappingProxyType(fitted(counts, assignment.statistics))),
        telemetry=telemetry,
        ranges=change.ranges if assignment.range_examples else m.RangeCounts(),
    )


def make_update(
    assignment: m.Assignment, table: TensorTable, change: Change, telemetry: m.Telemetry
) -> tuple[m.UpdateHeader, bytes]:
    """Return the header and the payload of a Change without stages; see ``apply_stages`` and ``header_of``."""
    encoded = apply_stages(assignment, change, unstaged(table)).encoded
    return with_clip_bit(assignment, header_of(assignment, encoded, change, telemetry), encoded.payload)


def generator(
    assignment: m.Assignment, device_seed: bytes | None, purpose: str, values: Float32s
) -> np.random.Generator:
    """Return the generator of a stage, or of the codec (""), for these values; the same for a repeated training.

    The seed includes a digest of the values. A seed of the partition would be equal on many devices, because many use
    the default partition. With equal seeds, their rounding errors would add up.

    A stage may be code of the device that adds noise for privacy, so its seed includes ``device_seed``. The rounding of
    the codec follows the Plan alone.
    """
    digest = int(sha256_hex(values.astype("<f4", copy=False).tobytes()), 16)
    stream = (int(sha256_hex(purpose.encode()), 16),) if purpose else ()
    if purpose and device_seed is not None:
        stream = (*stream, int.from_bytes(device_seed, "big"))
    seeds = (ROUNDING_STREAM, assignment.training.seed, assignment.round, digest, *stream)
    return np.random.default_rng(np.random.SeedSequence(seeds))

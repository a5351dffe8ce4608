"""The contracts of stages and codecs, as checks for the tests of one's own."""

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np

from fanin.edge.codecs.codec import guarded_codec
from fanin.edge.codecs.fixed import CODECS, Codec, Encoded, Integers, RunCodec, decoded, largest_value, payload_bytes
from fanin.edge.codecs.pipeline import UpdatePipeline, first_states, form_of, read_only, stage_error
from fanin.edge.codecs.stage import GroupStage, Stage, StageContext, State
from fanin.edge.codecs.stages import check_members, layout_of
from fanin.edge.codecs.vector import PARAMETERS, Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s, TensorTable

_TABLE: Final = TensorTable.of({"weights": (7, 9), "bias": (9,), "none": (0,)})
_STEP: Final = -9
_MAX_SHIFT: Final = 4
_NUM_STEPS: Final = 3


def check_stage(stage: Stage, *, num_rounds: int = 4, seed: int = 1) -> None:
    """Check that a stage keeps the contract that devices and the coordinator rely on.

    The stage runs alone, and behind a stage that adds a group to the vector, as ``scaffold`` does.

    Args:
        stage: The stage.
        num_rounds: Number of Rounds in which the simulated device takes part.
        seed: Seed of the changes.

    Raises:
        AssertionError: The stage breaks the contract. The text says how.
        InvalidInput: A vector or a state of the stage is refused, a method raises an exception, or ``apply`` or
            ``prepare`` writes to its inputs.
        InvalidPlan: ``tensors`` or ``groups`` are wrong, or the stage adds a group that exists.
    """
    check_members(stage, "stage")
    if isinstance(stage, GroupStage):
        _check_groups(stage)
    alone: Mapping[str, Stage] = {"stage": stage}
    first = _First()
    if isinstance(stage, GroupStage) and any(group.name == first.group for group in stage.groups):
        # A group may have any name.
        first = _First("other-group")
    for stages in (alone, {"first": first, **alone}):
        for codec in CODECS:
            expected = _rounds(stages, codec, num_rounds, seed)
            assert _rounds(stages, codec, num_rounds, seed) == expected, "apply: a repetition gave other bits"


class _First:
    """A stage without state that adds a group."""

    tensors = ()

    def __init__(self, group: str = "first-group") -> None:
        self.group = group
        self.groups = (Group(name=group, weighting=Weighting.ONE),)

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        return {}

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        context.send({**vector, self.group: vector[PARAMETERS] * np.float32(0.5)})
        return {}

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        return auxiliary


def _rounds(stages: Mapping[str, Stage], codec: str, num_rounds: int, seed: int) -> list[bytes]:
    """Return the bits of the payloads and of the states of ``stage`` after each of some Rounds."""
    layout, rng, bits = layout_of(_TABLE, stages), np.random.default_rng(seed), list[bytes]()
    names, stage = [group.name for group in layout.groups[1:]], stages["stage"]
    states = first_states(stages, _TABLE.num_values)
    for number in range(num_rounds):
        downlink = {name: _some(rng) for name in names}
        pipeline = UpdatePipeline(
            codec=RunCodec(codec=CODECS[codec], max_shift=_MAX_SHIFT),
            grid=layout.for_all([_STEP] * len(_TABLE.specs)),
            learning_rate=0.5,
            stages=stages,
            layout=layout,
            downlink=downlink,
            rng_of=partial(_rng, (seed, number)),
        )
        if isinstance(stage, GroupStage):
            _check_inputs(stage, states["stage"], downlink)
        update = pipeline.apply(_some(rng), _NUM_STEPS, states)
        states = update.states
        bits += [update.encoded.payload, *_bits(states["stage"])]
    return bits


def _rng(seeds: tuple[int, int], purpose: str, _values: Float32s) -> np.random.Generator:
    return np.random.default_rng([*seeds, len(purpose)])


def _check_inputs(stage: GroupStage, state: State, downlink: Mapping[str, Float32s]) -> None:
    try:
        inputs = stage.prepare(read_only(state), read_only(downlink))
    except Exception as exc:  # Any error: the code may come from another package.
        raise stage_error("stage", "prepare", exc) from exc
    assert isinstance(inputs, Mapping), f"prepare: got {form_of(inputs)}, expected a mapping of arrays"
    for kind, values in inputs.items():
        expected = f"float32 ({_TABLE.num_values},)"
        assert form_of(values) == expected, f"prepare: got {form_of(values)} for {kind}, expected {expected}"


def _check_groups(stage: GroupStage) -> None:
    rng = np.random.default_rng(0)
    auxiliary, aggregate = (rng.normal(0.0, 0.1, _TABLE.num_values) for _ in range(2))
    expected = _advanced(stage, auxiliary, aggregate)
    for cut in (1, 5, 40):
        parts = [_advanced(stage, auxiliary[part], aggregate[part]) for part in (slice(0, cut), slice(cut, None))]
        assert np.array_equal(np.concatenate(parts), expected), "advance: the lengths of slices changed bits"


def _advanced(stage: GroupStage, auxiliary: Float64s, aggregate: Float64s) -> Float64s:
    try:
        values = stage.advance(auxiliary.copy(), aggregate.copy(), 3)
    except Exception as exc:  # Any error: the code may come from another package.
        raise stage_error("stage", "advance", exc) from exc
    assert form_of(values) == form_of(auxiliary), f"advance: got {form_of(values)}, expected {form_of(auxiliary)}"
    return values


def _some(rng: np.random.Generator) -> Float32s:
    return rng.normal(0.0, 0.1, _TABLE.num_values).astype(np.float32)


def _bits(state: State) -> list[bytes]:
    return [state[name].tobytes() for name in sorted(state)]


def check_codec(codec: Codec, *, seed: int = 1) -> None:
    """Check that a codec keeps the contract that devices and the coordinator rely on.

    Args:
        codec: The codec.
        seed: Seed of the changes.

    Raises:
        AssertionError: The codec breaks the contract. The text says how.
        InvalidPlan: A result has another form, or a method raises an exception.
    """
    codec = guarded_codec(codec, "codec")
    rng = np.random.default_rng(seed)
    for scale in (0.0, 2.0**-12, 0.1, 3.0, 1e4):
        change = rng.normal(0.0, scale, _TABLE.num_values).astype(np.float32)
        encoded, repeated = (_encoded(codec, change, seed) for _ in range(2))
        assert encoded == repeated, "encode: a repetition with the same generator gave another result"
        payload = memoryview(encoded.payload)
        values = decoded(codec, encoded.payload, _TABLE.num_values)
        cut = payload_bytes(codec.bits, 6)
        parts = [codec.decode(payload[:cut]), codec.decode(payload[cut:])]
        assert np.array_equal(np.concatenate(parts), values), "decode: slices gave other values than the whole payload"
        _check_rounding(codec, change, encoded, values)


def _encoded(codec: Codec, change: Float32s, seed: int) -> Encoded:
    return codec.encode(_TABLE, change, [_STEP] * len(_TABLE.specs), _MAX_SHIFT, np.random.default_rng(seed))


def _check_rounding(codec: Codec, change: Float32s, encoded: Encoded, values: Integers) -> None:
    """Check that a value is rounded by less than a step, and that the values beyond the range are set to its end."""
    limit = largest_value(codec.bits)
    for spec, start, shift in zip(_TABLE.specs, _TABLE.offsets, encoded.shifts, strict=True):
        block = slice(start, start + spec.num_values)
        scaled = np.ldexp(change[block].astype(np.float64), -_STEP - shift)
        error = float(np.abs(values[block] - np.clip(scaled, -limit, limit)).max(initial=0.0))
        assert error < 1.0, f"encode: moved a value of {spec.name} by {error:g} steps, expected less than 1"

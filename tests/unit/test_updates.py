"""The device's pipeline from the change of a training to an Update that the coordinator accepts."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.errors import raises
from support.values import GRID, TABLE, assignment, parameters

from fanin.clients.device.updates import Change, Staging, apply_stages, generator, make_update
from fanin.edge.codecs.fixed import largest_value
from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import Group, Vector
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.server.runs.validation import Expected, check_header

WORK = assignment()
TELEMETRY = m.Telemetry(runtime="synthetic 1", train_s=2.0)


def change_of(values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> Change:
    return Change(values=values, counts={m.EXAMPLES: 12, m.TRAIN_LOSS: 99})


def test_an_update_describes_itself_and_its_coordinator_accepts_it() -> None:
    header, payload = make_update(WORK, TABLE, change_of(parameters(2.0**-20)), TELEMETRY)
    assert header == m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=WORK.assignment_id,
        run_id="run",
        round=1,
        version_sha256=WORK.version.sha256,
        codec="fixed32",
        shifts=(0, 0, 0),
        payload=artifact_of(payload),
        statistics=m.Statistics(counts={m.EXAMPLES: 12, m.TRAINED: 12, m.TRAIN_LOSS: 99, m.ROUNDED: 0, m.SATURATED: 0}),
        telemetry=TELEMETRY,
    )
    check_header(
        header,
        Expected(
            run_id="run",
            round=1,
            version_sha256=WORK.version.sha256,
            codec=WORK.codec,
            payload_bytes=4 * TABLE.num_values,
            table=TABLE,
            num_labels=2,
            statistics=WORK.statistics,
        ),
    )


def test_the_payload_is_the_change_in_grid_steps() -> None:
    change = parameters(2.0**-20)
    _, payload = make_update(WORK, TABLE, change_of(change), TELEMETRY)
    blocks = TABLE.views(np.frombuffer(payload, "<i4").astype(np.float64))
    for (name, steps), exponent in zip(blocks.items(), GRID, strict=True):
        assert (steps * 2.0**exponent == TABLE.views(change)[name]).all()


def int8_work(max_shift: int = 12) -> m.Assignment:
    return replace(WORK, codec=m.CodecSpec(name="int8", max_shift=max_shift))


def test_an_int8_update_has_a_byte_a_value_and_is_reproducible() -> None:
    change = parameters(1e-6)
    header, payload = make_update(int8_work(), TABLE, change_of(change), TELEMETRY)
    assert len(payload) == header.payload.size_bytes == TABLE.num_values
    assert header.statistics.counts[m.ROUNDED] > 0
    assert make_update(int8_work(), TABLE, change_of(change.copy()), TELEMETRY) == (header, payload)


def test_other_changes_and_other_rounds_are_rounded_differently() -> None:
    # Every value is half a step, so its rounding is random.
    table = TensorTable.of({"a": (256,)})
    step = 2.0 ** GRID[0]
    work = replace(int8_work(0), grid=GRID[:1])
    halves = np.full(256, 0.5 * step, np.float32)
    others = np.append(halves[:-1], np.float32(0.25 * step))
    payloads = [
        make_update(each, table, change_of(change), TELEMETRY)[1]
        for each, change in (
            (work, halves),
            (work, others),
            (replace(work, round=2), halves),
            (replace(work, training=replace(work.training, seed=8)), halves),
        )
    ]
    ups = [np.frombuffer(payload, "<i1")[:-1] for payload in payloads]
    assert all(set(up.tolist()) == {0, 1} for up in ups)
    for index, up in enumerate(ups):
        assert all((up != other).mean() > 0.3 for other in ups[index + 1 :])


def test_rounded_and_saturated_values_are_counted() -> None:
    change = np.zeros(TABLE.num_values, np.float32)
    change[0], change[1] = 2.0**20, 2.0**-40
    header, payload = make_update(WORK, TABLE, change_of(change), TELEMETRY)
    assert header.shifts == (2, 0, 0)
    assert header.statistics.counts[m.SATURATED] == 1
    assert header.statistics.counts[m.ROUNDED] == 1
    assert np.frombuffer(payload, "<i4")[0] == largest_value(32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_training_that_diverged_creates_no_update(value: float) -> None:
    change = parameters()
    change[3] = value
    with raises(ValueError, "update: tensor 'a': got NaN or infinity, expected finite values; the training diverged"):
        make_update(WORK, TABLE, change_of(change), TELEMETRY)


def test_an_unknown_codec_creates_no_update() -> None:
    work = replace(WORK, codec=m.CodecSpec(name="int08", max_shift=0))
    with raises(
        InvalidPlan,
        "plan: codec.name: got 'int08', expected one of ['fixed32', 'int16', 'int4', 'int8', 'topk'], which are "
        "installed here; did you mean int8?",
    ):
        make_update(work, TABLE, change_of(parameters()), TELEMETRY)


class Drawing:
    """A stage that records its random numbers."""

    tensors: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.draws: list[bytes] = []

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        self.draws.append(context.rng.random(4).tobytes())
        context.send(vector)
        return {}


def test_each_stage_has_random_numbers_of_its_own_which_a_repetition_repeats() -> None:
    one, two = Drawing(), Drawing()
    staging = Staging(stages={"one": one, "two": two}, table=TABLE, states={"one": {}, "two": {}}, downlink={})
    change = change_of(parameters())
    for work in (int8_work(), int8_work(), replace(int8_work(), round=2)):
        apply_stages(work, change, staging)
    (first, repetition, later), (other, *_) = one.draws, two.draws
    assert first == repetition
    assert len({first, later, other}) == 3


def test_a_stage_draws_other_random_numbers_than_the_codec() -> None:
    stage, values = Drawing(), parameters()
    staging = Staging(stages={"x": stage}, table=TABLE, states={"x": {}}, downlink={})
    apply_stages(int8_work(), change_of(values), staging)
    codecs = generator(int8_work(), None, "", values).random(4).tobytes()
    assert stage.draws == [generator(int8_work(), None, "x", values).random(4).tobytes()]
    assert stage.draws != [codecs]


def test_a_stage_draws_from_the_secret_of_the_device_and_the_codec_does_not() -> None:
    values, seeds = parameters(), (None, b"\x01" * 32, b"\x02" * 32)
    of_stage, of_codec = (
        {generator(int8_work(), seed, purpose, values).random(4).tobytes() for seed in seeds} for purpose in ("x", "")
    )
    assert (len(of_stage), len(of_codec)) == (3, 1)


def test_stages_change_no_bit_of_the_codecs_own_rounding() -> None:
    change, stages = change_of(parameters(1e-6)), {"one": Drawing()}
    result = apply_stages(int8_work(), change, Staging(stages=stages, table=TABLE, states={"one": {}}, downlink={}))
    assert result.encoded.payload == make_update(int8_work(), TABLE, change, TELEMETRY)[1]


class Setting(Drawing):
    """A stage that sets the input ``control`` to these values."""

    groups: tuple[Group, ...] = ()

    def __init__(self, values: Float32s) -> None:
        super().__init__()
        self._values = values

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        return {"control": self._values}

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        return auxiliary


def staging_of(**values: Float32s) -> Staging:
    stages = {name: Setting(each) for name, each in values.items()}
    table = TensorTable.of({"w": (3,)})
    return Staging(stages=stages, table=table, states={name: {} for name in stages}, downlink={})


def test_the_inputs_of_a_train_graph_have_one_value_for_each_parameter_and_one_stage() -> None:
    right = np.zeros(3, np.float32)
    assert staging_of(one=right).inputs() == {"control": right}
    for wrong, form in ((right[1:], "float32 (2,)"), (right.astype(np.float64), "float64 (3,)"), ([0.0] * 3, "list")):
        with raises(
            InvalidInput,
            f"stage one: got {form} for the input 'control' of the train graph, expected finite float32 (3,), from one "
            "stage only; correct the stage",
        ):
            staging_of(one=wrong).inputs()  # type: ignore[arg-type]
    with raises(
        InvalidInput,
        "stage two: got float32 (3,) for the input 'control' of the train graph, expected finite float32 (3,), from "
        "one stage only; correct the stage",
    ):
        staging_of(one=right, two=right).inputs()


class Failing(Setting):
    """A stage whose ``prepare`` returns nothing, fails, or writes to the state."""

    def __init__(self, fault: str) -> None:
        super().__init__(np.zeros(3, np.float32))
        self._fault = fault

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        if self._fault == "raise":
            raise KeyError("nope")
        if self._fault == "write":
            downlink["control"][:] = 1
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "prepare raised KeyError: 'nope'"),
        ("write", "prepare raised ValueError: assignment destination is read-only"),
        ("none", "returned NoneType, expected a mapping of the inputs of the train graph"),
    ],
)
def test_a_stage_whose_preparation_fails_is_named(fault: str, text: str) -> None:
    downlink = {"control": np.zeros(3, np.float32)}
    with raises(InvalidInput, f"stage odd: {text}; correct the stage"):
        Staging(
            stages={"odd": Failing(fault)}, table=TensorTable.of({"w": (3,)}), states={"odd": {}}, downlink=downlink
        ).inputs()

"""Laws of stages: error feedback loses no part of a change, and SCAFFOLD's c stays the mean of all c_i."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.contract import check_stage
from fanin.edge.codecs.fixed import decoded
from fanin.edge.codecs.pipeline import UpdatePipeline, first_states
from fanin.edge.codecs.scaffold import Scaffold
from fanin.edge.codecs.stage import Stage, StageContext, State
from fanin.edge.codecs.stages import ErrorFeedback, layout_of, stages_of
from fanin.edge.codecs.vector import PARAMETERS, Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import CodecSpec, StageSpec
from fanin.protos.plans import CODEC_BITS

TABLE = TensorTable.of({"a": (5,), "b": (2, 3)})
NUM = TABLE.num_values
FEEDBACK = StageSpec(name="error_feedback")
SCAFFOLD = StageSpec(name="scaffold", options={"num_devices": 4.0})


def pipeline(
    stages: Mapping[str, Stage], codec: str, exponent: int, downlink: Mapping[str, Float32s]
) -> UpdatePipeline:
    layout = layout_of(TABLE, stages)
    return UpdatePipeline(
        codec=codec_of(CodecSpec(name=codec, max_shift=2)),
        grid=[exponent] * len(layout.total_table.specs),
        learning_rate=0.5,
        stages=stages,
        layout=layout,
        downlink=downlink,
        rng_of=lambda purpose, values: np.random.default_rng([len(purpose), values.size]),
    )


def decoded_change(update_pipeline: UpdatePipeline, payload: bytes, shifts: tuple[int, ...]) -> Float64s:
    """Return the change of the parameters as the coordinator reads it, by the formula of fleet.proto."""
    values = decoded(update_pipeline.codec.codec, payload, NUM).astype(np.float64)
    for spec, start, exponent, shift in zip(TABLE.specs, TABLE.offsets, update_pipeline.grid, shifts, strict=False):
        values[start : start + spec.num_values] *= 2.0 ** (exponent + shift)
    return values


Changes = list[list[float]]
CHANGES = st.lists(st.lists(st.floats(-2, 2, width=32), min_size=NUM, max_size=NUM), min_size=1, max_size=6)


def sent_and_left(changes: list[Float32s], codec: str, exponent: int) -> Float64s:
    """Return the sum of all changes as the coordinator reads them, plus the residual after the last one."""
    stages = stages_of([FEEDBACK])
    states, total_sent = first_states(stages, NUM), np.zeros(NUM)
    for change in changes:
        line = pipeline(stages, codec, exponent, {})
        update = line.apply(change, 1, states)
        states, encoded = update.states, update.encoded
        total_sent += decoded_change(line, encoded.payload, encoded.shifts)
    return total_sent + states["error_feedback"]["residual"]


@given(CHANGES, st.sampled_from(sorted(CODEC_BITS)), st.integers(-12, -2))
def test_the_sent_changes_and_the_residual_sum_to_all_changes(changes: Changes, codec: str, exponent: int) -> None:
    """The sums differ only by the rounding of float32."""
    arrays = [np.array(change, np.float32) for change in changes]
    np.testing.assert_allclose(sent_and_left(arrays, codec, exponent), np.sum(arrays, axis=0), atol=1e-5)


@given(CHANGES, st.sampled_from(sorted(CODEC_BITS)), st.integers(-12, -2))
def test_multiples_of_a_power_of_two_are_sent_or_left_to_the_bit(changes: Changes, codec: str, exponent: int) -> None:
    """Sums of multiples of 2^-18 are exact in float32, and so are the steps. Only the codec rounds."""
    arrays = [np.rint(np.array(change) * 2.0**18).astype(np.float32) * np.float32(2.0**-18) for change in changes]
    assert np.array_equal(sent_and_left(arrays, codec, exponent), np.sum(arrays, axis=0, dtype=np.float64))


@given(CHANGES, st.sampled_from(sorted(CODEC_BITS)))
def test_the_mean_of_the_control_variates_equals_that_of_the_version(changes: Changes, codec: str) -> None:
    """There are four devices, and one to four of them take part in a Round."""
    stages = stages_of([SCAFFOLD, FEEDBACK])
    scaffold = stages["scaffold"]
    assert isinstance(scaffold, Scaffold)
    devices = [first_states(stages, NUM) for _ in range(4)]
    mean = np.zeros(NUM, np.float32)
    for number, change in enumerate(changes):
        part = range(number % 4, 4)
        totals = np.zeros(NUM)
        for device in part:
            inputs = scaffold.prepare(devices[device]["scaffold"], {"control": mean})
            assert np.array_equal(inputs["control"], mean - devices[device]["scaffold"]["control"])
            line = pipeline(stages, codec, -6, {"control": mean})
            before = devices[device]["scaffold"]["control"]
            update = line.apply(np.array(change, np.float32) * (device + 1), 3, devices[device])
            devices[device] = update.states
            totals += devices[device]["scaffold"]["control"].astype(np.float64) - before
        mean = scaffold.advance(mean.astype(np.float64), totals / len(part), len(part)).astype(np.float32)
    np.testing.assert_allclose(mean, np.mean([each["scaffold"]["control"] for each in devices], axis=0), atol=1e-5)


def test_scaffold_sends_option_two_of_the_paper() -> None:
    """c_i+ = c_i - c + (x - y) / (K eta), and the device sends c_i+ - c_i. These values are on the grid."""
    stages = stages_of([SCAFFOLD])
    mean, change = np.full(NUM, 0.25, np.float32), np.full(NUM, -1.5, np.float32)
    states = {"scaffold": {"control": np.full(NUM, 0.5, np.float32)}}
    update = pipeline(stages, "fixed32", -10, {"control": mean}).apply(change, 6, states)
    expected = 0.5 - 0.25 + 1.5 / (6 * 0.5)
    assert np.array_equal(update.states["scaffold"]["control"], np.full(NUM, expected, np.float32))
    second = np.frombuffer(update.encoded.payload, "<i4")[NUM:]
    assert np.array_equal(second * 2.0**-10, np.full(NUM, expected - 0.5))


def test_our_stages_keep_the_contract() -> None:
    check_stage(ErrorFeedback())
    check_stage(Scaffold(num_devices=4))


class Odd:
    """A stage with one possible fault."""

    tensors: tuple[str, ...] = ("state",)

    def __init__(self, number: int) -> None:
        self._number = number

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        change = vector[PARAMETERS]
        match self._number:
            case 0:
                context.send({PARAMETERS: change[1:]})
            case 1:
                context.send({PARAMETERS: change.astype(np.float64)})  # type: ignore[dict-item]
            case 2:
                context.send({**vector, "more": change})
            case 3:
                context.send(vector)
                context.send(vector)
            case 5:
                context.send(vector)
                return {"other": state["state"]}
            case 6:
                context.send(vector)
                return {"state": state["state"][1:]}
            case 7:
                context.send(vector)
                return {"state": state["state"] + np.float32(np.inf)}
            case 8:
                raise KeyError("nope")
            case 9:
                raise RuntimeError("first\n\tsecond\x1b " + "x" * 1000)
            case 10:
                context.send(vector)
                return None  # type: ignore[return-value]
            case 11:
                context.send(vector)
                return {"state": [0.0]}  # type: ignore[dict-item]
            case 12:
                context.send({PARAMETERS: [0.0]})  # type: ignore[dict-item]
            case 13:
                context.send(None)  # type: ignore[arg-type]
            case 14:
                context.send(change)  # type: ignore[arg-type]
            case 15:
                context.send({PARAMETERS: change + np.float32(np.nan)})
            case 16:
                context.send(vector)
                with suppress(InvalidInput):
                    context.send(vector)
            case 17:
                context.send(vector)
                change += np.float32(1)
            case 18:
                context.send(vector)
                state["state"][:] = 1
            case 19:
                decoded = context.send(vector)
                decoded[PARAMETERS][:] = 0
            case 20:
                with suppress(InvalidInput):
                    context.send({})
                context.send(vector)
            case 21:
                raise AssertionError
        return state


CORRECT = "; correct the stage"
BROKEN = [
    f"stage odd: sent float32 ({NUM - 1},) for the group 'parameters', expected float32 ({NUM},)",
    f"stage odd: sent float64 ({NUM},) for the group 'parameters', expected float32 ({NUM},)",
    "stage odd: sent the groups ['more', 'parameters'], expected ['parameters']",
    "stage odd: sent two vectors, expected one",
    "stage odd: sent no vector, expected one",
    "stage odd: returned the state ['other'], expected ['state']",
    f"stage odd: returned float32 ({NUM - 1},) as its state 'state', expected finite float32 ({NUM},)",
    f"stage odd: returned float32 ({NUM},) as its state 'state', expected finite float32 ({NUM},)",
    "stage odd: apply raised KeyError: 'nope'",
    f"stage odd: apply raised RuntimeError: first second {'x' * 173}",
    "stage odd: returned NoneType, expected its state, a mapping of ['state']",
    f"stage odd: returned list as its state 'state', expected finite float32 ({NUM},)",
    f"stage odd: sent list for the group 'parameters', expected float32 ({NUM},)",
    "stage odd: sent NoneType, expected a mapping of the groups ['parameters']",
    f"stage odd: sent float32 ({NUM},), expected a mapping of the groups ['parameters']",
    "stage odd: sent NaN or infinity in the group 'parameters', expected finite values",
    "stage odd: sent two vectors, expected one",
    "stage odd: apply raised ValueError: output array is read-only",
    "stage odd: apply raised ValueError: assignment destination is read-only",
    "stage odd: apply raised ValueError: assignment destination is read-only",
    "stage odd: sent the groups [], expected ['parameters']",
    "stage odd: apply raised AssertionError",
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_stage_that_breaks_the_contract_is_named(number: int) -> None:
    stages: Mapping[str, Stage] = {"odd": Odd(number)}
    with raises(InvalidInput, BROKEN[number] + CORRECT):
        pipeline(stages, "fixed32", -10, {}).apply(np.zeros(NUM, np.float32), 1, first_states(stages, NUM))
    with pytest.raises(InvalidInput, match=r"^stage stage: "):
        check_stage(Odd(number))


class Writer(Odd):
    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        vector[PARAMETERS][0] = 1.0
        context.send(vector)
        return state


def test_the_contract_detects_a_stage_that_writes_to_its_inputs() -> None:
    with pytest.raises(InvalidInput, match="FN-0213"):
        check_stage(Writer(3))


class Dropping(Odd):
    """A stage that sends the change of the parameters alone."""

    tensors = ()

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        context.send({PARAMETERS: vector[PARAMETERS]})
        return {}


def test_the_contract_detects_a_stage_that_drops_the_groups_of_others() -> None:
    with raises(
        InvalidInput,
        "stage stage: sent the groups ['parameters'], expected ['first-group', 'parameters']; correct the stage",
    ):
        check_stage(Dropping(0))


def test_an_error_of_a_diverged_training_names_no_stage() -> None:
    stages = stages_of([FEEDBACK])
    with raises(ValueError, "update: tensor 'a': got NaN or infinity, expected finite values; the training diverged"):
        pipeline(stages, "fixed32", -10, {}).apply(np.full(NUM, np.nan, np.float32), 1, first_states(stages, NUM))


class Careless(Scaffold):
    """A stage whose ``prepare`` or ``advance`` is wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__(4)
        self._fault = fault

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        if self._fault == "prepare writes":
            state["control"][:] = 1
        if self._fault == "prepare returns none":
            return None  # type: ignore[return-value]
        return super().prepare(state, downlink)

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        match self._fault:
            case "advance raises":
                raise KeyError("nope")
            case "advance returns none":
                return None  # type: ignore[return-value]
            case "advance returns less":
                return auxiliary[1:]
        return super().advance(auxiliary, aggregate, num_updates)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (
            "prepare writes",
            InvalidInput,
            "stage stage: prepare raised ValueError: assignment destination is read-only; correct the stage",
        ),
        ("prepare returns none", AssertionError, "prepare: got NoneType, expected a mapping of arrays"),
        ("advance raises", InvalidInput, "stage stage: advance raised KeyError: 'nope'; correct the stage"),
        ("advance returns none", AssertionError, "advance: got NoneType, expected float64 (72,)"),
        ("advance returns less", AssertionError, "advance: got float64 (71,), expected float64 (72,)"),
    ],
)
def test_the_contract_names_the_fault_of_a_stage_with_a_group(fault: str, kind: type[Exception], text: str) -> None:
    with raises(kind, text):
        check_stage(Careless(fault))


class Named(Odd):
    tensors = "residual"  # type: ignore[assignment]


def test_the_contract_refuses_tensors_that_are_no_tuple_of_names() -> None:
    with raises(
        InvalidPlan,
        "stage: tensors: got 'residual', expected a tuple of different names; correct it",
    ):
        check_stage(Named(10))


def test_the_group_of_scaffold_counts_each_device_once() -> None:
    assert Scaffold(num_devices=4).groups == (Group(name="control", weighting=Weighting.ONE),)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (
            [StageSpec(name="error_feedbak")],
            (
                "plan: stages: got 'error_feedbak', expected one of ['error_feedback', 'evaluate_only', 'feddyn', "
                "'fednova', 'qfedavg', 'scaffold'], which are installed here; did you mean error_feedback?"
            ),
        ),
        (
            [FEEDBACK, SCAFFOLD],
            (
                "plan: stages: got 'scaffold' after 'error_feedback', expected it before: it reads the change as the "
                "training left it; move it to the front"
            ),
        ),
        (
            [StageSpec(name="error_feedback", options={"share": 0.5})],
            "plan: stages: error_feedback: options.share: unknown option, expected none; remove it",
        ),
        (
            [StageSpec(name="scaffold")],
            "plan: stages: scaffold: options.num_devices: missing, expected an integer from 1 to 1099511627776; add it",
        ),
        (
            [StageSpec(name="scaffold", options={"num_devices": 2.5})],
            (
                "plan: stages: scaffold: options.num_devices: got 2.5, expected an integer from 1 to 1099511627776; "
                "correct it"
            ),
        ),
        (
            [StageSpec(name="scaffold", options={"num_device": 2})],
            (
                "plan: stages: scaffold: options.num_device: unknown option, expected num_devices; did you mean "
                "num_devices?"
            ),
        ),
    ],
)
def test_invalid_stages_of_a_plan_are_refused_in_one_sentence(specs: list[StageSpec], text: str) -> None:
    with raises(InvalidPlan, text):
        stages_of(specs)


def test_two_stages_cannot_add_one_group() -> None:
    with raises(
        InvalidPlan,
        "plan: stages: vector: got groups ['parameters', 'control', 'control'], expected different names, 'parameters' "
        "first; remove a stage",
    ):
        layout_of(TABLE, {"one": Scaffold(num_devices=2), "two": Scaffold(num_devices=2)})


class Grouped(Scaffold):
    """A stage that adds groups of these names."""

    def __init__(self, *names: str) -> None:
        super().__init__(4)
        self._names = names

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(Group(name=name, weighting=Weighting.ONE) for name in self._names)


@pytest.mark.parametrize("names", [[f"g{index}" for index in range(9)], ["my group"], ["ranges"]])
def test_groups_have_names_that_a_version_can_have(names: list[str]) -> None:
    with raises(
        InvalidPlan,
        f"plan: stages: got the groups {names}, expected at most 8, each 1 to 128 letters, digits or ._:+- that do not "
        "begin with a dot, and none with the name 'ranges'; remove a stage",
    ):
        layout_of(TABLE, {"grouped": Grouped(*names)})
    assert len(layout_of(TABLE, {"grouped": Grouped(*"abcdefgh")}).total_table.specs) == 9 * len(TABLE.specs)

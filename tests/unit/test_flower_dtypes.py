"""The dtypes of arrays of Flower apps: floats and integers travel, and every app receives its own dtypes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from support.errors import raises
from support.values import PUBLISHER

from fanin.edge.bundles.arrays import ArrayChoices, ArrayLayout, read_layout, write_arrays
from fanin.edge.tensors import Array as Values
from fanin.protos.errors import InvalidInput
from fanin.protos.roles import RoleKind, TensorRole
from fanin.simulation import Result, SimulationSettings, simulate

MIXED: Final[Mapping[str, Values]] = {
    "w": np.array([0.5, -2.0]),
    "half": np.ones(2, np.float16),
    "single": np.ones((), np.float32),
    "steps": np.array(3, np.int64),
    "pixels": np.array([0, 200, 255], np.uint8),
    "seed": np.array(1 << 40, np.int64),
    "mask": np.array([True, False]),
}
STEP: Final = 2.0**-29
"""The step of a first grid."""


def message_app(changes: Mapping[str, Values], received: list[dict[str, Values]] | None = None) -> ClientApp:
    """Return an app whose client i adds each change i + 1 times."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        if received is not None:
            received.append(arrays)
        times = int(context.node_config["partition-id"]) + 1
        after = {name: arrays[name] + (change * times).astype(change.dtype) for name, change in changes.items()}
        record = ArrayRecord({name: Array(np.asarray(value)) for name, value in after.items()})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content=content, reply_to=message)

    return app


def simulated(app: object, initial: object, rounds: int = 1, **settings: object) -> Result:
    plan = {"training.learning_rate": 1.0, "cohort.quorum": 2}
    options = SimulationSettings(initial=initial, plan=plan, quiet=True, **settings)  # type: ignore[arg-type]
    return simulate(app, 2, cohort=2, rounds=rounds, settings=options)


def test_a_mixed_record_is_complete_in_the_result() -> None:
    received: list[dict[str, Values]] = []
    changes = {
        "w": np.array([0.25, 0.1]),
        "half": np.ones(2, np.float16),
        "single": np.ones((), np.float32),
        "steps": np.array(3, np.int64),
        "pixels": np.array([1, 0, 0], np.uint8),
        "seed": np.array(1, np.int64),
        "mask": np.array([False, True]),
    }
    result = simulated(message_app(changes, received), MIXED, rounds=2)
    assert result.failures == ()
    kinds = {name: (value.dtype, value.shape) for name, value in MIXED.items()}
    for arrays in (*received, result.arrays):
        assert {name: (value.dtype, value.shape) for name, value in arrays.items()} == kinds
        assert list(arrays) == list(MIXED)
    arrays = result.arrays
    # Two clients add one and two changes in each of two rounds: 1.5 on average.
    np.testing.assert_allclose(arrays["w"], MIXED["w"] + 3 * changes["w"], atol=4 * STEP)
    assert arrays["half"].tolist() == [4.0, 4.0] and arrays["single"] == 4.0
    # The mean of 3 and 6 is 4.5, and 1.5 rounds to 2: halves become the even number.
    assert arrays["steps"] == 3 + 4 + 4
    assert arrays["pixels"].tolist() == [4, 200, 255]
    # Local arrays have their initial values here; the clients have their own.
    assert arrays["seed"] == 1 << 40
    assert {int(each["seed"]) - (1 << 40) for each in received} == {0, 1, 2}


def test_the_mean_of_float64_arrays_is_exact_up_to_the_grid() -> None:
    rng = np.random.default_rng(1)
    initial = {"coef": rng.standard_normal((3, 4))}
    change = rng.standard_normal((3, 4)) / 10
    (value,) = simulated(message_app({"coef": change}), initial).arrays.values()
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, initial["coef"] + 1.5 * change, rtol=2**-23, atol=2 * STEP)


@pytest.mark.parametrize(("max_shift", "expected"), [(0, [4.0, 4.0]), (8, [75.0, 450.0])])
def test_a_large_first_change_needs_max_shift(max_shift: int, expected: list[float]) -> None:
    app = message_app({"coef": np.array([50.0, 300.0])})
    plan = {"cohort.quorum": 2, "codec.max_shift": max_shift}
    settings = SimulationSettings(initial={"coef": np.zeros(2)}, plan=plan, quiet=True)
    result = simulate(app, 2, cohort=2, rounds=1, settings=settings)
    np.testing.assert_allclose(result.arrays["coef"], expected, rtol=1e-6)
    assert (result.rounds[1].num_saturated > 0) == (max_shift == 0)


class Widening(NumPyClient):
    """A client whose arithmetic makes float64 of float32, as numpy's does."""

    def fit(self, parameters: list[Values], config: object) -> tuple[list[Values], int, dict[str, float]]:
        return [parameters[0] * np.float64(2.0)], 1, {}


def test_a_float_may_return_as_another_float() -> None:
    result = simulated(Widening, [np.ones(2, np.float32)])
    assert result.failures == ()
    assert result.arrays["0"].dtype == np.float32
    assert result.arrays["0"].tolist() == [2.0, 2.0]


def test_an_array_that_a_reply_lacks_does_not_change(caplog: pytest.LogCaptureFixture) -> None:
    result = simulated(message_app({"head": np.ones(1)}), {"body": np.ones(2), "head": np.zeros(1)})
    assert result.failures == ()
    assert {name: value.tolist() for name, value in result.arrays.items()} == {"body": [1.0, 1.0], "head": [1.5]}
    assert "the app returns no body: these arrays do not change" in caplog.text


def test_a_list_of_another_length_is_one_error_of_the_client() -> None:
    class Short(NumPyClient):
        def fit(self, parameters: list[Values], config: object) -> tuple[list[Values], int, dict[str, float]]:
            return parameters[:1], 1, {}

    with pytest.raises(Exception, match=r"train: returned a list of 1 arrays, expected the 2 of the message in their"):
        simulated(Short, [np.ones(1), np.ones(1)])


def test_arrays_that_a_publisher_keeps_do_not_travel(tmp_path: Path) -> None:
    result = simulated(message_app({"head": np.ones(1)}), {"body": np.ones(2), "head": np.zeros(1)}, keep=["bo*"])
    assert [spec.name for spec in result.table.specs] == ["head"]
    bundle = write_arrays(MIXED, tmp_path / "bundle", PUBLISHER, "mixed", ArrayChoices(kept=["pix*", "half"]))
    assert set(read_layout(bundle).local) == {"pixels", "half", "seed", "mask"}
    with raises(
        InvalidInput,
        "keep: the pattern 'tail' matches no array, expected at least one of ['w', 'half', 'single', 'steps', "
        "'pixels', 'seed', 'mask']; correct or remove it",
    ):
        write_arrays(MIXED, tmp_path / "other", PUBLISHER, "mixed", ArrayChoices(kept=["tail"]))


def test_integers_are_counters_in_the_range_of_their_dtype(tmp_path: Path) -> None:
    arrays = {
        "pixels": np.zeros(2, np.uint8),
        "offset": np.zeros(1, np.int16),
        "total": np.zeros(1, np.uint64),
        "bn.num_batches_tracked": np.array(0),
        "w": np.zeros(1),
    }
    bundle = write_arrays(arrays, tmp_path / "bundle", PUBLISHER, "integers")
    assert bundle.manifest.table.roles == {
        "bn.num_batches_tracked": TensorRole(role=RoleKind.COUNTER, lowest=0.0, highest=float(1 << 24)),
        "offset": TensorRole(role=RoleKind.COUNTER, lowest=-32768.0, highest=32767.0),
        "pixels": TensorRole(role=RoleKind.COUNTER, lowest=0.0, highest=255.0),
        "total": TensorRole(role=RoleKind.COUNTER, lowest=0.0, highest=float(1 << 24)),
    }


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (np.array([1 << 24, 0]), r"returned (16777217|33554433), expected whole numbers up to 16777216"),
        (np.array([0.25, 0.0]), r"returned 1\.(25|5), expected whole numbers up to 16777216, because it is int64"),
    ],
)
def test_an_integer_that_float32_cannot_hold_is_one_error_of_the_client(change: Values, error: str) -> None:
    with pytest.raises(Exception, match=error):
        simulated(message_app({"steps": change}), {"steps": np.array([1, 2])})


def test_values_are_cast_to_the_nearest_of_a_dtype() -> None:
    dtypes = {
        "byte": np.dtype(np.uint8),
        "long": np.dtype(np.int64),
        "half": np.dtype(np.float16),
    }
    layout = ArrayLayout(names=tuple(dtypes), dtypes=dtypes, local={})
    values = np.array([-3.0, 2.5, 1e30], np.float32)
    arrays = layout.complete(dict.fromkeys(dtypes, values))
    assert arrays["byte"].tolist() == [0, 2, 255]
    assert arrays["long"].tolist() == [-3, 2, 1 << 62]
    assert arrays["half"].tolist() == [-3.0, 2.5, 65504.0]

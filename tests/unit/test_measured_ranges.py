"""A device measures the activations of its format on a real runtime, if its Assignment asks for it."""

from dataclasses import replace

import numpy as np
import pytest
from support.models import app_of, export_bundle, samples

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.ranges import NUM_BINS, columns
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import MeasureRanges
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle


class Narrow:
    """A runtime that cannot open the graph of the ranges."""

    def __init__(self, name: str) -> None:
        self._inner = open_runtime(name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        raise InvalidBundle("graph of ranges: no", code="FN-0415")


@pytest.fixture(scope="module")
def exported() -> Bundle:
    return export_bundle(app_of("mlp"), ("onnx", "tflite"))


def examples(num: int) -> MemoryStore:
    x, y = samples(num, seed=3)
    return MemoryStore(partition=0, train=Examples(inputs={"x": x}, y=y), validation=None)


@pytest.mark.parametrize("runtime", ["onnx", "litert"])
@pytest.mark.parametrize("num_examples", [5, 100])
def test_a_training_counts_the_extremes_of_the_activations_of_its_format(
    exported: Bundle, runtime: str, num_examples: int
) -> None:
    store, work = examples(num_examples), replace(example_assignment(exported), range_examples=m.RANGE_EXAMPLES)
    trainer, activations = RuntimeTrainer(open_runtime(runtime), store), exported.manifest.activations
    change = check_trainer(trainer, example_model(exported), work)
    sides = np.bincount(np.array(change.ranges.cells) // NUM_BINS, change.ranges.counts, 2 * len(activations))
    measured = columns(activations, trainer.graph_format)
    assert 0 < measured.size < len(activations)
    expected = np.zeros((len(activations), 2))
    expected[measured] = m.RANGE_WEIGHT
    np.testing.assert_array_equal(sides.reshape(-1, 2), expected)
    # The counts change nothing in the training.
    plain = trainer.train(example_model(exported), example_assignment(exported), Countdown())
    assert (plain.values.tobytes(), plain.counts, plain.ranges) == (
        change.values.tobytes(),
        change.counts,
        m.RangeCounts(),
    )


def test_a_training_on_a_runtime_without_the_graph_reports_no_ranges(
    exported: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    work = replace(example_assignment(exported), range_examples=m.RANGE_EXAMPLES)
    trainer = RuntimeTrainer(Narrow("onnx"), examples(20))  # type: ignore[arg-type]  # the rest is the inner one's
    change = trainer.train(example_model(exported), work, Countdown())
    assert change.ranges == m.RangeCounts() and change.num_steps > 0
    assert "this device reports no ranges" in caplog.text

"""A Round of FedRep and a fine-tuning in each runtime library have the result of onnxruntime."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.remote_runtime import runtime_of
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import Countdown, example_assignment, example_model
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.tuning import FineTuning, start_of, tuned
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m

NUM, NUM_HELD_OUT, EPOCHS, OWN_EPOCHS = 20, 8, 3, 2
TOLERANCE = 1e-5
FEDREP = m.Training(epochs=EPOCHS, personal_epochs=OWN_EPOCHS, learning_rate=0.1, seed=1)
NAMES = ("global.accuracy", "personal.accuracy", "personal.loss")


@cache
def bundle_of() -> Bundle:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    app = App(
        name="runtimes",
        module=module,
        calibration=torch.randn(32, 6),
        batch_size=8,
        num_classes=3,
        recipe=Recipe(optimizer=Sgd(momentum=0.9), local=["3.*"]),
    )
    return export_bundle(app, ("onnx", "tflite"))


def trainer(runtime: str) -> RuntimeTrainer:
    rng = np.random.default_rng(1)
    parts = [
        Examples(inputs={"x": rng.standard_normal((num, 6), np.float32)}, y=rng.integers(0, 3, num).astype(np.int32))
        for num in (NUM, NUM_HELD_OUT)
    ]
    return RuntimeTrainer(runtime_of(runtime), MemoryStore(partition=0, train=parts[0], validation=parts[1]))


@cache
def fedrep(runtime: str) -> Change:
    bundle = bundle_of()
    statistics = tuple(m.Statistic(name=name, bound=m.MAX_COUNT) for name in NAMES)
    work = replace(example_assignment(bundle, FEDREP), statistics=statistics)
    model = replace(example_model(bundle), local=-bundle.initial_local())
    return trainer(runtime).train(model, work, Countdown())


@cache
def fine_tuned(runtime: str) -> tuple[Float32s, Float32s | None]:
    """Return the parameters after a fine-tuning from the model of a device, and the ranges for int8."""
    bundle, device = bundle_of(), trainer(runtime)
    publication = example_assignment(bundle, FEDREP).publication
    work = FineTuning(epochs=4, learning_rate=0.05).assignment(publication, FEDREP)
    start = start_of(replace(example_model(bundle), local=-bundle.initial_local()))
    own = tuned(start, device.train(start, work, Countdown()))
    return own.values(), device.own_ranges(own, Countdown())


@pytest.mark.nightly
@pytest.mark.parametrize("runtime", ["litert", "tflite"])
def test_a_round_of_fedrep_is_that_of_onnxruntime(runtime: str) -> None:
    change, expected = fedrep(runtime), fedrep("onnx")
    assert change.local is not None and expected.local is not None
    # The comparison can fail: both groups of values have moved.
    assert np.abs(expected.values).max() > 1e-2
    assert np.abs(expected.local + bundle_of().initial_local()).max() > 1e-2
    np.testing.assert_allclose(change.values, expected.values, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(change.local, expected.local, rtol=0, atol=TOLERANCE)
    for name in NAMES:
        assert change.counts[name] == pytest.approx(expected.counts[name], abs=NUM_HELD_OUT), name
    assert change.counts["global.accuracy"] != change.counts["personal.accuracy"]


@pytest.mark.nightly
@pytest.mark.parametrize("runtime", ["litert", "tflite"])
def test_a_fine_tuning_is_that_of_onnxruntime(runtime: str) -> None:
    (values, ranges), (expected, expected_ranges) = fine_tuned(runtime), fine_tuned("onnx")
    initial = bundle_of().manifest.join(bundle_of().initial_parameters(), -bundle_of().initial_local())
    assert np.abs(expected - initial).max() > 1e-2
    np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE)
    assert ranges is not None and expected_ranges is not None and np.isfinite(ranges).all()

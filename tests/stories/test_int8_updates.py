"""A Run whose Updates have one byte for each value learns as well as a Run with four bytes.

The task is softmax regression on the embedded digits, split unevenly over eight devices. The production coordinator,
sessions, codecs and grid run in one process on a virtual clock.
"""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.virtual import PUBLISHER, open_place, plan, start

from fanin.clients.data.digits import split_digits
from fanin.clients.data.examples import Examples
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.messages import VersionPublished
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, VirtualDevice, run_virtual, synthetic_bundle

NUM_DEVICES, NUM_ROUNDS = 8, 12
SHAPES = {"bias": (10,), "weight": (64, 10)}
TABLE = TensorTable.of(SHAPES)
SPLIT = split_digits(NUM_DEVICES, alpha=0.5, seed=0)


def log_softmax(flat: Float32s, x: Float32s) -> Float32s:
    """Return the log-probabilities (n, 10) that softmax regression with these parameters gives for these images."""
    tensors = TABLE.views(flat)
    logits = x.reshape(len(x), -1) @ tensors["weight"] + tensors["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class SoftmaxTrainer:
    """A trainer that makes ten steps of gradient descent on all of a device's digits."""

    examples: Examples
    runtime: str = "numpy"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        flat, x, y = model.parameters.copy(), self.examples.inputs["x"], self.examples.y
        targets = np.eye(10, dtype=np.float32)[y]
        for _ in range(10):
            should_continue()
            slope = (np.exp(log_softmax(flat, x)) - targets) / np.float32(len(y))
            gradient = {"bias": slope.sum(axis=0), "weight": x.reshape(len(x), -1).T @ slope}
            flat -= np.float32(assignment.training.learning_rate) * TABLE.flatten(gradient)
        return Change(values=flat - model.parameters, counts={m.EXAMPLES: len(y)}, num_steps=10)


async def federate(folder: Path, codec: m.CodecSpec) -> tuple[Float32s, list[VersionPublished]]:
    """Run a federation; return the verified parameters of the last Version, and the published Versions."""
    cohort = {"concurrency": NUM_DEVICES, "buffer": NUM_DEVICES, "quorum": NUM_DEVICES}
    place = open_place(folder)
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)
    await start(place.runs, bundle, plan(**cohort, max_rounds=NUM_ROUNDS, codec=codec))
    tasks = []
    for index, examples in enumerate(SPLIT.devices):
        transport = LoopbackTransport(fleet=place.coordinator, device=f"device-{index}")
        rng = random.Random(index)
        device = VirtualDevice(
            transport, SoftmaxTrainer(examples), (PUBLISHER.public,), rng, lambda rng, _: rng.uniform(1, 9)
        )
        tasks.append(asyncio.create_task(device.run()))
    events = [entry.event async for entry in place.runs.watch("run", 0)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await place.runs.stop()
    assert [verdict.problem for verdict in verify_run(place.state, "run")] == [""] * (NUM_ROUNDS + 1)
    last = place.state.runs.version("run")
    assert last is not None
    versions = [event for event in events if isinstance(event, VersionPublished)]
    return load_parameters(place.state.blobs, last, TABLE), versions


def loss_and_accuracy(flat: Float32s) -> tuple[float, float]:
    """Return loss and accuracy on the test digits."""
    log_probabilities, y = log_softmax(flat, SPLIT.test.inputs["x"]), SPLIT.test.y
    return -float(log_probabilities[np.arange(len(y)), y].mean()), float((log_probabilities.argmax(axis=1) == y).mean())


@pytest.fixture(scope="module")
def fixed32_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Float32s, list[VersionPublished]]:
    return run_virtual(federate(tmp_path_factory.mktemp("fixed32"), m.CodecSpec(name="fixed32", max_shift=0)))


@pytest.mark.parametrize(
    ("max_shift", "max_loss_difference"), [pytest.param(12, 0.002, marks=pytest.mark.nightly), (0, 0.01)]
)
def test_int8_learns_as_much_as_fixed32_from_a_quarter_of_the_bytes(
    tmp_path: Path, max_shift: int, max_loss_difference: float, fixed32_run: tuple[Float32s, list[VersionPublished]]
) -> None:
    parameters, versions = run_virtual(federate(tmp_path, m.CodecSpec(name="int8", max_shift=max_shift)))
    initial_loss, _ = loss_and_accuracy(np.zeros(TABLE.num_values, np.float32))
    expected_loss, expected_accuracy = loss_and_accuracy(fixed32_run[0])
    loss, accuracy = loss_and_accuracy(parameters)
    assert expected_loss < initial_loss / 2
    assert abs(loss - expected_loss) < max_loss_difference
    assert abs(accuracy - expected_accuracy) < 0.01
    assert len(versions) == NUM_ROUNDS
    for event, expected in zip(versions, fixed32_run[1], strict=True):
        # A header has the numbers of rounded and saturated values, so its own length varies by a few bytes.
        saving = expected.bytes_up - event.bytes_up
        assert abs(saving - NUM_DEVICES * 3 * TABLE.num_values) <= NUM_DEVICES * 8
        assert 0 < event.num_rounded <= NUM_DEVICES * TABLE.num_values
    # With shifts no value saturates. Without them, values may saturate on the guessed grid of the first Round.
    assert max_shift == 0 or sum(event.num_saturated for event in versions) == 0

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
from fanin.clients.testing import LoopbackTransport, VirtualDevice, run_virtual, synthetic_bundle
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.control import VersionPublished
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run

NUM_DEVICES, NUM_ROUNDS = 8, 12
SHAPES = {"bias": (10,), "weight": (64, 10)}
TABLE = TensorTable.of(SHAPES)
SPLIT = split_digits(NUM_DEVICES, alpha=0.5, seed=0)


def log_softmax(flat: Float32s, x: Float32s) -> Float32s:
    """Return the log-probabilities (n, 10) that softmax regression with these parameters gives for these images."""
    found = TABLE.views(flat)
    logits = x.reshape(len(x), -1) @ found["weight"] + found["bias"]
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
        wanted = np.eye(10, dtype=np.float32)[y]
        for _ in range(10):
            should_continue()
            slope = (np.exp(log_softmax(flat, x)) - wanted) / np.float32(len(y))
            gradient = {"bias": slope.sum(axis=0), "weight": x.reshape(len(x), -1).T @ slope}
            flat -= np.float32(assignment.training.learning_rate) * TABLE.flatten(gradient)
        return Change(values=flat - model.parameters, counts={m.EXAMPLES: len(y)}, num_steps=10)


async def federate(folder: Path, codec: m.CodecSpec) -> tuple[Float32s, list[VersionPublished]]:
    """Run a federation; return the verified parameters of the last Version, and the published Versions."""
    everybody = {"concurrency": NUM_DEVICES, "buffer": NUM_DEVICES, "quorum": NUM_DEVICES}
    place = open_place(folder)
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)
    await start(place.runs, bundle, plan(**everybody, max_rounds=NUM_ROUNDS, codec=codec))
    tasks = []
    for index, examples in enumerate(SPLIT.devices):
        line = LoopbackTransport(fleet=place.coordinator, device=f"device-{index}")
        rng = random.Random(index)
        device = VirtualDevice(line, SoftmaxTrainer(examples), (PUBLISHER.public,), rng, lambda rng: rng.uniform(1, 9))
        tasks.append(asyncio.create_task(device.run()))
    events = [recorded.event async for recorded in place.runs.watch("run", 0)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await place.runs.stop()
    assert [verdict.problem for verdict in verify_run(place.state, "run")] == [""] * (NUM_ROUNDS + 1)
    last = place.state.runs.version("run")
    assert last is not None
    published = [event for event in events if isinstance(event, VersionPublished)]
    return load_parameters(place.state.blobs, last, TABLE), published


def loss_and_accuracy(flat: Float32s) -> tuple[float, float]:
    """Return loss and accuracy on the test digits."""
    found, y = log_softmax(flat, SPLIT.test.inputs["x"]), SPLIT.test.y
    return -float(found[np.arange(len(y)), y].mean()), float((found.argmax(axis=1) == y).mean())


@pytest.fixture(scope="module")
def with_fixed32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Float32s, list[VersionPublished]]:
    return run_virtual(federate(tmp_path_factory.mktemp("fixed32"), m.CodecSpec(name="fixed32", max_shift=0)))


@pytest.mark.parametrize(("max_shift", "loss_apart"), [pytest.param(12, 0.002, marks=pytest.mark.nightly), (0, 0.01)])
def test_int8_learns_what_fixed32_learns_from_a_quarter_of_the_bytes(
    tmp_path: Path, max_shift: int, loss_apart: float, with_fixed32: tuple[Float32s, list[VersionPublished]]
) -> None:
    found, published = run_virtual(federate(tmp_path, m.CodecSpec(name="int8", max_shift=max_shift)))
    before, _ = loss_and_accuracy(np.zeros(TABLE.num_values, np.float32))
    expected_loss, expected_accuracy = loss_and_accuracy(with_fixed32[0])
    loss, accuracy = loss_and_accuracy(found)
    assert expected_loss < before / 2
    assert abs(loss - expected_loss) < loss_apart
    assert abs(accuracy - expected_accuracy) < 0.01
    assert len(published) == NUM_ROUNDS
    for event, wide in zip(published, with_fixed32[1], strict=True):
        # A header has the numbers of rounded and saturated values, so its own length varies by a few bytes.
        saved = wide.bytes_up - event.bytes_up
        assert abs(saved - NUM_DEVICES * 3 * TABLE.num_values) <= NUM_DEVICES * 8
        assert 0 < event.num_rounded <= NUM_DEVICES * TABLE.num_values
    # With shifts no value saturates. Without them, values may saturate on the guessed grid of the first Round.
    assert max_shift == 0 or sum(event.num_saturated for event in published) == 0

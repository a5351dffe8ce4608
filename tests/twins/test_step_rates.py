"""Learning rates of the steps in a Round, against torch's schedulers, on a device and in the vectorized engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import app_of, bundle_of, samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer, training_batches
from fanin.clients.device.updates import Change
from fanin.edge.export.vectorized.step import VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.protos import messages as m
from fanin.protos.plans.schedule import mean_rate, rate_of_step
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.workers import LocalTrainings, Trainings

RATE = 0.1
DECAYS = ("", "linear", "cosine", "step")
DECAY_STEPS, DECAY_FACTOR = 3, 0.5


def scheduler_of(optimizer: torch.optim.Optimizer, training: m.Training, num_steps: int) -> LRScheduler:
    """Return the scheduler that docs/explanation/rounds.md names for this training."""
    warmup = training.warmup_steps
    num_decay_steps = max(num_steps - warmup, 1)
    decay: LRScheduler
    match training.step_decay:
        case "linear":
            decay = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_decay_steps)
        case "cosine":
            decay = CosineAnnealingLR(optimizer, T_max=num_decay_steps)
        case "step":
            decay = StepLR(optimizer, step_size=DECAY_STEPS, gamma=DECAY_FACTOR)
        case _:
            decay = ConstantLR(optimizer, factor=1.0)
    if not warmup:
        return decay
    ramp = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [ramp, decay], milestones=[warmup])


def torch_rates(training: m.Training, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    scheduler, rates = scheduler_of(optimizer, training, num_steps), []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def settings_of(warmup: int, decay: str, schedule_rounds: int = 0) -> m.Training:
    return m.Training(
        epochs=1,
        learning_rate=RATE,
        seed=1,
        warmup_steps=warmup,
        step_decay=decay,
        decay_steps=DECAY_STEPS,
        decay_factor=DECAY_FACTOR,
        schedule_rounds=schedule_rounds,
    )


@given(warmup=st.integers(0, 12), num_steps=st.integers(1, 40), decay=st.sampled_from(DECAYS))
def test_the_rate_of_each_step_is_that_of_torchs_schedulers(warmup: int, num_steps: int, decay: str) -> None:
    training = settings_of(warmup, decay)
    rates = [rate_of_step(training, step, num_steps, 7) for step in range(num_steps)]
    np.testing.assert_allclose(rates, torch_rates(training, num_steps), rtol=1e-9, atol=1e-12)
    assert mean_rate(training, num_steps, num_steps, 7) == pytest.approx(np.mean(rates))
    # A device that stops early has the rates of the steps that it did.
    assert mean_rate(training, 1, num_steps, 7) == pytest.approx(rates[0])


@given(warmup=st.integers(0, 12), num_steps=st.integers(1, 9), decay=st.sampled_from(DECAYS), rounds=st.integers(1, 5))
def test_a_schedule_over_several_rounds_is_one_schedule_of_torch(
    warmup: int, num_steps: int, decay: str, rounds: int
) -> None:
    training = settings_of(warmup, decay, schedule_rounds=rounds)
    rates = [rate_of_step(training, step, num_steps, r) for r in range(1, rounds + 1) for step in range(num_steps)]
    np.testing.assert_allclose(rates, torch_rates(training, rounds * num_steps), rtol=1e-9, atol=1e-12)
    later = {rate_of_step(training, step, num_steps, rounds + 3) for step in range(num_steps)}
    assert later == {rates[-1]}


def store_of(num: int, seed: int) -> MemoryStore:
    x, y = samples(num, seed=seed)
    part = Examples(inputs={"x": x}, y=y)
    return MemoryStore(train=part, validation=Examples(inputs={"x": x[:8]}, y=y[:8]), partition=seed)


def train_with_torch(
    training: m.Training, store: MemoryStore, model: OpenedModel, assignment: m.Assignment
) -> nn.Module:
    """Train the module on the device's batches with torch's optimizer and scheduler."""
    module = app_of("mlp").module
    optimizer = torch.optim.SGD(module.parameters(), lr=training.learning_rate, momentum=0.9)
    batches = list(training_batches(store, model, assignment))
    scheduler = scheduler_of(optimizer, training, len(batches))
    for batch in batches:
        num = int(batch.mask.sum())
        optimizer.zero_grad()
        cross_entropy(
            module(torch.from_numpy(batch.inputs["x"][:num])), torch.from_numpy(batch.y[:num]).long()
        ).backward()
        optimizer.step()
        scheduler.step()
    return module


@pytest.mark.parametrize("decay", DECAYS)
def test_a_device_trains_with_the_rates_of_torchs_schedulers(decay: str) -> None:
    bundle, store = bundle_of("mlp"), store_of(45, seed=3)
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())
    training = replace(settings_of(4, decay), epochs=2)
    assignment = replace(example_assignment(bundle), training=training)
    change = RuntimeTrainer(open_runtime("onnx"), store).train(model, assignment, lambda: None)
    module = train_with_torch(training, store, model, assignment)
    expected = bundle.manifest.table.flatten(
        {name: value.detach().numpy() for name, value in module.named_parameters()}
    )
    assert change.num_steps == 12
    np.testing.assert_allclose(model.parameters + change.values, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_clients_of_different_sizes_train_together_with_their_own_rates(decay: str) -> None:
    bundle, graphs, sizes = bundle_of("mlp"), BundleGraphs(open_runtime("onnx")), (60, 9, 31)
    x, y = samples(sum(sizes), seed=4)
    indices = tuple(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    clients = Partition(examples=Examples(inputs={"x": x}, y=y), indices=indices)
    training = m.Training(epochs=2, learning_rate=RATE, seed=1, warmup_steps=2, step_decay=decay)
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())

    def changes_of(trainings: Trainings) -> list[Change]:
        results = [
            trainings.begin(
                client, model, replace(example_assignment(bundle), assignment_id=f"{client:032x}", training=training)
            )
            for client in range(len(sizes))
        ]
        return [result() for result in results]

    local_changes = changes_of(LocalTrainings(graphs, clients, 0.2))
    vector_changes = changes_of(VectorTrainings(VectorStep(app_of("mlp")), graphs, clients, 0.2))
    assert len({result.num_steps for result in local_changes}) == len(sizes)
    for local, vector in zip(local_changes, vector_changes, strict=True):
        assert np.abs(local.values - vector.values).max() < 1e-5 * np.abs(local.values).max() + 1e-6

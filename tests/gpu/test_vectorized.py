"""The engine ``vmap:cuda``: its results are those of ``vmap`` on the CPU, with a CUDA graph and without one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import BATCH_SIZE, app_of, bundle_of, samples
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import Adam, App, Recipe
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.vectorized.gpu import MAX_GROUP
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch
from fanin.simulation import Iid, Result, partition, simulate
from fanin.simulation.engines.choice import Workload, choose
from fanin.simulation.settings import SimulationSettings

NUM_STEPS = 4
PARITY = 1e-5


class Inverted(nn.Module):
    """The inverse of a matrix: the processor reads whether there is one, which a CUDA graph does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        matrix = 0.1 * self.first(x.flatten(1)).reshape(-1, 4, 4) + torch.eye(4, device=x.device)
        return self.head(torch.linalg.inv(matrix).flatten(1))


def trained(app: App, step: VectorStep, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Train clients with learning rates and batches of their own. Return parameters (K, n) and losses (steps, K)."""
    prepared = prepare(app)
    values = {spec.name: prepared.learned[spec.name].detach().numpy() for spec in prepared.table.specs}
    start = prepared.table.flatten(values)
    settings = VectorSettings(
        learning_rates=[0.02 * (client + 1) for client in range(num_clients)],
        proximal_weight=0.0,
        anchor=start,
        controls=[None] * num_clients,
        random_keys=range(num_clients),
    )
    state, losses = step.begin(start, num_clients), []
    for number in range(NUM_STEPS):
        state, loss = step(state, [batch_of(100 * number + client) for client in range(num_clients)], settings)
        losses.append(loss)
    return np.stack(step.parameters(state)), np.stack(losses)


def batch_of(seed: int) -> PaddedBatch:
    x, y = samples(BATCH_SIZE, seed=seed)
    return PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(BATCH_SIZE, np.float32))


def assert_parity(app: App, sizes: Sequence[int] = (5, 3, 8, 1)) -> None:
    """Compare groups of several sizes with the CPU. A graph has a power of two of clients."""
    alone, on_gpu = VectorStep(app), VectorStep(app, "cuda")
    for num_clients in sizes:
        expected, expected_losses = trained(app, alone, num_clients)
        values, losses = trained(app, on_gpu, num_clients)
        again, _ = trained(app, on_gpu, num_clients)
        assert np.abs(values - expected).max() < PARITY * max(np.abs(expected).max(), 1.0)
        assert np.abs(losses - expected_losses).max() < PARITY * max(np.abs(expected_losses).max(), 1.0)
        assert np.array_equal(values, again), "the same bits each time"


@pytest.mark.parametrize("name", ["mlp", "cnn", "noisy", "lstm", "gru"])
def test_clients_on_a_gpu_have_the_parameters_of_clients_on_the_cpu(name: str) -> None:
    assert_parity(app_of(name))


def test_an_optimizer_with_moments_trains_on_a_gpu() -> None:
    assert_parity(replace(app_of("mlp"), recipe=Recipe(optimizer=Adam())))


def test_an_operator_that_no_cuda_graph_records_runs_without_one() -> None:
    assert_parity(replace(app_of("mlp"), module=Inverted()))
    # A failed recording leaves torch able to record another one.
    assert_parity(app_of("cnn"), sizes=(2,))


def test_a_group_holds_as_many_clients_as_fit_into_the_memory() -> None:
    most = VectorStep(app_of("mlp"), "cuda").max_clients
    assert 64 <= most <= MAX_GROUP
    assert most.bit_count() == 1


def test_a_simulation_on_a_gpu_repeats_bit_for_bit() -> None:
    def run(engine: str) -> Result:
        x, y = samples(240, seed=5)
        clients = partition(Examples(inputs={"x": x}, y=y), 12, Iid())
        settings = SimulationSettings(plan={"training.learning_rate": 0.1}, engine=engine, quiet=True)
        return simulate(app_of("cnn"), clients, cohort=6, rounds=3, settings=settings)

    first, again, on_cpu = run("vmap:cuda"), run("vmap:cuda"), run("vmap")
    assert first.engine == "vmap:cuda"
    assert not first.failures
    assert first.digests == again.digests
    assert np.abs(first.parameters - on_cpu.parameters).max() < PARITY


def test_auto_measures_the_gpu() -> None:
    workload = Workload(num_epochs=100_000, together=64, batches=(4,) * 64)
    settings = SimulationSettings(engine="auto")
    choice = choose(settings, app_of("cnn"), bundle_of("cnn"), open_runtime("onnx"), workload)
    assert choice.engine == "vmap:cuda"
    assert " by vmap:cuda, whose trace took " in choice.reason

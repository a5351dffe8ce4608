"""Layer times are measured as the model is trained, leave no trace in it, and cut it into stages of equal time."""

import dataclasses
import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fanin.datacenter.config.settings import CheckpointSettings, DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.families.known import family_model
from fanin.datacenter.files.jobfiles import LAYER_TIMES_FILE, read_layer_times, write_layer_times
from fanin.datacenter.jobs.balance import balance_pipeline
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel, parameter_table
from fanin.datacenter.parallel.layer_times import MeasurementHooks, measure_layer_times
from fanin.datacenter.parallel.layout import Layout, ModelSizes
from fanin.datacenter.parallel.objective import sample_objective
from fanin.datacenter.parallel.pipelines.stages import cut, stage_times
from fanin.datacenter.parallel.settings import MEASURE, ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import JobModel, build_job_model
from fanin.protos.errors import FaninError, InvalidInput

WIDTH, NUM_LAYERS = 64, 4
CPU = torch.device("cpu")


class Wide(nn.Module):
    """Two products around ``hidden`` values, with state: random numbers and running statistics."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor, scales: tuple[Tensor, None]) -> Tensor:
        """Map ``x`` (B, width) to the same shape."""
        return x + self.drop(self.down(self.up(self.norm(x)).relu())) * scales[0]


class Uneven(nn.Module):
    """Four layers, the first of which has a given width. They are no plain chain, because each receives more than x."""

    def __init__(self, first_width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Wide(first_width if layer == 0 else WIDTH) for layer in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, 8) to (B, 3)."""
        stream = self.embed(x)
        for layer in self.layers:
            stream = layer(stream, scales=(torch.ones(WIDTH), None))
        output: Tensor = self.head(self.norm(stream))
        return output


def uneven(first_width: int = WIDTH) -> TrainableModel:
    sizes = ModelSizes(num_layers=NUM_LAYERS, num_heads=0, num_kv_heads=0, feed_forward=0)
    layout = Layout(sizes=sizes, inputs=("embed",), layers="layers", outputs=("norm", "head"), plan={})
    objective = sample_objective(lambda outputs, targets: mse_loss(outputs, targets, reduction="none").mean(dim=1))
    return TrainableModel(module=Uneven(first_width), layout=layout, objective=objective)


def batch(size: int = 64) -> Batch:
    return Batch(inputs=torch.ones(size, 8), targets=torch.zeros(size, 3))


def test_a_wide_layer_gets_a_stage_of_its_own() -> None:
    times = measure_layer_times(uneven(64 * WIDTH), batch(256))
    assert [len(share) for share in cut(NUM_LAYERS, 2)] == [2, 2]
    assert [len(share) for share in cut(NUM_LAYERS, 2, times)] == [1, 3], times
    assert all(time > 0 for time in times)
    assert stage_times(NUM_LAYERS, 2, times) == pytest.approx((sum(times[:2]), sum(times[2:])))


@pytest.mark.parametrize(
    ("recompute", "precision"), [("none", "full"), ("full", "full"), ("selective", "full"), ("none", "bf16")]
)
def test_nothing_in_the_model_changes(recompute: str, precision: str) -> None:
    model = uneven()
    model.module.layers[1].eval()
    model.module.head.weight.grad = torch.ones(3, WIDTH)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    objects = dict(model.module.named_parameters())
    rng_state = torch.random.get_rng_state()
    measure_layer_times(model, batch(), ParallelSettings(recompute=recompute, precision=precision))
    after = model.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(value is objects[name] for name, value in model.module.named_parameters())
    assert torch.equal(torch.random.get_rng_state(), rng_state)
    assert [layer.training for layer in model.module.layers] == [True, False, True, True]
    gradients = {name for name, value in model.module.named_parameters() if value.grad is not None}
    assert gradients == {"head.weight"}
    assert torch.equal(model.module.head.weight.grad, torch.ones(3, WIDTH))


class CostClock:
    """A clock that parts move: each forward or backward pass of a part adds the cost of the part."""

    def __init__(self, module: nn.Module, costs: dict[str, int]) -> None:
        self.now = 0.0
        for name, cost in costs.items():
            self._watch(module.get_submodule(name), cost)

    def __call__(self) -> float:
        return self.now

    def _watch(self, part: nn.Module, cost: int) -> None:
        def add(*_: object) -> None:
            self.now += cost

        def add_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(add)

        # A recomputation may stop before the end of the forward, so its start is counted.
        part.register_forward_pre_hook(add)
        part.register_forward_hook(add_backward)


COSTS = {"embed": 1, **{f"layers.{layer}": 10 * (layer + 1) for layer in range(NUM_LAYERS)}, "norm": 3, "head": 4}


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 3)])
def test_each_part_has_the_time_of_its_forward_and_backward(recompute: str, times: int) -> None:
    model = uneven()
    clock = CostClock(model.module, COSTS)
    layer_times = measure_layer_times(
        model, batch(), ParallelSettings(recompute=recompute), CPU, MeasurementHooks(clock=clock)
    )
    assert layer_times == (2, *(times * 10 * (layer + 1) for layer in range(NUM_LAYERS)), 2 * (3 + 4))


def test_frozen_parts_have_no_backward() -> None:
    model = uneven()
    for name in ("embed", "layers.0"):
        model.module.get_submodule(name).requires_grad_(requires_grad=False)
    layer_times = measure_layer_times(model, batch(), hooks=MeasurementHooks(clock=CostClock(model.module, COSTS)))
    assert layer_times == (1, 10, 40, 60, 80, 14)


def test_the_time_of_the_loss_counts_for_the_outputs() -> None:
    model = uneven()
    clock = CostClock(model.module, {})

    def slow_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        clock.now += 7
        return model.objective.loss_sum(outputs, targets)

    objective = dataclasses.replace(model.objective, loss_sum=slow_loss)
    hooks = MeasurementHooks(clock=clock)
    assert measure_layer_times(dataclasses.replace(model, objective=objective), batch(), hooks=hooks)[-1] == 7


def test_a_part_that_returns_no_tensor_is_refused() -> None:
    model = uneven()
    model.module.layers[2].register_forward_hook(lambda module, inputs, output: (output, None))
    with pytest.raises(InvalidInput, match="FN-1306"):
        measure_layer_times(model, batch())


def test_a_model_is_not_cut_by_unmeasured_times() -> None:
    parallel = ParallelSettings(mesh=MeshShape(pp=2), schedule="GPipe", layer_times=MEASURE)
    with pytest.raises(ValueError, match="got layer_times 'measure', expected numbers: call measure_layer_times"):
        parameter_table(uneven(), parallel)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """Set up a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config_of(folder: Path) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat. " * 9)
    return TrainConfig(
        model=ModelSettings(
            family=family_model("decoder", DecoderConfig(vocabulary=16, width=16, num_layers=3, feed_forward=16))
        ),
        data=DataSettings(text=str(text), length=8),
        training=TrainingSettings(batch_size=8, learning_rate=0.1),
        stop=StopSettings(steps=1),
        parallel=ParallelSettings(mesh=MeshShape(pp=2), microbatches=2, layer_times=MEASURE),
        checkpoints=CheckpointSettings(folder=folder / "kept"),
    )


@pytest.mark.usefixtures("group_of_one")
def test_a_resumed_job_is_cut_as_before(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    job_model = build_job_model(config)
    first = balance_pipeline(config, job_model, CPU).parallel
    assert len(first.times) == 5
    assert all(time > 0 for time in first.times)
    assert first == dataclasses.replace(config.parallel, layer_times=first.times)
    assert balance_pipeline(config, job_model, CPU).parallel == first
    assert read_layer_times(tmp_path / "kept") == first.times
    explicit_config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layer_times=(1.0,) * 5))
    assert balance_pipeline(explicit_config, job_model, CPU) is explicit_config, "what is given counts"
    write_layer_times(tmp_path / "kept", (1.0, 2.0))
    with pytest.raises(InvalidInput, match=f"{LAYER_TIMES_FILE}: got 2 times, expected 5: inputs, each layer, outputs"):
        balance_pipeline(config, job_model, CPU)
    (tmp_path / "kept" / LAYER_TIMES_FILE).write_text("{")
    with pytest.raises(InvalidInput, match=f"{LAYER_TIMES_FILE}: not JSON"):
        balance_pipeline(config, job_model, CPU)


TIMEOUT_S = 1.5


def balance_result(rank: int, config: TrainConfig, job_model: JobModel, folder: Path) -> str:
    """Return the result of one of two ranks. The group waits at most ``TIMEOUT_S`` for a message."""
    store = dist.FileStore(f"{folder}/meet", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        return str(balance_pipeline(config, job_model, CPU).parallel.times)
    except FaninError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fails", [True, False])
def test_ranks_wait_past_the_message_timeout_and_return_the_same_result(tmp_path: Path, *, fails: bool) -> None:
    config = config_of(tmp_path)
    job_model = build_job_model(config)
    parts = [
        job_model.model.module.embed,
        *job_model.model.module.layers,
        job_model.model.module.norm,
        job_model.model.module.head,
    ]
    for part in parts if fails else []:
        part.register_forward_hook(lambda *_: sleep(TIMEOUT_S / len(parts) / 4))
    if fails:
        parts[-1].register_forward_hook(lambda module, inputs, output: (output, None))
    other_result = tmp_path / "told"
    # Autograd has run in this process, so it cannot run in a fork. The rank that waits needs none.
    process = multiprocessing.get_context("fork").Process(
        target=lambda: other_result.write_text(balance_result(1, config, job_model, tmp_path))
    )
    process.start()
    result = balance_result(0, config, job_model, tmp_path)
    process.join()
    assert other_result.read_text() == result
    assert result.startswith("InvalidInput: layout: head returned tuple, expected one tensor" if fails else "(")

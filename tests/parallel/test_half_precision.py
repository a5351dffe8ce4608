"""Steps in fp16: gradients are unscaled before they count, and a step that overflows changes nothing."""

import pytest
import torch
from parallel.saving import engine_of, step

from fanin.datacenter.config.settings import UNKNOWN_LAYOUT
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import sample_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings


def moved(engine: Engine) -> torch.Tensor:
    """Return the change of all parameters in one step."""
    before = {name: value.clone() for name, value in engine.full_parameters().items()}
    step(engine, 0)
    return torch.cat([(value - before[name]).flatten() for name, value in engine.full_parameters().items()])


def test_a_step_in_fp16_has_the_size_of_one_in_float32() -> None:
    engine, expected = engine_of(optimizer="sgd", precision="fp16"), moved(engine_of(optimizer="sgd"))
    assert engine.scale_state["loss_scale"] == 65536.0
    assert (moved(engine) - expected).norm() < 0.02 * expected.norm()


def test_the_norm_of_fp16_gradients_is_unscaled() -> None:
    tokens = torch.arange(12).reshape(2, 6) % 11
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:])
    norm = float(engine_of(precision="fp16").step(batch).norm)
    assert norm == pytest.approx(float(engine_of().step(batch).norm), rel=0.02)


def test_a_step_that_overflows_changes_no_statistics() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    # The summed loss is finite in float32, and its scaled gradient in fp16 is not.
    objective = sample_objective(lambda outputs, targets: 1e4 * (outputs - targets).square().flatten(1).sum(dim=1))
    training = TrainingSettings(batch_size=4, learning_rate=0.1, optimizer="sgd")
    model = TrainableModel(module=module, layout=UNKNOWN_LAYOUT, objective=objective)
    engine = build_engine(model, ParallelSettings(precision="fp16"), training, None)
    before = {name: value.clone() for name, value in engine.parts[0].state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    result = engine.step(
        Batch(inputs=torch.randn(4, 3, generator=generator), targets=torch.randn(4, 1, generator=generator))
    )
    assert result.skipped and result.overflowed
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(value, before[name]) for name, value in engine.parts[0].state_dict().items())

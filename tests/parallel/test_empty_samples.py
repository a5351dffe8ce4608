"""A sample without any target counts in an evaluation as it does in a step, and on a device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, ExampleSamples
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.training.loop import TrainingLoop
from fanin.edge.export import next_token

CONFIG = TrainConfig(
    model=ModelSettings(app="made:here"),
    data=DataSettings(examples=Path("made-here.npz")),
    training=TrainingSettings(batch_size=6, learning_rate=1e-9, optimizer="sgd"),
    stop=StopSettings(steps=1),
)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_the_loss_of_an_evaluation_is_that_of_a_step_on_the_same_samples(size: int) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (6, 5)).astype(np.int32)
    y = rng.integers(0, 9, (6, 5)).astype(np.int32)
    y[1], y[4], y[5, 2:] = -1, -1, -1
    samples = ExampleSamples(Examples(inputs={"x": x}, y=y))
    config = replace(CONFIG, evaluation=replace(CONFIG.evaluation, batch_size=size))
    scored = ScoredObjective(padded_objective(next_token))
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    model = TrainableModel(module=module, layout=config.model.parallel_layout, objective=scored.objective)
    engine = build_engine(model, config.parallel, config.training, None)
    loop = TrainingLoop(engine, scored, config, DataSplit(train=samples, held_out=samples))
    loss, _ = loop.evaluate()
    loop.step()
    assert loss == pytest.approx(loop.state.loss_sum / loop.state.count, rel=1e-6)

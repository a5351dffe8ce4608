"""A loss that compares the samples of a batch, in a job: the numbers of plain torch, or a refusal."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from fanin.clients.data.digits import split_digits
from fanin.datacenter.config.settings import DataSettings, EvaluationSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import mark_padding
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.protos.errors import InvalidInput

APPS = Path(__file__).with_name("apps.py")
BATCH = 8
RATE = 0.1


def config_of(folder: Path) -> TrainConfig:
    examples = split_digits(1, 1.0, 0).public.take(np.arange(40))
    np.savez(folder / "digits.npz", x=examples.inputs["x"].astype(np.float32), y=examples.y)
    return TrainConfig(
        model=ModelSettings(app=f"{APPS}:contrasted"),
        data=DataSettings(examples=folder / "digits.npz", held_fraction=0.3),
        training=TrainingSettings(batch_size=BATCH, learning_rate=RATE, optimizer="sgd", momentum=0.0),
        stop=StopSettings(steps=3),
        evaluation=EvaluationSettings(batch_size=5),
    )


@pytest.mark.parametrize("num_real", [BATCH, 5])
def test_a_step_of_a_whole_batch_is_that_of_plain_torch(num_real: int, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    job = build_job_model(config)
    reference = copy.deepcopy(job.model.module)
    x = torch.from_numpy(split_digits(1, 1.0, 0).public.inputs["x"][:BATCH])
    outputs = reference(x[:num_real])
    expected = functional.cross_entropy(outputs @ outputs.T, torch.arange(num_real))
    gradients = torch.autograd.grad(expected, [*reference.parameters()])
    targets = torch.zeros(BATCH, dtype=torch.int64)
    mark_padding(targets, torch.arange(BATCH) >= num_real)
    engine = build_engine(job.model, ParallelSettings(), config.training, None, torch.device("cpu"))
    result = engine.step(Batch(inputs=x, targets=targets))
    assert float(result.loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    after = engine.full_parameters()
    for (name, before), gradient in zip(reference.named_parameters(), gradients, strict=True):
        assert float((before.detach() - RATE * gradient - after[name]).abs().max()) < 1e-12, name


def test_a_job_of_one_process_trains_and_evaluates_it(tmp_path: Path) -> None:
    losses = train_rank(config_of(tmp_path)).metrics.trained.losses
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": ParallelSettings(mesh=MeshShape(dp_shard=2))},
        {"parallel": ParallelSettings(mesh=MeshShape(dp_replicate=2))},
        {"parallel": ParallelSettings(microbatches=2)},
        {"training": TrainingSettings(batch_size=BATCH, learning_rate=RATE, accumulate=2)},
    ],
)
def test_a_job_that_splits_the_batch_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), **changes)  # type: ignore[arg-type]  # one of its tables
    with pytest.raises(InvalidInput, match="FN-1303"):
        build_job_model(config)

"""A parameter that no output needs has no gradient and no optimizer state. Its job resumes as any other."""

from pathlib import Path

import pytest
import torch

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress
from fanin.datacenter.config.settings import ModelSettings
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import padded_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.edge.export import cross_entropy
from fanin.protos.errors import InvalidInput

TRAINING = {
    "sgd": TrainingSettings(batch_size=8, learning_rate=0.1, optimizer="sgd", momentum=0.9),
    "adamw": TrainingSettings(batch_size=8, learning_rate=0.01, optimizer="adamw"),
}


class Spare(torch.nn.Module):
    """A linear layer, and a parameter that its outputs do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(x)


def engine_of(training: TrainingSettings) -> Engine:
    torch.manual_seed(0)
    layout = ModelSettings(app="made:here").parallel_layout
    model = TrainableModel(module=Spare(), layout=layout, objective=padded_objective(cross_entropy))
    return build_engine(model, ParallelSettings(), training, None)


def train(engine: Engine, *seeds: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 4, generator=generator)
        engine.step(Batch(inputs=x, targets=x[:, :3].argmax(1)))


@pytest.mark.parametrize("name", TRAINING)
def test_a_job_resumes_with_the_state_of_the_other_parameters(tmp_path: Path, name: str) -> None:
    whole, first, resumed = (engine_of(TRAINING[name]) for _ in range(3))
    train(whole, 1, 2, 3, 4)
    train(first, 1, 2)
    with Checkpoints(tmp_path, first) as checkpoints:
        checkpoints.save(Progress(step=2))
    with Checkpoints(tmp_path, resumed) as checkpoints:
        assert checkpoints.load() == Progress(step=2)
    train(resumed, 3, 4)
    expected = whole.full_parameters()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.full_parameters().items())
    assert torch.equal(expected["spare"], torch.ones(5))


def test_a_checkpoint_of_another_optimizer_does_not_resume(tmp_path: Path) -> None:
    first = engine_of(TRAINING["sgd"])
    train(first, 1)
    with Checkpoints(tmp_path, first) as checkpoints:
        checkpoints.save(Progress(step=1))
    other = engine_of(TRAINING["adamw"])
    with (
        Checkpoints(tmp_path, other) as checkpoints,
        pytest.raises(InvalidInput, match="FN-1340"),
    ):
        checkpoints.load()

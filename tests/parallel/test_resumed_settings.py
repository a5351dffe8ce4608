"""A job that resumes with a setting that its checkpoint does not fit names the key."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fanin.datacenter.config.settings import CheckpointSettings, DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.protos.errors import InvalidInput

ADAMW = TrainingSettings(batch_size=8, learning_rate=0.01)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            replace(ADAMW, freeze=("0.*",)),
            r"\[training\] freeze: got patterns that exclude 2 parameters, such as 0.bias, which .* trained; expected",
        ),
        (
            replace(ADAMW, optimizer="sgd"),
            r"\[training\] optimizer, momentum: got settings of another optimizer state .* 0.bias \(exp_avg, ",
        ),
    ],
)
def test_a_key_that_changes_the_state_of_the_optimizer_is_named(
    training: TrainingSettings, message: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(
        "import torch\n"
        "from fanin.edge.export import App\n"
        "module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))\n"
        "app = App(name='a', module=module, calibration=torch.rand(8, 3), batch_size=8, num_classes=2)\n"
    )
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.random((40, 3), np.float32), y=rng.integers(0, 2, 40, np.int32))
    config = TrainConfig(
        model=ModelSettings(app=f"{tmp_path / 'app.py'}:app"),
        data=DataSettings(examples=tmp_path / "data.npz"),
        training=ADAMW,
        stop=StopSettings(steps=2),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept"),
    )
    train_rank(config)
    with pytest.raises(InvalidInput, match=message):
        train_rank(replace(config, training=training, stop=StopSettings(steps=4)))

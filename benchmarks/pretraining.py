"""Pre-trains a module with the datacenter's trainer in this process, as the start of a benchmark."""

from pathlib import Path

from torch import nn

from fanin.clients.data.examples import Examples
from fanin.datacenter.config.settings import DataSettings, EvaluationSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, ExampleSamples
from fanin.datacenter.files.jobfiles import HeldOutEvaluation
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import SampleLoss, ScoredObjective, padded_objective
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.training.loop import TrainingLoop


def pretrain(
    module: nn.Module, loss: SampleLoss, parts: tuple[Examples, Examples], training: TrainingSettings, num_epochs: int
) -> HeldOutEvaluation:
    """Train on the first part and keep what is best on the second; what that said of it."""
    config = TrainConfig(
        # Neither name is read, because module and data are passed directly.
        model=ModelSettings(app="benchmarks:module"),
        data=DataSettings(examples=Path("benchmarks.npz")),
        training=training,
        stop=StopSettings(epochs=num_epochs),
        evaluation=EvaluationSettings(keep="best"),
    )
    scored = ScoredObjective(padded_objective(loss))
    model = TrainableModel(module=module, layout=config.model.parallel_layout, objective=scored.objective)
    train, held_out = (ExampleSamples(part) for part in parts)
    engine = build_engine(model, config.parallel, training, None)
    trained = TrainingLoop(engine, scored, config, DataSplit(train=train, held_out=held_out)).run()
    return trained.evaluated[trained.best - 1]

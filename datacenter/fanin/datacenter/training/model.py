"""The model of a job: built from its config, with its layout, objective and data.

Every rank builds the same model before the first collective, so errors are raised on all ranks alike.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fanin.datacenter.config.settings import SAFETENSORS, ModelSettings
from fanin.datacenter.config.train_config import TrainConfig, check_tokens
from fanin.datacenter.data.loading import load_data
from fanin.datacenter.data.samples import DataSplit
from fanin.datacenter.families.family import FamilyModel, ModelFiles, TokenModel
from fanin.datacenter.files.jobfiles import read_parameters
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective, token_objective
from fanin.datacenter.training.parameters import load_parameters, trained_module
from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter. A rank without an App does not need them.
    from fanin.edge.export.app import App


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A job's model and data.

    Attributes:
        model: The model to build an engine from.
        scored: The objective, with its accuracy counter.
        data: The samples to train and to evaluate on.
        app: The App, if the model is one.
        files: The files of the model.
    """

    model: TrainableModel
    scored: ScoredObjective
    data: DataSplit
    app: "App | None" = None
    files: ModelFiles = field(default_factory=ModelFiles)


def build_job_model(config: TrainConfig) -> JobModel:
    """Build the model of a job, and load its data.

    Raises:
        InvalidInput: The config, the App or the data is invalid. The App may raise errors of its own.
    """
    settings = config.model
    app = _load_app(settings.app) if settings.app else None
    module = trained_module(app) if app is not None else _family(settings).build(config.seed)
    tokens = TokenModel(vocabulary=app.num_classes) if app is not None else _family(settings).tokens
    check_tokens(config)
    data = load_data(config, app, tokens)
    over_samples = settings.mean_over == "samples"
    objective = token_objective(over_samples=over_samples) if app is None else padded_objective(app.loss)
    scored = ScoredObjective(objective)
    if settings.initial is not None and settings.initial.suffix != SAFETENSORS:
        load_parameters(module, *read_parameters(settings.initial))
    _check_layout(settings, module)
    return JobModel(
        model=TrainableModel(module=module, layout=settings.parallel_layout, objective=scored.objective),
        scored=scored,
        data=data,
        app=app,
        files=ModelFiles() if app is not None else _family(settings).files(module),
    )


def _family(settings: ModelSettings) -> FamilyModel:
    assert settings.family is not None, "a config without an App has a family"
    return settings.family


def _load_app(reference: str) -> "App":
    from fanin.edge.export.loading import load_app

    return load_app(reference)


def _check_layout(settings: ModelSettings, module: torch.nn.Module) -> None:
    """Raise InvalidInput unless the names in [model.layout] are names of the App's modules."""
    if settings.layout is None:
        return
    names = {name for name, _ in module.named_modules()}
    for name in (settings.layout.layers, *settings.layout.inputs, *settings.layout.outputs):
        if name not in names:
            raise InvalidInput(f"layout: the module of {settings.app} has no {name!r}, expected names of its modules")
    num_layers = len(list(module.get_submodule(settings.layout.layers).children()))
    if num_layers != settings.layout.num_layers:
        raise InvalidInput(
            f"layout: got num_layers {settings.layout.num_layers}, but {settings.layout.layers} of {settings.app} has "
            f"{num_layers}"
        )

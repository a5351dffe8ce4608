"""The model of a job: built from its config, with its layout, objective and data.

Every rank builds the same model before the first collective, so errors are raised on all ranks alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from fanin.datacenter.config.settings import SAFETENSORS, ModelSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.loading import load_data
from fanin.datacenter.data.samples import DataSplit
from fanin.datacenter.files.jobfiles import read_parameters
from fanin.datacenter.models.decoder import Decoder
from fanin.datacenter.models.encoder import Encoder
from fanin.datacenter.models.pretrained import Pretrained, positions_of, pretrained_module, vocabulary_of
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.objective import ScoredObjective, padded_objective, token_objective
from fanin.datacenter.parallel.transformers_layout import pretrained_model
from fanin.datacenter.training.parameters import load_parameters, trained_module
from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter. A rank without an App does not need them.
    from fanin.edge.export.app import App

NO_PARAMETERS: Final = (
    "*.rotary_emb.inv_freq",
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.attention.bias",
    "*.attention.masked_bias",
    "*.position_ids",
)
"""Buffers that older versions of transformers stored with the weights of Llama, GPT-2, GPT-NeoX and BERT. Newer
versions compute them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A job's model and data.

    Attributes:
        model: The model to build an engine from.
        scored: The objective, with its accuracy counter.
        data: The samples to train and to evaluate on.
        app: The App, if the model is one.
        weights: A file with initial weights that are not yet in the model.
        aside: Patterns for the names of further tensors in ``weights``, which are ignored.
        exported: Contents of the config.json to write next to the final weights.
    """

    model: TrainableModel
    scored: ScoredObjective
    data: DataSplit
    app: "App | None" = None
    weights: Path | None = None
    aside: tuple[str, ...] = ()
    exported: bytes | None = None


def build_job_model(config: TrainConfig) -> JobModel:
    """Build the model of a job, and load its data.

    Raises:
        InvalidInput: The config, the App or the data is invalid. The App may raise errors of its own.
    """
    settings = config.model
    app = _load_app(settings.app) if settings.app else None
    pretrained = None if settings.pretrained is None else pretrained_module(settings.pretrained, config.seed)
    module = _module(config, app) if pretrained is None else pretrained.module
    masked = settings.encoder is not None or (pretrained is not None and pretrained.masked)
    if config.data.mask_token is not None and not (masked and config.data.windows):
        raise InvalidInput(
            f"data: got mask_token {config.data.mask_token}, expected none: it hides tokens of a text from an encoder "
            "or a masked model"
        )
    _check_pretrained(config, pretrained)
    data = load_data(config, app, _vocabulary(settings, app, module), masked=masked)
    over_samples = settings.mean_over == "samples"
    objective = token_objective(over_samples=over_samples) if app is None else padded_objective(app.loss)
    scored = ScoredObjective(objective)
    if settings.initial is not None and settings.initial.suffix != SAFETENSORS:
        load_parameters(module, *read_parameters(settings.initial))
    _check_layout(settings, module)
    if pretrained is not None:
        return _pretrained_job_model(pretrained, scored, data)
    model = TrainableModel(module=module, layout=settings.parallel_layout, objective=scored.objective)
    return JobModel(model=model, scored=scored, data=data, app=app)


def _load_app(reference: str) -> "App":
    from fanin.edge.export.loading import load_app

    return load_app(reference)


def _pretrained_job_model(pretrained: Pretrained, scored: ScoredObjective, data: DataSplit) -> JobModel:
    module = pretrained.module
    names = {name for name, _ in module.named_parameters()}
    copies = (name for name, _ in module.named_parameters(remove_duplicate=False) if name not in names)
    return JobModel(
        model=pretrained_model(module, scored.objective),
        scored=scored,
        data=data,
        weights=pretrained.weights,
        aside=(*NO_PARAMETERS, *copies),
        exported=pretrained.exported,
    )


def _check_pretrained(config: TrainConfig, pretrained: Pretrained | None) -> None:
    """Raise InvalidInput unless a pretrained model can read the windows of the data."""
    data = config.data
    if pretrained is None or not data.windows:
        return
    limit = positions_of(pretrained.module)
    if limit is not None and data.length > limit:
        raise InvalidInput(
            f"data: got length {data.length}, expected at most the model's {limit} positions (max_position_embeddings)"
        )
    if pretrained.masked and not pretrained.from_seed and data.mask_token is None:
        raise InvalidInput(
            f"data: got no mask_token for {type(pretrained.module).__name__} with weights, expected the id that its "
            "tokenizer gives the mask; without weights the token after the data's last one is the mask"
        )


def _module(config: TrainConfig, app: "App | None") -> torch.nn.Module:
    settings = config.model
    if app is not None:
        return trained_module(app)
    if settings.encoder is not None:
        return Encoder(settings.encoder, config.seed)
    assert settings.decoder is not None, "a config has one of them"
    return Decoder(settings.decoder, config.seed)


def _vocabulary(settings: ModelSettings, app: "App | None", module: torch.nn.Module) -> int:
    """Return the number of tokens, or classes, that the model knows."""
    if app is not None:
        return app.num_classes
    if settings.pretrained is not None:
        return vocabulary_of(module)
    sizes = settings.decoder or settings.encoder
    assert sizes is not None, "a config has one of them"
    return sizes.vocabulary


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

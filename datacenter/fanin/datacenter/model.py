"""What a config names, made: the module on this rank, its layout and objective, and the samples that it learns from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fanin.clients.data import Examples, check_examples, hold_out, read_npz
from fanin.clients.datafiles import default_places, read_files
from fanin.clients.datasets import SHAKESPEARE as SHAKESPEARE_FILES
from fanin.datacenter.config import SAFETENSORS, SHAKESPEARE, DataSettings, ModelSettings, TrainConfig
from fanin.datacenter.jobfiles import read_parameters
from fanin.datacenter.models.decoder import Decoder
from fanin.datacenter.objectives import Scored, filled_objective, token_objective
from fanin.datacenter.parallel.build import Model
from fanin.datacenter.parameters import load_parameters, trained_module
from fanin.datacenter.samples import ExampleSamples, Tokens, WindowSamples
from fanin.datacenter.trainer import Parts
from fanin.edge.export.app import App, inputs_of, load_app
from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model as an engine takes it, its counting objective, its samples, and the App that it came from, if one did."""

    model: Model
    scored: Scored
    parts: Parts
    app: App | None = None


def make(config: TrainConfig) -> Made:
    """Everything that a job needs before there are ranks. Raises InvalidInput and the App's own errors."""
    settings = config.model
    app = load_app(settings.app) if settings.app else None
    parts = _parts(config, app)
    if app is not None:
        module, objective = trained_module(app), filled_objective(app.loss)
    else:
        assert settings.decoder is not None, "a config has one of them"
        module = Decoder(settings.decoder, config.seed)
        objective = token_objective(over_samples=settings.mean_over == "samples")
    if settings.initial is not None and settings.initial.suffix != SAFETENSORS:
        load_parameters(module, *read_parameters(settings.initial))
    _check_layout(settings, module)
    scored = Scored(objective)
    model = Model(module=module, layout=settings.parallel_layout, objective=scored.objective)
    return Made(model=model, scored=scored, parts=parts, app=app)


def read_characters(text: str) -> str:
    """The characters of a text that a config names. Raises InvalidInput."""
    where = "input.txt" if text == SHAKESPEARE else text
    try:
        if text == SHAKESPEARE:
            (data,) = read_files(default_places(), SHAKESPEARE_FILES)
        else:
            data = Path(text).read_bytes()
        return data.decode()
    except OSError as exc:
        raise InvalidInput(
            f"{text}: cannot be read ({exc.strerror}); expected a text file, or {SHAKESPEARE} by its name"
        ) from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{where}: not UTF-8 text ({exc})") from exc


def split_text(text: str, held_fraction: float) -> tuple[Tokens, Tokens]:
    """(tokens to train on, tokens held out: the end). A token is a character's place among all, in code point order."""
    tokens = {character: token for token, character in enumerate(sorted(set(text)))}
    flat = np.fromiter((tokens[character] for character in text), np.int32, len(text))
    bound = len(flat) - round(len(flat) * held_fraction)
    return flat[:bound], flat[bound:]


def _parts(config: TrainConfig, app: App | None) -> Parts:
    data, per_token = config.data, app is None and config.model.mean_over != "samples"
    if data.text:
        text = read_characters(data.text)
        _check_vocabulary(config.model, app, len(set(text)), data.text)
        train, held_out = (
            WindowSamples(tokens, data.length, per_token=per_token) for tokens in split_text(text, data.held_fraction)
        )
        return Parts(train=train, held_out=held_out)
    rest, held = _examples(data, config, app)
    return Parts(train=ExampleSamples(rest, per_token=per_token), held_out=ExampleSamples(held, per_token=per_token))


def _examples(data: DataSettings, config: TrainConfig, app: App | None) -> tuple[Examples, Examples]:
    assert data.examples is not None, "a config has one of them"
    examples = read_npz(data.examples)
    if app is not None:
        examples = Examples(x=inputs_of(app, torch.from_numpy(examples.x)).numpy(), y=examples.y)
        check_examples(examples, app.input_shape, app.num_classes)
    elif examples.x.dtype != np.int32 or examples.y.shape != examples.x.shape:
        raise InvalidInput(
            f"{data.examples}: got x {examples.x.dtype} {examples.x.shape} and y {examples.y.shape}, expected int32 "
            "tokens and next tokens (n, T) for a decoder"
        )
    else:
        _check_vocabulary(config.model, app, int(max(examples.x.max(), examples.y.max())) + 1, str(data.examples))
    if len(examples) == 1:
        raise InvalidInput(f"{data.examples}: got 1 example, expected at least 2: one is held out")
    num_held = min(max(1, round(len(examples) * data.held_fraction)), len(examples) - 1)
    return hold_out(examples, num_held, np.random.default_rng(config.seed))


def _check_vocabulary(settings: ModelSettings, app: App | None, num_tokens: int, where: str) -> None:
    known = settings.decoder.vocabulary if settings.decoder is not None else app.num_classes if app is not None else 0
    if num_tokens > known:
        raise InvalidInput(
            f"{where}: got {num_tokens} tokens, expected at most the model's {known}; raise its vocabulary"
        )


def _check_layout(settings: ModelSettings, module: torch.nn.Module) -> None:
    """Raise InvalidInput unless the names of [model.layout] are the module's."""
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

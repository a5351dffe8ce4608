"""What a config names, made: the module on this rank, its layout and objective, and the samples that it learns from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fanin.clients.data.examples import UNREADABLE, Examples, check_examples, hold_out, read_npz
from fanin.clients.data.files import default_places, read_files
from fanin.clients.data.public import SHAKESPEARE as SHAKESPEARE_FILES
from fanin.datacenter.checkpoints.parameters import load_parameters, trained_module
from fanin.datacenter.data.masked import MaskedSamples
from fanin.datacenter.data.samples import ExampleSamples, Tokens, WindowSamples
from fanin.datacenter.jobs.config import SAFETENSORS, SHAKESPEARE, DataSettings, ModelSettings, TrainConfig
from fanin.datacenter.jobs.jobfiles import read_parameters
from fanin.datacenter.models.decoder import Decoder
from fanin.datacenter.models.encoder import Encoder
from fanin.datacenter.models.pretrained import Pretrained, positions_of, pretrained_module, vocabulary_of
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.transformers_layout import pretrained_model
from fanin.datacenter.training.objectives import Scored, filled_objective, token_objective
from fanin.datacenter.training.trainer import Parts
from fanin.edge.export.app import App, inputs_of, load_app
from fanin.protos.errors import InvalidInput

NO_PARAMETERS: Final = (
    "*.rotary_emb.inv_freq",
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.attention.bias",
    "*.attention.masked_bias",
    "*.position_ids",
)
"""What older versions of transformers wrote beside the weights of Llama, GPT-2, GPT-NeoX and BERT. Newer ones compute
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model as an engine takes it, its counting objective, its samples, and the App that it came from, if one did.

    ``weights``: a file with its values, where they are not in it yet; ``aside``: what else may be in that.
    ``exported``: what goes as config.json beside the weights that it ends with.
    """

    model: TrainableModel
    scored: Scored
    parts: Parts
    app: App | None = None
    weights: Path | None = None
    aside: tuple[str, ...] = ()
    exported: bytes | None = None


def make(config: TrainConfig) -> Made:
    """Everything that a job needs before there are ranks. Raises InvalidInput and the App's own errors."""
    settings = config.model
    app = load_app(settings.app) if settings.app else None
    pretrained = None if settings.pretrained is None else pretrained_module(settings.pretrained, config.seed)
    module = _module(config, app) if pretrained is None else pretrained.module
    masked = settings.encoder is not None or (pretrained is not None and pretrained.masked)
    if config.data.mask_token is not None and not (masked and config.data.windows):
        raise InvalidInput(
            f"data: got mask_token {config.data.mask_token}, expected none: it hides tokens of a text from an encoder "
            "or a masked model"
        )
    _check_pretrained(config, pretrained)
    parts = _parts(config, app, _vocabulary(settings, app, module), masked=masked)
    over_samples = settings.mean_over == "samples"
    scored = Scored(token_objective(over_samples=over_samples) if app is None else filled_objective(app.loss))
    if settings.initial is not None and settings.initial.suffix != SAFETENSORS:
        load_parameters(module, *read_parameters(settings.initial))
    _check_layout(settings, module)
    if pretrained is not None:
        return _made_of(pretrained, scored, parts)
    model = TrainableModel(module=module, layout=settings.parallel_layout, objective=scored.objective)
    return Made(model=model, scored=scored, parts=parts, app=app)


def _made_of(pretrained: Pretrained, scored: Scored, parts: Parts) -> Made:
    module = pretrained.module
    known = {name for name, _ in module.named_parameters()}
    copies = (name for name, _ in module.named_parameters(remove_duplicate=False) if name not in known)
    aside = (*NO_PARAMETERS, *copies)
    model = pretrained_model(module, scored.objective)
    return Made(
        model=model,
        scored=scored,
        parts=parts,
        weights=pretrained.weights,
        aside=aside,
        exported=pretrained.exported,
    )


def _check_pretrained(config: TrainConfig, pretrained: Pretrained | None) -> None:
    """Raise InvalidInput unless a model out of a folder can read the windows of the data."""
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


def _module(config: TrainConfig, app: App | None) -> torch.nn.Module:
    settings = config.model
    if app is not None:
        return trained_module(app)
    if settings.encoder is not None:
        return Encoder(settings.encoder, config.seed)
    assert settings.decoder is not None, "a config has one of them"
    return Decoder(settings.decoder, config.seed)


def _vocabulary(settings: ModelSettings, app: App | None, module: torch.nn.Module) -> int:
    """How many tokens the model knows."""
    if app is not None:
        return app.num_classes
    if settings.pretrained is not None:
        return vocabulary_of(module)
    sizes = settings.decoder or settings.encoder
    assert sizes is not None, "a config has one of them"
    return sizes.vocabulary


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
    return split_tokens(np.fromiter((tokens[character] for character in text), np.int32, len(text)), held_fraction)


def split_tokens(flat: Tokens, held_fraction: float) -> tuple[Tokens, Tokens]:
    """(tokens to train on, tokens held out: the end)."""
    bound = len(flat) - round(len(flat) * held_fraction)
    return flat[:bound], flat[bound:]


def read_tokens(path: Path) -> Tokens:
    """The token ids in a file: of an .npy as they lie there, of an .npz its one array. Raises InvalidInput."""
    try:
        found = np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else _only_array(path)
        if not isinstance(found, np.ndarray):
            # numpy hands out a member that is no array of its own format as bare bytes.
            raise ValueError(f"its one member is {type(found).__name__}")
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not an array of numbers as numpy writes it ({exc})") from exc
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InvalidInput(f"{path}: got {found.dtype} {list(found.shape)}, expected one row of integers, token ids")
    flat: Tokens = found
    return flat


def _only_array(path: Path) -> Tokens:
    """What lies in an archive cannot be mapped, and is read."""
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("no archive")
        if len(archive.files) != 1:
            raise InvalidInput(f"{path}: got arrays {', '.join(archive.files) or 'none'}, expected one, of token ids")
        found: Tokens = archive[archive.files[0]]
    return found


def _parts(config: TrainConfig, app: App | None, vocabulary: int, *, masked: bool) -> Parts:
    data, per_token = config.data, app is None and config.model.mean_over != "samples"
    if not data.windows:
        rest, held = _examples(data, config, app, vocabulary)
        return Parts(
            train=ExampleSamples(rest, per_token=per_token), held_out=ExampleSamples(held, per_token=per_token)
        )
    if data.tokens is not None:
        flat, where = read_tokens(data.tokens), str(data.tokens)
        num_tokens = _count_tokens(flat, where)
        halves = split_tokens(flat, data.held_fraction)
    else:
        text, where = read_characters(data.text), data.text
        num_tokens, halves = len(set(text)), split_text(text, data.held_fraction)
    mask = num_tokens if data.mask_token is None else data.mask_token
    _check_vocabulary(
        max(num_tokens, mask + 1) if masked else num_tokens, vocabulary, f"{where} and a mask" if masked else where
    )
    train, held_out = (
        MaskedSamples(
            tokens=tokens,
            length=data.length,
            num_tokens=num_tokens,
            mask=mask,
            seed=config.seed,
            stream=stream,
            per_token=per_token,
        )
        if masked
        else WindowSamples(tokens, data.length, per_token=per_token)
        for stream, tokens in enumerate(halves)
    )
    return Parts(train=train, held_out=held_out)


def _count_tokens(flat: Tokens, where: str) -> int:
    """One more than the highest. Raises InvalidInput."""
    if not len(flat):
        raise InvalidInput(f"{where}: got no tokens, expected some")
    least, most = int(flat.min()), int(flat.max())
    if least < 0:
        raise InvalidInput(f"{where}: got tokens from {least} to {most}, expected from 0 on")
    return most + 1


def _examples(data: DataSettings, config: TrainConfig, app: App | None, vocabulary: int) -> tuple[Examples, Examples]:
    assert data.examples is not None, "a config has one of them"
    examples, encoder = read_npz(data.examples), config.model.encoder
    if app is not None:
        examples = Examples(x=inputs_of(app, torch.from_numpy(examples.x)).numpy(), y=examples.y)
        check_examples(examples, app.input_shape, app.num_classes)
    elif examples.x.dtype != np.int32 or examples.x.ndim != 2 or examples.y.shape != examples.x.shape:
        raise InvalidInput(
            f"{data.examples}: got x {examples.x.dtype} {examples.x.shape} and y {examples.y.shape}, expected int32 "
            "tokens and the tokens asked for (n, T)"
        )
    elif encoder is not None and examples.x.shape[1] > encoder.context:
        raise InvalidInput(
            f"{data.examples}: got {examples.x.shape[1]} tokens a sample, expected at most the encoder's context "
            f"{encoder.context}"
        )
    else:
        _check_vocabulary(int(max(examples.x.max(), examples.y.max())) + 1, vocabulary, str(data.examples))
    if len(examples) == 1:
        raise InvalidInput(f"{data.examples}: got 1 example, expected at least 2: one is held out")
    num_held = min(max(1, round(len(examples) * data.held_fraction)), len(examples) - 1)
    return hold_out(examples, num_held, np.random.default_rng(config.seed))


def _check_vocabulary(num_tokens: int, known: int, where: str) -> None:
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

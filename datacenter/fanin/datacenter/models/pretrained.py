"""A causal or masked language model of the ``transformers`` library, out of a local folder as that library writes it.

    config.json                     its sizes; alone, the model begins from our seed
    model.safetensors               its weights, or
    model.safetensors.index.json    which of several .safetensors files beside it has which weight

Nothing is fetched, no code of the folder runs and nothing is unpickled: only the config's own kind of model, which the
library must know, and safetensors. Weights are not read here: each rank reads its own slices (``weights.py``), and
until then the values are pages that nobody has touched, which take no memory. The exception is a file with the names of
an older release of the library (Mixtral, GPT-NeoX): the library translates it, and each rank reads all of it.
"""

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final, Literal, Protocol, cast

import torch
from torch import nn

from fanin.datacenter.models.layers import seeded
from fanin.protos.errors import InvalidInput, RuntimeMissing, UnsupportedModel

CONFIG: Final = "config.json"
ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64})
SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Sizes that must be positive in a config that has them. Not every kind of model names each of them."""
MASKED_HEAD: Final = "ForMaskedLM"
HEADER_BYTES: Final = 8
"""Of a safetensors file: the size of its header, little-endian."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
MAX_OFFSET: Final = 2
"""Rows that a table of positions has before the first position (OPT)."""
OTHERS: Final = ("*.bin", "*.pt", "*.pth", "*.safetensors")
"""What there must be none of where neither file of weights is: they would be left unread without a word."""
UNTOLD: Final = ("auto_map", "attn_implementation", "base_model_tp_plan", "base_model_pp_plan")
"""What of a config the library never hears: what would lead to code, the folder's own or attention that is fetched, and
plans, which are the library's to say."""
Row = Mapping[str, object]


class LanguageModel(Protocol):
    """What is called of such a model."""

    def tie_weights(self) -> None: ...

    def get_input_embeddings(self) -> nn.Embedding: ...

    def set_experts_implementation(self, name: str) -> None: ...


class _Head(Protocol):
    """A class of the library that builds models of one kind of head."""

    def from_config(self, config: object, **settings: object) -> nn.Module: ...


@contextmanager
def _hushed() -> Iterator[None]:
    """What the library and its own libraries say as they are imported is not ours to pass on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedSettings:
    """A ``folder`` as above, and the ``dtype`` that the parameters have here, whatever they have there."""

    folder: Path
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model out of its folder, the file with its ``weights``, which are not in it yet, and the ``exported`` config.

    ``masked``: the model predicts hidden tokens, not the next one. ``from_seed``: no file has its values. The folder is
    read once: when the job ends it may be gone.
    """

    module: nn.Module
    weights: Path | None
    exported: bytes
    masked: bool
    from_seed: bool


def read_config(folder: Path) -> Row:
    """The folder's config. Raises InvalidInput."""
    path = folder / CONFIG
    try:
        row = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror}); expected a model's folder") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})") from exc
    if not isinstance(row, dict):
        raise InvalidInput(f"{path}: got {type(row).__name__}, expected an object")
    if row.get("quantization_config") is not None:
        raise UnsupportedModel(f"{path}: got a quantized model, expected one whose weights are floats")
    return row


def weights_in(folder: Path) -> Path | None:
    """The file that the folder's weights are read by; None if it has none. Raises InvalidInput."""
    for name in (ONE_FILE, INDEX):
        if (folder / name).exists():
            return folder / name
    others = sorted(path.name for pattern in OTHERS for path in folder.glob(pattern))
    if others:
        raise InvalidInput(
            f"{folder}: got weights in {others[0]}, expected {ONE_FILE} or {INDEX}: a pickle is never opened, since it "
            "can run code; have transformers write the model anew by save_pretrained"
        )
    return None


def pretrained_skeleton(settings: PretrainedSettings) -> nn.Module:
    """The model without values of its parameters, for who asks about names and sizes and what its forward does.

    Raises InvalidInput, or RuntimeMissing where ``transformers`` is not installed.
    """
    weights_in(settings.folder)
    return module_of(read_config(settings.folder), settings.dtype, None, str(settings.folder))


def pretrained_module(settings: PretrainedSettings, seed: int) -> Pretrained:
    """The model; without a file of weights it begins from ``seed``. Raises as ``pretrained_skeleton``."""
    weights, row, where = weights_in(settings.folder), read_config(settings.folder), str(settings.folder)
    module = module_of(row, settings.dtype, seed if weights is None else None, where)
    exported, masked = _exported(row, settings.dtype), _is_masked(module)
    translated = weights is not None and _is_renamed(module, weights)
    if translated:
        _load_translated(module, settings)
    return Pretrained(
        module=module,
        weights=None if translated else weights,
        exported=exported,
        masked=masked,
        from_seed=weights is None,
    )


@_hushed()
def module_of(row: Row, dtype: str, seed: int | None, where: str) -> nn.Module:
    """The model that a config describes; seed None: with values that are still to come. Raises as above."""
    library = _transformers()
    kind = row.get("model_type")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        raise UnsupportedModel(f"{where}: got model_type {kind!r}, expected one that transformers knows by itself")
    begun: AbstractContextManager[object] = _no_values() if seed is None else seeded(seed)
    try:
        told = {key: value for key, value in row.items() if key not in UNTOLD}
        config = library.CONFIG_MAPPING[kind].from_dict(told)
        head, model = _head_of(library, config, row, where)
        with begun:
            module: nn.Module = head.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation="sdpa" if getattr(model, "_supports_sdpa", False) else "eager",
                trust_remote_code=False,
            )
        if dtype == "float64" and hasattr(module, "set_experts_implementation"):
            # torch's product of all experts at once takes no float64.
            cast(LanguageModel, module).set_experts_implementation("eager")
        if seed is None:
            # Who leaves the values out leaves this out with them.
            cast(LanguageModel, module).tie_weights()
        for name in SIZES:
            value = getattr(module.config, name, 1)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"got {name} {value}, expected at least 1")
    except _refused() as exc:
        text = " ".join(str(exc).split())
        raise InvalidInput(f"{where}: transformers cannot make this model ({type(exc).__name__}: {text})") from exc
    return module


def _head_of(library: ModuleType, config: object, row: Row, where: str) -> tuple[_Head, type]:
    """(the library's class that builds a model of this config, the model's class). Raises UnsupportedModel.

    A config that both heads fit is a masked model, unless its ``architectures`` or ``is_decoder`` name the other: with
    the next token for a target, attention to both sides sees the answer.
    """
    causal, masked = library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_FOR_MASKED_LM_MAPPING
    names, kind = row.get("architectures"), type(config)
    named = isinstance(names, list) and any(str(name).endswith(MASKED_HEAD) for name in names)
    both_sides = getattr(config, "is_decoder", True) is False and not getattr(config, "is_encoder_decoder", False)
    if kind in masked and (named or both_sides or kind not in causal):
        return library.AutoModelForMaskedLM, masked[kind]
    if kind in causal:
        return library.AutoModelForCausalLM, causal[kind]
    raise UnsupportedModel(
        f"{where}: got model_type {row.get('model_type')!r}, expected a causal or a masked language model of "
        "transformers; this kind has no such head"
    )


def _is_masked(module: nn.Module) -> bool:
    return type(module).__name__.endswith(MASKED_HEAD)


def _is_renamed(module: nn.Module, weights: Path) -> bool:
    """Whether a file's tensors have other names than the model's parameters; what cannot be read has no names."""
    names = _names_in(weights)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    mine = {name for name, _ in module.named_parameters()}
    return bool(mine - names) and bool(names - known)


def _names_in(weights: Path) -> set[str]:
    try:
        if weights.name == INDEX:
            return set(json.loads(weights.read_bytes())["weight_map"])
        with weights.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_BYTES), "little")
            return set(json.loads(file.read(min(size, MAX_HEADER_BYTES)))) - {"__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


@_hushed()
def _load_translated(module: nn.Module, settings: PretrainedSettings) -> None:
    """Take over weights whose names are those of an older release of the library. Raises InvalidInput."""
    where = settings.folder
    unreadable: tuple[type[Exception], ...] = (
        *_refused(),
        OSError,
        importlib.import_module("safetensors").SafetensorError,
    )
    try:
        loaded, report = type(module).from_pretrained(  # type: ignore[attr-defined]
            where,
            config=copy.deepcopy(module.config),
            dtype=DTYPES[settings.dtype],
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except unreadable as exc:
        text = " ".join(str(exc).split())
        raise InvalidInput(f"{where}: transformers cannot read its weights ({type(exc).__name__}: {text})") from exc
    missing, wrong = (sorted(map(str, report.get(name, ()))) for name in ("missing_keys", "mismatched_keys"))
    if missing or wrong:
        raise InvalidInput(
            f"{where}: got weights of which {len(wrong)} have another shape and {len(missing)} are missing, such as "
            f"{(missing or wrong)[0]}, expected all of {type(module).__name__}; have transformers write the model anew "
            "by save_pretrained"
        )
    with torch.no_grad():
        values = dict(loaded.named_parameters())
        for name, value in module.named_parameters():
            value.copy_(values[name])


def _exported(row: Row, dtype: str) -> bytes:
    """The folder's config for weights that are written by this job: theirs is the job's dtype."""
    kept = {key: value for key, value in row.items() if key not in ("torch_dtype", "auto_map")}
    return json.dumps(kept | {"dtype": dtype}, indent=2, sort_keys=True).encode() + b"\n"


def vocabulary_of(module: nn.Module) -> int:
    """How many tokens a model of ``transformers`` knows."""
    return cast(LanguageModel, module).get_input_embeddings().num_embeddings


def positions_of(module: nn.Module) -> int | None:
    """The longest sequence that a model's table of positions has rows for; None where it has no table."""
    limit = getattr(module.config, "max_position_embeddings", None)
    words = cast(LanguageModel, module).get_input_embeddings()
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding) and each is not words]
    fits = isinstance(limit, int) and any(0 <= each.num_embeddings - limit <= MAX_OFFSET for each in tables)
    return limit if fits else None


def _transformers() -> ModuleType:
    if find_spec("transformers") is None:
        raise RuntimeMissing("model: transformers is not installed here; pip install 'fanin[transformers]'")
    return importlib.import_module("transformers")


def _no_values() -> AbstractContextManager[object]:
    with _hushed():
        context: AbstractContextManager[object] = importlib.import_module(
            "transformers.initialization"
        ).no_init_weights()
    return context


def _refused() -> tuple[type[Exception], ...]:
    """What the library raises for a config that describes no model: a class of its own, and many of Python's."""
    own: type[Exception] = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    return (own, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

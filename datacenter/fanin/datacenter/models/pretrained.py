"""Builds a causal or masked language model of the ``transformers`` library from a local folder.

Nothing is downloaded, no code of the folder runs, and nothing is unpickled. Only model types of the library itself are
built, from the config alone. The parameters are uninitialized until each rank reads its own slices of the weights
(``checkpoints.weights``).

The exception is a file with parameter names of an older release of the library (Mixtral, GPT-NeoX). The library
translates these names, so one rank reads the complete file.
"""

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final, Literal, Protocol, cast

import torch
from torch import nn

from fanin.datacenter.models.pretrained_folder import (
    JsonObject,
    exported_config,
    read_config,
    tensor_names,
    weights_in,
)
from fanin.datacenter.models.seeding import seeded
from fanin.protos.errors import InvalidInput, RuntimeMissing, UnsupportedModel

DTYPES: Final = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64})
SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Fields that must be positive in a config that has them. Not every model type has all of them."""
MASKED_HEAD: Final = "ForMaskedLM"
MAX_OFFSET: Final = 2
"""Rows that a table of positions may have before the first position (OPT)."""
IGNORED_FIELDS: Final = ("auto_map", "attn_implementation", "base_model_tp_plan", "base_model_pp_plan")
"""Fields of a config that are not passed to the library. The first two could make it load code, from the folder or a
download. The plans must be those of the library."""


class LanguageModel(Protocol):
    """The methods of a language model that are used here."""

    def tie_weights(self) -> None: ...

    def get_input_embeddings(self) -> nn.Embedding: ...

    def set_experts_implementation(self, name: str) -> None: ...


class _Head(Protocol):
    """A class of the library that builds models of one kind of head."""

    def from_config(self, config: object, **settings: object) -> nn.Module: ...


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence warnings and logs of the library and its dependencies."""
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
    """The ``folder`` of a model, and the ``dtype`` of its parameters in this job, for any dtype of the files."""

    folder: Path
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"


def pretrained_skeleton(settings: PretrainedSettings) -> nn.Module:
    """Build a model without loading its parameters, to inspect its names, sizes and forward function.

    Raises:
        InvalidInput: the folder or its config is wrong.
        UnsupportedModel: the model is quantized, or not a language model of the library.
        RuntimeMissing: ``transformers`` is not installed.
    """
    weights_in(settings.folder)
    return module_of(read_config(settings.folder), settings.dtype, None, str(settings.folder))


def pretrained_module(settings: PretrainedSettings, seed: int) -> nn.Module:
    """Build a model for training. Its parameters are not loaded yet if ``weights_of`` returns a file.

    Args:
        settings: the folder and the dtype.
        seed: initializes the parameters if the folder has no weights.

    Raises:
        InvalidInput, UnsupportedModel, RuntimeMissing: as in ``pretrained_skeleton``.
    """
    weights, config, where = weights_in(settings.folder), read_config(settings.folder), str(settings.folder)
    module = module_of(config, settings.dtype, seed if weights is None else None, where)
    on_meta = any(value.is_meta for value in module.parameters())
    if weights is not None and not on_meta and _is_renamed(module, weights):
        _load_translated(module, settings)
    return module


def weights_of(settings: PretrainedSettings, module: nn.Module) -> Path | None:
    """Return the file that leads to the weights of a folder, or None if the parameters are already in the module."""
    weights = weights_in(settings.folder)
    return None if weights is None or _is_renamed(module, weights) else weights


def exported_of(settings: PretrainedSettings) -> bytes:
    """Return the config, as JSON, for weights that a job writes."""
    return exported_config(read_config(settings.folder), settings.dtype)


@_silenced()
def module_of(fields: JsonObject, dtype: str, seed: int | None, where: str) -> nn.Module:
    """Build the model that a config describes.

    Args:
        fields: the fields of the config.
        dtype: dtype of the parameters, a key of ``DTYPES``.
        seed: initializes the parameters; None leaves them uninitialized.
        where: the folder, for error messages.

    Raises:
        InvalidInput, UnsupportedModel, RuntimeMissing: as in ``pretrained_skeleton``.
    """
    library = _transformers()
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in library.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{where}: got model_type {model_type!r}, expected one that transformers itself knows", code="FN-1217"
        )
    initialization: AbstractContextManager[object] = _uninitialized() if seed is None else seeded(seed)
    try:
        known = {key: value for key, value in fields.items() if key not in IGNORED_FIELDS}
        config = library.CONFIG_MAPPING[model_type].from_dict(known)
        head, model = _head_of(library, config, fields, where)
        with initialization:
            module: nn.Module = head.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation="sdpa" if getattr(model, "_supports_sdpa", False) else "eager",
                trust_remote_code=False,
            )
        if dtype == "float64" and hasattr(module, "set_experts_implementation"):
            # torch's grouped matrix product of all experts does not support float64.
            cast(LanguageModel, module).set_experts_implementation("eager")
        if seed is None:
            # The library does not tie weights if it does not initialize them.
            cast(LanguageModel, module).tie_weights()
        for name in SIZES:
            value = getattr(module.config, name, 1)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"got {name} {value}, expected at least 1")
    except _config_errors() as exc:
        text = " ".join(str(exc).split())
        raise InvalidInput(
            f"{where}: transformers cannot build this model ({type(exc).__name__}: {text})", code="FN-1219"
        ) from exc
    return module


def _head_of(library: ModuleType, config: object, fields: JsonObject, where: str) -> tuple[_Head, type]:
    """Return (the library's factory for this config, the class of the model).

    A config may fit both heads. It is a masked model if its ``architectures`` name one, or if it is not a decoder. With
    bidirectional attention, a model that predicts the next token would read its target.

    Raises:
        UnsupportedModel: this model type has neither a causal nor a masked language head.
    """
    causal, masked = library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_FOR_MASKED_LM_MAPPING
    names, kind = fields.get("architectures"), type(config)
    names_masked = isinstance(names, list) and any(str(name).endswith(MASKED_HEAD) for name in names)
    bidirectional = getattr(config, "is_decoder", True) is False and not getattr(config, "is_encoder_decoder", False)
    if kind in masked and (names_masked or bidirectional or kind not in causal):
        return library.AutoModelForMaskedLM, masked[kind]
    if kind in causal:
        return library.AutoModelForCausalLM, causal[kind]
    raise UnsupportedModel(
        f"{where}: got model_type {fields.get('model_type')!r}, expected a causal or a masked language model of "
        "transformers; this kind has no such head",
        code="FN-1217",
    )


def is_masked(module: nn.Module) -> bool:
    """Return whether a model predicts masked tokens instead of the next one."""
    return type(module).__name__.endswith(MASKED_HEAD)


def _is_renamed(module: nn.Module, weights: Path) -> bool:
    """Return whether the tensors in a file have other names than the parameters. An unreadable file has no names."""
    names = tensor_names(weights)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own = {name for name, _ in module.named_parameters()}
    return bool(own - names) and bool(names - known)


@_silenced()
def _load_translated(module: nn.Module, settings: PretrainedSettings) -> None:
    """Load weights that have the names of an older release of the library. Raises InvalidInput if they do not fit."""
    where = settings.folder
    unreadable: tuple[type[Exception], ...] = (
        *_config_errors(),
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
        raise InvalidInput(
            f"{where}: transformers cannot read its weights ({type(exc).__name__}: {text})", code="FN-1219"
        ) from exc
    missing, wrong = (sorted(map(str, report.get(name, ()))) for name in ("missing_keys", "mismatched_keys"))
    if missing or wrong:
        raise InvalidInput(
            f"{where}: got weights of which {len(wrong)} have another shape and {len(missing)} are missing, such as "
            f"{(missing or wrong)[0]}, expected all of {type(module).__name__}; write the model again with "
            "save_pretrained of transformers",
            code="FN-1219",
        )
    with torch.no_grad():
        values = dict(loaded.named_parameters())
        for name, value in module.named_parameters():
            value.copy_(values[name])


def vocabulary_of(module: nn.Module) -> int:
    """Return the number of tokens of a model of ``transformers``."""
    return cast(LanguageModel, module).get_input_embeddings().num_embeddings


def positions_of(module: nn.Module) -> int | None:
    """Return the longest sequence that a model's table of positions allows, or None if it has no table."""
    limit = getattr(module.config, "max_position_embeddings", None)
    token_table = cast(LanguageModel, module).get_input_embeddings()
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding) and each is not token_table]
    fits = isinstance(limit, int) and any(0 <= each.num_embeddings - limit <= MAX_OFFSET for each in tables)
    return limit if fits else None


def _transformers() -> ModuleType:
    if find_spec("transformers") is None:
        raise RuntimeMissing(
            "model: transformers is not installed here; pip install 'fanin[transformers]'", code="FN-1104"
        )
    return importlib.import_module("transformers")


def _uninitialized() -> AbstractContextManager[object]:
    with _silenced():
        context: AbstractContextManager[object] = importlib.import_module(
            "transformers.initialization"
        ).no_init_weights()
    return context


def _config_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the library raises for a wrong config: its own error and many of Python's."""
    own: type[Exception] = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    return (own, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

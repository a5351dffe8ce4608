"""A causal language model of the ``transformers`` library, out of a local folder as that library writes it.

    config.json                     its sizes; alone, the model begins from our seed
    model.safetensors               its weights, or
    model.safetensors.index.json    which of several .safetensors files beside it has which weight

Nothing is fetched, no code of the folder runs and nothing is unpickled: only the config's own kind of model, which the
library must know, and safetensors. Weights are not read here: each rank reads its own slices (``weights.py``), and
until then the values are pages that nobody has touched, which take no memory.
"""

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
OTHERS: Final = ("*.bin", "*.pt", "*.pth", "*.safetensors")
"""What there must be none of where neither file of weights is: they would be left unread without a word."""
UNTOLD: Final = ("auto_map", "attn_implementation", "base_model_tp_plan", "base_model_pp_plan")
"""What of a config the library never hears: what would lead to code, the folder's own or attention that is fetched, and
plans, which are the library's to say."""
Row = Mapping[str, object]


class Tied(Protocol):
    """What is called of such a model."""

    def tie_weights(self) -> None: ...


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

    The folder is read once: when the job ends it may be gone.
    """

    module: nn.Module
    weights: Path | None
    exported: bytes


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
    weights, row = weights_in(settings.folder), read_config(settings.folder)
    module = module_of(row, settings.dtype, seed if weights is None else None, str(settings.folder))
    return Pretrained(module=module, weights=weights, exported=_exported(row, settings.dtype))


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
        with begun:
            module: nn.Module = library.AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
            )
        if seed is None:
            # Who leaves the values out leaves this out with them.
            cast(Tied, module).tie_weights()
        for name, value in _sizes(module).items():
            if value < 1:
                raise ValueError(f"got {name} {value}, expected at least 1")
    except _refused() as exc:
        text = " ".join(str(exc).split())
        raise InvalidInput(f"{where}: transformers cannot make this model ({type(exc).__name__}: {text})") from exc
    return module


def _exported(row: Row, dtype: str) -> bytes:
    """The folder's config for weights that are written by this job: theirs is the job's dtype."""
    kept = {key: value for key, value in row.items() if key not in ("torch_dtype", "auto_map")}
    return json.dumps(kept | {"dtype": dtype}, indent=2, sort_keys=True).encode() + b"\n"


def vocabulary_of(module: nn.Module) -> int:
    """How many tokens a model of ``transformers`` knows."""
    return _sizes(module)["vocab_size"]


def _sizes(module: nn.Module) -> dict[str, int]:
    return {name: int(getattr(module.config, name)) for name in SIZES}


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

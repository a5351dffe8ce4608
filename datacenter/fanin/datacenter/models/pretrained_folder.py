"""Reads the files of a model folder, as the ``transformers`` library writes it.

    config.json                     the sizes of the model
    model.safetensors               its weights, or
    model.safetensors.index.json    the names of several .safetensors files and of the weights in each

Nothing is unpickled: a pickle can run code. Only the names of the weights are read here; each rank reads its own slices
(``checkpoints.weights``).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fanin.edge.files import without_foreign
from fanin.protos.errors import InvalidInput, UnsupportedModel

CONFIG: Final = "config.json"
ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES: Final = 8
"""Bytes of the size at the start of a safetensors file, little-endian."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the safetensors library accepts."""
WEIGHT_PATTERNS: Final = ("*.bin", "*.pt", "*.pth", "*.safetensors")
"""Files that may contain weights. Without a readable file of weights these are an error, so that none is ignored."""
JsonObject = Mapping[str, object]


def read_config(folder: Path) -> JsonObject:
    """Return the config of a folder.

    Raises:
        InvalidInput: the file cannot be read, or is not a JSON object.
        UnsupportedModel: the model is quantized.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(
            f"{path}: cannot be read ({exc.strerror}); expected the folder of a model", code="FN-1216"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})", code="FN-1216") from exc
    if not isinstance(config, dict):
        raise InvalidInput(f"{path}: got {type(config).__name__}, expected an object", code="FN-1216")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(f"{path}: got a quantized model, expected one whose weights are floats", code="FN-1217")
    return config


def weights_in(folder: Path) -> Path | None:
    """Return the file that leads to the weights of a folder, or None if it has no weights.

    Raises:
        InvalidInput: the folder has weights only in other files, such as pickles.
    """
    for name in (ONE_FILE, INDEX):
        if (folder / name).exists():
            return folder / name
    others = sorted(path.name for pattern in WEIGHT_PATTERNS for path in without_foreign(folder.glob(pattern)))
    if others:
        raise InvalidInput(
            f"{folder}: got weights in {others[0]}, expected {ONE_FILE} or {INDEX}: a pickle is never opened, because "
            "it can run code; write the model again with save_pretrained of transformers",
            code="FN-1221",
        )
    return None


def tensor_names(weights: Path) -> set[str]:
    """Return the names of the tensors in a file of weights, or an empty set if it cannot be read."""
    try:
        if weights.name == INDEX:
            return set(json.loads(weights.read_bytes())["weight_map"])
        with weights.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_BYTES), "little")
            return set(json.loads(file.read(min(size, MAX_HEADER_BYTES)))) - {"__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


def exported_config(config: JsonObject, dtype: str) -> bytes:
    """Return the config, as JSON, for weights that this job writes in its own dtype."""
    fields = {key: value for key, value in config.items() if key not in ("torch_dtype", "auto_map")}
    return json.dumps(fields | {"dtype": dtype}, indent=2, sort_keys=True).encode() + b"\n"

"""What a Bundle is assembled of, as a file::

    name = "mine"
    batch_size = 16
    num_classes = 10                  # 0, or left out: a model of values
    num_tokens = 0                    # how many tokens x may hold; 0, or left out: x is no tokens
    parameters = "parameters.npz"     # Version 0: a float32 array for each parameter

    [graphs.onnx]                     # the file of each Signature, by format; paths are relative to this file
    train = "train.onnx"
    evaluate = "evaluate.onnx"
    infer = "infer.onnx"

    [[slots.tflite]]                  # only where they are not found by themselves: the manifest's rows
    parameter = "w"                   # initializer: the parameter's name; kind: "float"; shape: the parameter's
    offset = 1024

It is read strictly: an unknown key is refused by its path.
"""

import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.assembly.assemble import AssembledGraphs
from fanin.edge.bundles.manifest_json import parse_slot
from fanin.edge.bundles.rows import Reader
from fanin.edge.bundles.slots import Slot
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidInput

DEFAULTS: Final = MappingProxyType({"num_classes": 0, "num_tokens": 0, "slots": {}})
SLOT_DEFAULTS: Final = MappingProxyType(
    {"kind": "float", "weight": "", "axis": -1, "permutation": [], "input_scale": 0.0, "offset": -1}
)
UNREADABLE: Final = (EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What numpy raises at files that are none."""


def read_assembly(path: Path) -> AssembledGraphs:
    """What the file names, read. Raises InvalidInput; OSError for a file that is not there."""
    try:
        root = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: not a TOML file ({exc})") from exc
    reader = Reader({**DEFAULTS, **root}, str(path))
    reader.only("name batch_size num_classes num_tokens parameters graphs slots")
    parameters = _parameters(path.parent / reader.text("parameters"))
    slots = reader.child("slots")
    return AssembledGraphs(
        name=reader.text("name"),
        batch_size=reader.integer("batch_size"),
        num_classes=reader.integer("num_classes"),
        num_tokens=reader.integer("num_tokens"),
        parameters=parameters,
        graphs={
            graph_format: {name: (path.parent / files.text(name)).read_bytes() for name in files.row}
            for graph_format, files in reader.children("graphs")
        },
        slots={name: tuple(_slot(row, parameters) for row in slots.rows(name)) for name in slots.row},
    )


def _slot(reader: Reader, parameters: Mapping[str, Float32s]) -> Slot:
    row, name = reader.row, reader.row.get("parameter")
    if not isinstance(name, str) or name not in parameters:
        raise InvalidInput(f"{reader.path}.parameter: got {name!r}, expected one of {sorted(parameters)}")
    own = {"initializer": name, "shape": list(parameters[name].shape)}
    return parse_slot(Reader({**SLOT_DEFAULTS, **own, **row}, reader.path))


def _parameters(path: Path) -> dict[str, Float32s]:
    """The arrays of an .npz file by name; of what dtype they are is looked at where they are used."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise InvalidInput(f"{path}: got a single array, expected an .npz file with one for each parameter")
            with found:
                arrays: dict[str, object] = {name: found[name] for name in found}
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not a readable .npz file of plain arrays ({exc})") from exc
    kept = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    if odd := sorted(set(arrays) - set(kept)):
        raise InvalidInput(f"{path}: {odd} are no arrays, expected those that numpy.savez writes")
    return kept

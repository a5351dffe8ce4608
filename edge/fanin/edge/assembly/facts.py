"""Reader of the TOML file that lists the parts of a Bundle::

    name = "mine"
    batch_size = 16
    num_classes = 10                  # 0 or omitted: a regression model
    num_tokens = {x = 65}             # size of the vocabulary of each input that is tokens; omitted: none is
    optimizer.momentum = {default = 0.9, below = 1.0}  # settings that are inputs of train; omitted: none is
    parameters = "parameters.npz"     # Version 0: a float32 array for each parameter

    privacy_floor = {protocol = "secagg"}  # the least privacy of a Round (docs/howto/privacy-floor.md); omitted: none

    [graphs.onnx]                     # the file of each Signature, by format; paths are relative to this file
    train = "train.onnx"
    evaluate = "evaluate.onnx"
    infer = "infer.onnx"

    [[activations]]                   # tensors whose int8 grid a Version may change; omitted: none
    name = "onnx:relu"
    graph_format = "onnx"
    low = 0.0                         # the range that the grid represents
    high = 6.0

    [[slots.tflite]]                  # only if they cannot be found automatically; keys of a manifest's slot
    parameter = "w"                   # defaults: initializer and shape of the parameter, kind "float"
    offset = 1024

The file is read strictly: an unknown key is an error that names its path.
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
from fanin.edge.bundles.manifest_json import parse_activation, parse_setting, parse_slot
from fanin.edge.bundles.rows import Reader
from fanin.edge.bundles.slots import OF_ACTIVATION, Slot
from fanin.edge.floors.rows import parse_floor
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidInput

DEFAULTS: Final = MappingProxyType(
    {"num_classes": 0, "num_tokens": {}, "optimizer": {}, "slots": {}, "activations": [], "privacy_floor": {}}
)
SLOT_DEFAULTS: Final = MappingProxyType(
    {"kind": "float", "weight": "", "axis": -1, "permutation": [], "activation": "", "input_scale": 0.0, "offset": -1}
)
UNREADABLE: Final = (EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Exceptions of numpy for a file that is not an .npz file."""


def read_assembly(path: Path) -> AssembledGraphs:
    """Read the TOML file and all files that it names.

    Raises:
        InvalidInput: A file has a wrong form.
        OSError: A file cannot be opened.
    """
    try:
        root = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: not a TOML file ({exc})", code="FN-0305") from exc
    reader = Reader({**DEFAULTS, **root}, str(path))
    reader.only("name batch_size num_classes num_tokens optimizer parameters graphs slots activations privacy_floor")
    parameters = _parameters(path.parent / reader.text("parameters"))
    slots, num_tokens = reader.child("slots"), reader.child("num_tokens")
    return AssembledGraphs(
        name=reader.text("name"),
        batch_size=reader.integer("batch_size"),
        num_classes=reader.integer("num_classes"),
        num_tokens={name: num_tokens.integer(name) for name in num_tokens.row},
        optimizer={name: parse_setting(row) for name, row in reader.children("optimizer")},
        parameters=parameters,
        graphs={
            graph_format: {name: (path.parent / files.text(name)).read_bytes() for name in files.row}
            for graph_format, files in reader.children("graphs")
        },
        activations=tuple(parse_activation(row) for row in reader.rows("activations")),
        privacy_floor=parse_floor(reader.row["privacy_floor"], f"{path}: privacy_floor"),
        slots={name: tuple(_slot(row, parameters) for row in slots.rows(name)) for name in slots.row},
    )


def _slot(reader: Reader, parameters: Mapping[str, Float32s]) -> Slot:
    row, name = reader.row, reader.row.get("parameter")
    if name is None and row.get("kind") in OF_ACTIVATION:
        return parse_slot(Reader({**SLOT_DEFAULTS, "parameter": "", "shape": [], **row}, reader.path))
    if not isinstance(name, str) or name not in parameters:
        raise InvalidInput(
            f"{reader.path}.parameter: got {name!r}, expected one of {sorted(parameters)}", code="FN-0322"
        )
    own = {"initializer": name, "shape": list(parameters[name].shape)}
    return parse_slot(Reader({**SLOT_DEFAULTS, **own, **row}, reader.path))


def _parameters(path: Path) -> dict[str, Float32s]:
    """Return the arrays of an .npz file by name. ``AssembledGraphs`` checks their dtype."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidInput(
                    f"{path}: got a single array, expected an .npz file with one for each parameter", code="FN-0350"
                )
            with archive:
                arrays: dict[str, object] = {name: archive[name] for name in archive}
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not a readable .npz file of plain arrays ({exc})", code="FN-0350") from exc
    parameters = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    if others := sorted(set(arrays) - set(parameters)):
        raise InvalidInput(
            f"{path}: {others} are not arrays, expected only arrays as numpy.savez writes them", code="FN-0350"
        )
    return parameters

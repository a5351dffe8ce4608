"""A Bundle without graphs: the arrays of a model that is trained by code on the device, such as a Flower app.

Such a Bundle has no Signatures and no slots, and two artifacts::

    parameters   Version 0 of the float32 arrays, which travel, in canonical form (``fanin.edge.tensors``)
    arrays       JSON: the names of all arrays in the order of the code, and the values of those that stay local

The names of torch's norm buffers have their roles (``fanin.protos.roles``). A Plan gives others in ``[flower.roles]``.

Only float32 arrays are exchanged. The others, such as the counter ``num_batches_tracked`` of a normalization, stay on
the device. The device starts from the Bundle's values and keeps the values that its code returns.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.files import new_folder
from fanin.edge.tensors import Array, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidPlan
from fanin.protos.names import check_name
from fanin.protos.plans import FlowerPlan
from fanin.protos.roles import TensorRole, role_by_name

ARRAYS: Final = "arrays"
"""Name of the artifact."""
PARAMETERS: Final = "parameters"
MAX_SHOWN: Final = 8
LOCAL_KINDS: Final = "biuf"
"""Kinds of numpy dtypes that a local array may have: bool, integers and floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLayout:
    """The arrays of a Bundle without graphs.

    Attributes:
        names: The names of all arrays, in the order of the code.
        local: The initial values of the arrays that stay on the device, by name.
    """

    names: tuple[str, ...]
    local: Mapping[str, Array]

    def complete(self, travelling: Mapping[str, Array]) -> dict[str, Array]:
        """Return all arrays in the order of the code: those that travel, and the others with their initial values."""
        return {name: travelling[name] if name in travelling else self.local[name].copy() for name in self.names}


def write_arrays(arrays: Mapping[str, Array], folder: Path | str, key: SigningKey, name: str) -> Bundle:
    """Sign a Bundle without graphs and write it.

    Args:
        arrays: The initial arrays by name, in the order of the code.
        folder: A new or empty folder for the Bundle.
        key: The publisher's key.
        name: Name of the model, for people.

    Raises:
        InvalidInput: ``folder`` holds files or is no path, the name is none, or an array has no usable name, dtype or
            value.
    """
    path = new_folder("bundle: folder", folder)
    check_name("name", name)
    for each, value in arrays.items():
        if value.dtype.kind not in LOCAL_KINDS or (value.dtype.kind == "f" and not np.isfinite(value).all()):
            raise InvalidInput(
                f"array {each!r}: got {value.dtype} {value.shape}, expected finite numbers of a numpy dtype, float32 "
                "for an array that is trained; convert it",
                code="FN-0351",
            )
    travelling = {each: value for each, value in arrays.items() if value.dtype == np.float32}
    if not travelling:
        kinds = sorted({str(value.dtype) for value in arrays.values()})
        raise InvalidInput(
            f"arrays: got {len(arrays)} of {kinds}, expected at least one float32 array; convert them", code="FN-0351"
        )
    try:
        table = TensorTable.of({each: value.shape for each, value in travelling.items()})
    except ValueError as exc:
        raise InvalidInput(f"arrays: {exc}", code="FN-0351") from exc
    table = table.with_roles({each: role_by_name(each) for each in travelling})
    initial = table.flatten(travelling)
    table.check_values(initial)
    artifacts = {PARAMETERS: encode_parameters(table, initial), ARRAYS: _dump(arrays)}
    manifest = Manifest(
        name=name,
        batch_size=1,
        num_classes=0,
        table=table,
        signatures=MappingProxyType({}),
        slots=MappingProxyType({}),
        artifacts=MappingProxyType({each: artifact_of(data) for each, data in artifacts.items()}),
        initial=PARAMETERS,
    )
    write_bundle(path, dump_manifest(manifest), artifacts, key)
    return open_folder(path, trusted=[key.public])


def read_layout(bundle: Bundle) -> ArrayLayout:
    """Return the arrays of a Bundle without graphs. Raises InvalidBundle if it has graphs, or no valid arrays."""
    if bundle.manifest.signatures:
        raise InvalidBundle(
            f"bundle {bundle.manifest.name}: got the signatures {sorted(bundle.manifest.signatures)}, expected a "
            "bundle without graphs; write one with fanin bundle",
            code="FN-0360",
        )
    try:
        row = json.loads(bundle.artifact(ARRAYS))
        layout = ArrayLayout(
            names=tuple(map(str, row["names"])),
            local=MappingProxyType({str(name): _array(entry) for name, entry in row["local"].items()}),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise InvalidBundle(
            f"bundle {bundle.manifest.name}: its arrays cannot be read ({exc}); write it again", code="FN-0360"
        ) from exc
    expected = sorted([*layout.local, *(spec.name for spec in bundle.manifest.table.specs)])
    if sorted(layout.names) != expected:
        raise InvalidBundle(
            f"bundle {bundle.manifest.name}: lists other arrays than it has; write it again", code="FN-0360"
        )
    return layout


def table_in(manifest: Manifest, flower: FlowerPlan) -> TensorTable:
    """Return the table of a Run: that of the manifest. Without graphs, arrays have the roles that the Plan gives them.

    Raises:
        InvalidPlan: A pattern matches no array that travels, or two patterns match one.
    """
    if manifest.signatures:
        return manifest.table
    names, roles = [spec.name for spec in manifest.table.specs], dict[str, TensorRole]()
    for pattern, role in flower.roles.items():
        matches = [name for name in names if fnmatchcase(name, pattern)]
        what = f"plan: flower.roles: the pattern {pattern!r}"
        if not matches:
            raise InvalidPlan(
                f"{what} matches no array that travels, expected at least one of {names[:MAX_SHOWN]}; correct or "
                "remove it. Arrays of other dtypes than float32 stay on the device and have no role",
                code="FN-0240",
            )
        if both := [name for name in matches if name in roles]:
            raise InvalidPlan(
                f"{what} and another one match the array {both[0]!r}, expected one; make them more exact",
                code="FN-0240",
            )
        roles |= dict.fromkeys(matches, role)
    return manifest.table.with_roles(roles)


def _dump(arrays: Mapping[str, Array]) -> bytes:
    local = {
        name: {
            "dtype": value.dtype.newbyteorder("<").str,
            "shape": list(value.shape),
            "data": base64.b64encode(value.astype(value.dtype.newbyteorder("<")).tobytes()).decode(),
        }
        for name, value in arrays.items()
        if value.dtype != np.float32
    }
    return json.dumps({"names": list(arrays), "local": local}, separators=(",", ":")).encode()


def _array(entry: Mapping[str, object]) -> Array:
    dtype, data, shape = np.dtype(str(entry["dtype"])), base64.b64decode(str(entry["data"])), entry["shape"]
    if dtype.kind not in LOCAL_KINDS or not isinstance(shape, list):
        raise ValueError(f"got dtype {dtype} and shape {shape}, expected numbers and a list")
    return np.frombuffer(data, dtype).reshape(shape)

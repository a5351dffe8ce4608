"""A Bundle without graphs: the arrays of a model that is trained by code on the device, such as a Flower app.

Such a Bundle has no Signatures and no slots, and two artifacts::

    parameters   Version 0 of the arrays that travel, as float32 in canonical form (``fanin.edge.tensors``)
    arrays       JSON: the names of all arrays in the order of the code, the dtypes of those that travel unless float32,
                 and the values of those that stay local

An array travels as float32, and the code receives and returns it in its own dtype::

    float16, float32, float64   a parameter, or the role of its name (``fanin.protos.roles``)
    integers up to 2^24         a counter, in the range of its dtype: the mean is rounded to whole numbers
    other arrays                stay local, and so do those that the publisher keeps

A Plan gives other roles in ``[flower.roles]``. The device starts from the Bundle's values of its local arrays and keeps
the values that its code returns.
"""

import base64
import json
from collections.abc import Mapping, Sequence
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
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.queries.query import StatisticsQuery
from fanin.edge.tensors import Array, Float32s, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidPlan
from fanin.protos.names import check_name
from fanin.protos.plans import FlowerPlan
from fanin.protos.roles import LARGEST, RoleKind, TensorRole, role_by_name

ARRAYS: Final = "arrays"
"""Name of the artifact."""
PARAMETERS: Final = "parameters"
MAX_SHOWN: Final = 8
LOCAL_KINDS: Final = "biuf"
"""Kinds of numpy dtypes that a local array may have: bool, integers and floats."""
MAX_WHOLE: Final = 1 << 24
"""float32 has all whole numbers up to this one."""
_MAX_FLOAT_BYTES: Final = 8
_MAX_INTEGER: Final = 1 << 62
_FLOAT32: Final = np.dtype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLayout:
    """The arrays of a Bundle without graphs.

    Attributes:
        names: The names of all arrays, in the order of the code.
        dtypes: The dtypes of the arrays that travel and are not float32 in the code, by name.
        local: The initial values of the arrays that stay on the device, by name.
    """

    names: tuple[str, ...]
    dtypes: Mapping[str, "np.dtype[np.generic]"]
    local: Mapping[str, Array]

    def complete(
        self, travelling: Mapping[str, Float32s], local: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return all arrays in the order and with the dtypes of the code.

        Args:
            travelling: The float32 values of the arrays that travel, by name.
            local: The values of the others; None for the initial ones.
        """
        others = self.local if local is None else local
        return {
            name: _cast(travelling[name], self.dtypes.get(name, _FLOAT32))
            if name in travelling
            else others[name].copy()
            for name in self.names
        }


def _cast(values: Float32s, dtype: "np.dtype[np.generic]") -> Array:
    """Return values in another dtype: integers are rounded, and values that the dtype lacks are its nearest ones."""
    if dtype == _FLOAT32:
        return values
    exact = values.astype(np.float64)
    if dtype.kind == "f":
        widest = np.finfo(dtype.str)
        return np.clip(exact, widest.min, widest.max).astype(dtype)
    # The largest int64 is no float64.
    limits = np.iinfo(dtype.str)
    return np.clip(np.rint(exact), max(limits.min, -_MAX_INTEGER), min(limits.max, _MAX_INTEGER)).astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayChoices:
    """Choices of a publisher.

    Attributes:
        kept: Patterns of the names of arrays that stay on the device, in which ``*`` is any text.
        privacy_floor: The least privacy with which devices train the arrays.
    """

    kept: Sequence[str] = ()
    privacy_floor: PrivacyFloor = NO_FLOOR


NO_CHOICES: Final = ArrayChoices()


def write_arrays(
    arrays: Mapping[str, Array], folder: Path | str, key: SigningKey, name: str, choices: ArrayChoices = NO_CHOICES
) -> Bundle:
    """Sign a Bundle without graphs and write it.

    Args:
        arrays: The initial arrays by name, in the order of the code.
        folder: A new or empty folder for the Bundle.
        key: The publisher's key.
        name: Name of the model, for people.
        choices: What stays on devices, and their floor.

    Raises:
        InvalidInput: ``folder`` holds files or is no path, the name is none, an array has no usable name, dtype or
            value, or a pattern matches no array.
    """
    path = new_folder("bundle: folder", folder)
    check_name("name", name)
    for each, value in arrays.items():
        if value.dtype.kind not in LOCAL_KINDS or (value.dtype.kind == "f" and not np.isfinite(value).all()):
            raise InvalidInput(
                f"array {each!r}: got {value.dtype} {value.shape}, expected finite numbers of a numpy dtype; convert "
                "it",
                code="FN-0351",
            )
    travelling = _travelling(arrays, choices.kept)
    try:
        table = TensorTable.of({each: value.shape for each, value in travelling.items()})
    except ValueError as exc:
        raise InvalidInput(f"arrays: {exc}", code="FN-0351") from exc
    table = table.with_roles({each: _role(each, value) for each, value in travelling.items()})
    initial = table.flatten(travelling)
    table.check_values(initial)
    artifacts = {PARAMETERS: encode_parameters(table, initial), ARRAYS: _dump(arrays, travelling)}
    manifest = Manifest(
        name=name,
        batch_size=1,
        num_classes=0,
        table=table,
        signatures=MappingProxyType({}),
        slots=MappingProxyType({}),
        artifacts=MappingProxyType({each: artifact_of(data) for each, data in artifacts.items()}),
        initial=PARAMETERS,
        privacy_floor=choices.privacy_floor,
    )
    write_bundle(path, dump_manifest(manifest), artifacts, key)
    return open_folder(path, trusted=[key.public])


def write_query(query: StatisticsQuery, folder: Path | str, key: SigningKey, name: str) -> Bundle:
    """Sign the Bundle of a statistics Run and write it: a query, whose sums are zero.

    Args:
        query: The query.
        folder: A new or empty folder for the Bundle.
        key: The publisher's key.
        name: Name of the query, for people.

    Raises:
        InvalidInput: ``folder`` holds files or is no path, or the name is none.
    """
    path = new_folder("bundle: folder", folder)
    check_name("name", name)
    artifacts = {PARAMETERS: encode_parameters(query.table, np.zeros(query.table.num_values, np.float32))}
    manifest = Manifest(
        name=name,
        batch_size=1,
        num_classes=0,
        table=query.table,
        signatures=MappingProxyType({}),
        slots=MappingProxyType({}),
        artifacts=MappingProxyType({each: artifact_of(data) for each, data in artifacts.items()}),
        initial=PARAMETERS,
        query=query,
    )
    write_bundle(path, dump_manifest(manifest), artifacts, key)
    return open_folder(path, trusted=[key.public])


def _travelling(arrays: Mapping[str, Array], kept: Sequence[str]) -> dict[str, Array]:
    """Return the arrays that travel. Raises InvalidInput."""
    if unused := [pattern for pattern in kept if not any(fnmatchcase(name, pattern) for name in arrays)]:
        raise InvalidInput(
            f"keep: the pattern {unused[0]!r} matches no array, expected at least one of {list(arrays)[:MAX_SHOWN]}; "
            "correct or remove it",
            code="FN-0351",
        )
    travelling = {
        name: value
        for name, value in arrays.items()
        if _can_travel(value) and not any(fnmatchcase(name, pattern) for pattern in kept)
    }
    if not travelling:
        kinds = sorted({str(value.dtype) for value in arrays.values()})
        raise InvalidInput(
            f"arrays: got {len(arrays)} of {kinds}, of which none travels, expected at least one of floats, or of "
            f"whole numbers up to {MAX_WHOLE}; convert them, or keep fewer",
            code="FN-0351",
        )
    for name, value in travelling.items():
        if (largest := np.abs(value.astype(np.float64)).max(initial=0.0)) > LARGEST:
            raise InvalidInput(
                f"array {name!r}: got {largest:g}, expected values of float32, because arrays travel as float32; scale "
                "it",
                code="FN-0351",
            )
    return travelling


def _can_travel(value: Array) -> bool:
    if value.dtype.kind == "f":
        return value.dtype.itemsize <= _MAX_FLOAT_BYTES
    is_whole = value.dtype.kind in "iu"
    return is_whole and bool(((value >= -MAX_WHOLE) & (value <= MAX_WHOLE)).all())  # type: ignore[operator]


def _role(name: str, value: Array) -> TensorRole:
    """Return the role of an array that travels: a counter for integers, in the range of its dtype and of its name."""
    role = role_by_name(name)
    if value.dtype.kind == "f":
        return role
    limits = np.iinfo(value.dtype.str)
    lowest = max(limits.min, -MAX_WHOLE) if role.lowest is None else role.lowest
    return TensorRole(role=RoleKind.COUNTER, lowest=float(lowest), highest=float(min(limits.max, MAX_WHOLE)))


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
            dtypes=MappingProxyType({str(name): _dtype(str(text)) for name, text in row["dtypes"].items()}),
            local=MappingProxyType({str(name): _array(entry) for name, entry in row["local"].items()}),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise InvalidBundle(
            f"bundle {bundle.manifest.name}: its arrays cannot be read ({exc}); write it again", code="FN-0360"
        ) from exc
    expected = sorted([*layout.local, *(spec.name for spec in bundle.manifest.table.specs)])
    if sorted(layout.names) != expected or layout.dtypes.keys() - {spec.name for spec in bundle.manifest.table.specs}:
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
                "remove it. Arrays that stay on the device have no role",
                code="FN-0240",
            )
        if both := [name for name in matches if name in roles]:
            raise InvalidPlan(
                f"{what} and another one match the array {both[0]!r}, expected one; make them more exact",
                code="FN-0240",
            )
        roles |= dict.fromkeys(matches, role)
    return manifest.table.with_roles(roles)


def _dump(arrays: Mapping[str, Array], travelling: Mapping[str, Array]) -> bytes:
    dtypes = {name: _little(value) for name, value in travelling.items() if value.dtype != np.float32}
    local = {
        name: {
            "dtype": _little(value),
            "shape": list(value.shape),
            "data": base64.b64encode(value.astype(_little(value)).tobytes()).decode(),
        }
        for name, value in arrays.items()
        if name not in travelling
    }
    row = {"names": list(arrays), "dtypes": dtypes, "local": local}
    return json.dumps(row, separators=(",", ":")).encode()


def _little(value: Array) -> str:
    """Return the name of an array's dtype, little-endian."""
    return value.dtype.newbyteorder("<").str


def _dtype(text: str) -> "np.dtype[np.generic]":
    dtype = np.dtype(text)
    if dtype.kind not in LOCAL_KINDS:
        raise ValueError(f"got dtype {dtype}, expected numbers")
    return dtype


def _array(entry: Mapping[str, object]) -> Array:
    dtype, data, shape = _dtype(str(entry["dtype"])), base64.b64decode(str(entry["data"])), entry["shape"]
    if not isinstance(shape, list):
        raise ValueError(f"got shape {shape}, expected a list")
    return np.frombuffer(data, dtype).reshape(shape)

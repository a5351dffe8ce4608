"""The JSON form of the manifest: the bytes that a publisher signs.

``parse_manifest(dump_manifest(manifest)) == manifest``. The parser is strict (``rows``): an unknown key, a missing key
or a wrong type is an error. The signature covers all bytes, so a reader that skipped unknown keys would run less than
the publisher signed. The format number is checked first: a newer format is reported as such and not as a wrong key.
"""

import json
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from fanin.edge.bundles.derived import derived_row, parse_derived
from fanin.edge.bundles.manifest import LocalParameters, Manifest, OptimizerSetting
from fanin.edge.bundles.rows import Reader
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.floors.rows import floor_row, parse_floor
from fanin.edge.lengths import Lengths
from fanin.edge.queries.files import parse_query, query_row
from fanin.edge.ranges import Activation
from fanin.edge.signatures import DTYPES, Port, Signature
from fanin.edge.tensors import TensorTable
from fanin.protos.chunks import Artifact, ChunkRef
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.protos.roles import PARAMETER, RoleKind, TensorRole

FORMAT: Final = 3
KEYS: Final = (
    "format name batch_size num_classes num_tokens lengths optimizer parameters roles derived signatures slots "
    "activations artifacts initial"
)
"""The keys of every manifest. ``fleet.proto`` describes them all."""
OPTIONAL_KEYS: Final = "local other_batch_sizes privacy_floor query"
KEPT_MANIFESTS: Final = 2


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the JSON bytes of a manifest, ready to be signed. Keys are sorted."""
    row = {
        "format": FORMAT,
        "name": manifest.name,
        "batch_size": manifest.batch_size,
        "num_classes": manifest.num_classes,
        "num_tokens": dict(manifest.num_tokens),
        "lengths": _lengths_row(manifest.lengths),
        "optimizer": {
            name: {"default": setting.default, "below": setting.below} for name, setting in manifest.optimizer.items()
        },
        "parameters": {spec.name: list(spec.shape) for spec in manifest.table.specs},
        "roles": {name: _role_row(role) for name, role in manifest.table.roles.items()},
        "signatures": {
            name: {
                "inputs": [_port_row(port) for port in signature.inputs],
                "outputs": [_port_row(port) for port in signature.outputs],
                "graphs": dict(signature.graphs),
            }
            for name, signature in manifest.signatures.items()
        },
        "derived": derived_row(manifest.derived),
        "slots": {name: [slot_row(slot) for slot in slots] for name, slots in manifest.slots.items()},
        "activations": [activation_row(row) for row in manifest.activations],
        "artifacts": {
            name: {
                "sha256": artifact.sha256,
                "size_bytes": artifact.size_bytes,
                "chunks": [
                    {"sha256": ref.sha256, "size_bytes": ref.size_bytes, "url": ref.url} for ref in artifact.chunks
                ],
            }
            for name, artifact in manifest.artifacts.items()
        },
        "initial": manifest.initial,
    }
    if manifest.local is not None:
        # Only where there are some: the manifest of every other Bundle keeps its bytes.
        row["local"] = {
            "parameters": {spec.name: list(spec.shape) for spec in manifest.local.table.specs},
            "initial": manifest.local.initial,
        }
    if manifest.other_batch_sizes:
        row["other_batch_sizes"] = list(manifest.other_batch_sizes)
    if manifest.privacy_floor != NO_FLOOR:
        row["privacy_floor"] = floor_row(manifest.privacy_floor)
    if manifest.query is not None:
        row["query"] = query_row(manifest.query)
    return json.dumps(row, indent=1, sort_keys=True).encode() + b"\n"


@lru_cache(maxsize=KEPT_MANIFESTS)
def parse_manifest(data: bytes) -> Manifest:
    """Parse the JSON bytes of a manifest. The newest ones are kept: a device opens one Bundle in each Round.

    Raises:
        InvalidBundle: The bytes are not JSON, have another format number, or do not describe a valid Manifest.
    """
    try:
        # Not json.loads(data), which also reads UTF-16 and UTF-32: the same manifest would have several byte forms.
        root = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise InvalidBundle(f"manifest: not JSON ({exc})", code="FN-0305") from exc
    if not isinstance(root, dict):
        raise InvalidBundle(f"manifest: got {type(root).__name__}, expected an object", code="FN-0305")
    # True equals 1, and so does 1.0.
    if type(root.get("format")) is not int or root["format"] != FORMAT:
        raise InvalidBundle(
            f"manifest: got format {root.get('format')!r}, expected {FORMAT}; "
            "install a fanin that knows this format, or export the Bundle again",
            code="FN-0306",
        )
    try:
        return _manifest(Reader(root, "manifest"))
    except InvalidBundle:
        raise
    except (InvalidInput, ValueError) as exc:
        raise InvalidBundle(f"manifest: {exc}", code="FN-0308") from exc


def _manifest(reader: Reader) -> Manifest:
    reader.only(KEYS, optional=OPTIONAL_KEYS)
    parameters, num_tokens = reader.child("parameters"), reader.child("num_tokens")
    return Manifest(
        name=reader.text("name"),
        batch_size=reader.integer("batch_size"),
        num_classes=reader.integer("num_classes"),
        num_tokens=MappingProxyType({name: num_tokens.integer(name) for name in num_tokens.row}),
        table=_with_roles(TensorTable.of({name: parameters.shape(name) for name in parameters.row}), reader),
        signatures=MappingProxyType({name: _signature(row) for name, row in reader.children("signatures")}),
        slots=MappingProxyType(
            {
                name: tuple(parse_slot(row) for row in slots.rows(name))
                for slots in [reader.child("slots")]
                for name in slots.row
            }
        ),
        activations=tuple(parse_activation(row) for row in reader.rows("activations")),
        artifacts=MappingProxyType({name: _artifact(row) for name, row in reader.children("artifacts")}),
        initial=reader.text("initial"),
        derived=parse_derived(reader.child("derived")),
        optimizer=MappingProxyType({name: parse_setting(row) for name, row in reader.children("optimizer")}),
        lengths=_lengths(reader.child("lengths")),
        local=_local(reader.child("local")) if "local" in reader.row else None,
        other_batch_sizes=_other_batch_sizes(reader),
        privacy_floor=_privacy_floor(reader),
        query=parse_query(reader.row["query"], f"{reader.path}.query") if "query" in reader.row else None,
    )


def _role_row(role: TensorRole) -> dict[str, object]:
    bounds = {"lowest": role.lowest, "highest": role.highest}
    return {"role": role.role.value} | {name: bound for name, bound in bounds.items() if bound is not None}


def _with_roles(table: TensorTable, reader: Reader) -> TensorTable:
    roles = {name: _role(row) for name, row in reader.children("roles")}
    if strange := sorted(roles.keys() - {spec.name for spec in table.specs}):
        raise InvalidBundle(
            f"manifest.roles: got {strange[0]!r}, expected only names of the parameters", code="FN-0322"
        )
    return table.with_roles(roles)


def _role(reader: Reader) -> TensorRole:
    reader.only("role", optional="lowest highest")
    kind = reader.text("role")
    if kind not in set(RoleKind):
        raise InvalidBundle(
            f"{reader.path}.role: got {kind!r}, expected one of {[str(known) for known in RoleKind]}", code="FN-0307"
        )
    bounds = {name: reader.number(name) for name in ("lowest", "highest") if name in reader.row}
    role = TensorRole(role=RoleKind(kind), lowest=bounds.get("lowest"), highest=bounds.get("highest"))
    if role == PARAMETER:
        raise InvalidBundle(
            f"{reader.path}: got a parameter without a range, expected another role; leave the key out", code="FN-0308"
        )
    return role


def _other_batch_sizes(reader: Reader) -> tuple[int, ...]:
    if "other_batch_sizes" not in reader.row:
        return ()
    sizes = reader.shape("other_batch_sizes")
    if not sizes:
        raise InvalidBundle(
            f"{reader.path}.other_batch_sizes: got none, expected at least one; leave the key out", code="FN-0308"
        )
    return sizes


def _privacy_floor(reader: Reader) -> PrivacyFloor:
    """Return the floor. An empty one is refused: the same manifest would have two forms."""
    if "privacy_floor" not in reader.row:
        return NO_FLOOR
    floor = parse_floor(reader.row["privacy_floor"], f"{reader.path}.privacy_floor")
    if floor == NO_FLOOR:
        raise InvalidBundle(
            f"{reader.path}.privacy_floor: got no demand, expected at least one; leave the key out", code="FN-0308"
        )
    return floor


def _local(reader: Reader) -> LocalParameters:
    reader.only("parameters initial")
    parameters = reader.child("parameters")
    table = TensorTable.of({name: parameters.shape(name) for name in parameters.row})
    return LocalParameters(table=table, initial=reader.text("initial"))


def parse_setting(reader: Reader) -> OptimizerSetting:
    """Parse a setting of the optimizer. Raises InvalidBundle for a wrong key, type or value."""
    reader.only("default below")
    default, below = reader.number("default"), reader.number("below")
    try:
        return OptimizerSetting(default=default, below=below)
    except ValueError as exc:
        raise InvalidBundle(f"{reader.path}: {exc}", code="FN-0312") from exc


def _lengths_row(lengths: Lengths | None) -> dict[str, object]:
    if lengths is None:
        return {"sizes": [], "axes": {}, "padding": {}}
    return {"sizes": list(lengths.sizes), "axes": dict(lengths.axes), "padding": dict(lengths.padding)}


def _lengths(reader: Reader) -> Lengths | None:
    reader.only("sizes axes padding")
    axes, padding = reader.child("axes"), reader.child("padding")
    if not reader.shape("sizes") and not axes.row and not padding.row:
        return None
    return Lengths(
        sizes=reader.shape("sizes"),
        axes={name: axes.integer(name) for name in axes.row},
        padding={name: padding.number(name) for name in padding.row},
    )


def _signature(reader: Reader) -> Signature:
    reader.only("inputs outputs graphs")
    graphs = reader.child("graphs")
    return Signature(
        inputs=tuple(_port(row) for row in reader.rows("inputs")),
        outputs=tuple(_port(row) for row in reader.rows("outputs")),
        graphs=MappingProxyType({key: graphs.text(key) for key in graphs.row}),
    )


def _port(reader: Reader) -> Port:
    reader.only("name dtype shape")
    port = Port(name=reader.text("name"), dtype=reader.text("dtype"), shape=reader.shape("shape", least=-1))
    if port.dtype not in DTYPES:
        raise InvalidBundle(f"{reader.path}.dtype: got {port.dtype!r}, expected one of {list(DTYPES)}", code="FN-0307")
    return port


def _port_row(port: Port) -> dict[str, object]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}


def slot_row(slot: Slot) -> dict[str, object]:
    """Return the JSON form of a slot."""
    return {
        "initializer": slot.initializer,
        "kind": slot.kind.value,
        "parameter": slot.parameter,
        "shape": list(slot.shape),
        "weight": slot.weight,
        "axis": slot.axis,
        "permutation": list(slot.permutation),
        "activation": slot.activation,
        "input_scale": slot.input_scale,
        "offset": slot.offset,
    }


def parse_slot(reader: Reader) -> Slot:
    """Parse one slot. Raises InvalidBundle for an unknown key, a missing key or a wrong type."""
    reader.only("initializer kind parameter shape weight axis permutation activation input_scale offset")
    kind = reader.text("kind")
    if kind not in set(SlotKind):
        raise InvalidBundle(
            f"{reader.path}.kind: got {kind!r}, expected one of {[str(known) for known in SlotKind]}", code="FN-0307"
        )
    return Slot(
        initializer=reader.text("initializer"),
        kind=SlotKind(kind),
        parameter=reader.text("parameter"),
        shape=reader.shape("shape"),
        weight=reader.text("weight"),
        axis=reader.integer("axis"),
        permutation=reader.shape("permutation"),
        activation=reader.text("activation"),
        input_scale=reader.number("input_scale"),
        offset=reader.integer("offset"),
    )


def activation_row(activation: Activation) -> dict[str, object]:
    """Return the JSON form of an activation."""
    return {
        "name": activation.name,
        "graph_format": activation.graph_format,
        "low": activation.low,
        "high": activation.high,
    }


def parse_activation(reader: Reader) -> Activation:
    """Parse one activation. Raises InvalidBundle for a wrong key, type or range."""
    reader.only("name graph_format low high")
    return Activation(
        name=reader.text("name"),
        graph_format=reader.text("graph_format"),
        low=reader.number("low"),
        high=reader.number("high"),
    )


def _artifact(reader: Reader) -> Artifact:
    reader.only("sha256 size_bytes chunks")
    chunks = []
    for row in reader.rows("chunks"):
        row.only("sha256 size_bytes url")
        chunks.append(ChunkRef(sha256=row.text("sha256"), size_bytes=row.integer("size_bytes"), url=row.text("url")))
    return Artifact(sha256=reader.text("sha256"), size_bytes=reader.integer("size_bytes"), chunks=tuple(chunks))

"""The manifest of a Bundle, and its artifacts: the graphs of an App in each format, and its initial parameters."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from fanin.edge.bundles.derived import NOTHING
from fanin.edge.bundles.manifest import LocalParameters, Manifest
from fanin.edge.bundles.slots import Slot
from fanin.edge.export.formats.graphs import Graphs
from fanin.edge.export.graph.vocabulary import count_tokens
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.signatures import Ports, Signature
from fanin.edge.tensors import Array, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import UnsupportedModel

PARAMETERS: Final = "parameters"
LOCAL: Final = "local"
"""Name of the artifact with the initial values of personal parameters."""
NO_PORTS: Final[Mapping[str, Ports]] = MappingProxyType({})


def assembled(
    prepared: Prepared, formats: Mapping[str, Graphs], ports: Mapping[str, Ports] = NO_PORTS
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest of a Bundle, and its artifacts by name.

    Args:
        prepared: The App.
        formats: The graphs in each format; empty for a Bundle without graphs.
        ports: The ports of each Signature of a Bundle without graphs.

    Raises:
        UnsupportedModel: The graphs of two formats have other ports or constants.
    """
    app = prepared.app
    arrays = {name: value.numpy() for name, value in prepared.parameters.items()}
    table, local = (_part_of(prepared.table, names) for names in (arrays.keys() - prepared.local, prepared.local))
    artifacts = {name: data for graphs in formats.values() for name, data in graphs.files.items()}
    artifacts[PARAMETERS] = _encoded(table, arrays)
    if prepared.local:
        artifacts[LOCAL] = _encoded(local, arrays)
    derived = NOTHING
    for name, graphs in formats.items():
        if not ports:
            ports, derived = graphs.ports, graphs.derived
        if graphs.ports != ports or graphs.derived != derived:
            raise UnsupportedModel(
                f"{prepared.what}: the graphs in {name} have other ports or constants than those in "
                f"{next(iter(formats))}; please report the module",
                code="FN-0787",
            )
    signatures = {
        name: Signature(
            inputs=inputs,
            outputs=outputs,
            graphs=MappingProxyType({key: graphs.signatures[name] for key, graphs in formats.items()}),
        )
        for name, (inputs, outputs) in ports.items()
    }
    manifest = Manifest(
        name=app.name,
        batch_size=app.batch_size,
        num_classes=app.num_classes,
        num_tokens=MappingProxyType(count_tokens(prepared)),
        table=table,
        signatures=MappingProxyType(signatures),
        slots=MappingProxyType(_slots(formats)),
        activations=tuple(row for graphs in formats.values() for row in graphs.activations),
        artifacts=MappingProxyType({name: artifact_of(artifact) for name, artifact in artifacts.items()}),
        initial=PARAMETERS,
        derived=derived,
        optimizer=MappingProxyType(dict(app.recipe.optimizer.settings)),
        lengths=app.lengths,
        local=LocalParameters(table=local, initial=LOCAL) if prepared.local else None,
        other_batch_sizes=tuple(app.other_batch_sizes),
        privacy_floor=app.privacy_floor,
    )
    return manifest, artifacts


def _part_of(table: TensorTable, names: Collection[str]) -> TensorTable:
    return TensorTable(tuple(spec for spec in table.specs if spec.name in names))


def _encoded(table: TensorTable, arrays: Mapping[str, Array]) -> bytes:
    return encode_parameters(table, table.flatten({spec.name: arrays[spec.name] for spec in table.specs}))


def _slots(formats: Mapping[str, Graphs]) -> dict[str, tuple[Slot, ...]]:
    """Return the slots of each format, and of each shorter length in it."""
    longest = {name: graphs.slots for name, graphs in formats.items()}
    return longest | {
        f"{name}@{size}": slots for name, graphs in formats.items() for size, slots in graphs.shorter.items()
    }

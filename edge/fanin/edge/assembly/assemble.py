"""A Bundle of graphs that another exporter made; it needs neither torch nor onnx, but a runtime of each format.

The graphs must have the ports that devices feed (``runtimes.graphs`` draws them). What is checked, before anything is
written:

1. each Signature has a graph in each format, and a runtime opens it;
2. its ports are those of the contract, in dtype, shape and batch, and the same in every format;
3. the ``infer`` graph has a slot for each parameter: given; or, in ONNX, a float32 constant of the parameter's name;
   or, in TFLite, the one place in the file where Version 0's values stand, in whatever order of dimensions;
4. a train step, an evaluation and a prediction run, and a sample that is masked out has no loss.

Whether a step learns is its maker's to test: there is no module here to compare it with.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.initializers import empty_constants, fill_constants, list_constants
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import DEVICE_SIGNATURES, DTYPES, Manifest, Port, Ports, Signature
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.bundles.slots import Slot, SlotKind, check_slots
from fanin.edge.runtimes.available import open_format
from fanin.edge.runtimes.base import LoadedModel, PaddedBatch, Runtime, StepSettings
from fanin.edge.runtimes.graphs import control_ports
from fanin.edge.runtimes.models import PREPROCESS, RAW, open_preprocess
from fanin.edge.tensors import Array, Float32s, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle

ONNX: Final = "onnx"
PARAMETERS: Final = "parameters"
ALIGNMENT: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledGraphs:
    """What a Bundle is made of.

    ``graphs`` has the file of each Signature by format and Signature, ``{"onnx": {"train": ..., ...}}``; in TFLite a
    file that has several is given for each. ``parameters`` are Version 0's by name. ``slots`` are those of the
    ``infer`` graph by format; where none are given they are found by name in ONNX and by their values in TFLite.
    ``num_tokens`` is how many tokens the model knows, 0 where x is something else.
    """

    name: str
    batch_size: int
    num_classes: int
    parameters: Mapping[str, Float32s]
    graphs: Mapping[str, Mapping[str, bytes]]
    slots: Mapping[str, tuple[Slot, ...]] = field(default_factory=dict)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.parameters or not self.graphs or not self.name:
            raise InvalidBundle("assemble: got no name, no parameters or no graphs, expected all three")
        known = (*DEVICE_SIGNATURES, PREPROCESS)
        names = {frozenset(graphs) for graphs in self.graphs.values()}
        for graph_format, graphs in self.graphs.items():
            if len(names) > 1 or not set(DEVICE_SIGNATURES) <= set(graphs) <= set(known):
                raise InvalidBundle(
                    f"assemble: got graphs for {sorted(graphs)} in {graph_format}, expected the same in every format: "
                    f"{list(DEVICE_SIGNATURES)}, and {PREPROCESS!r} in all or in none"
                )
        for name, value in self.parameters.items():
            if value.dtype != np.float32 or not np.isfinite(value).all():
                raise InvalidBundle(f"assemble: parameter {name!r} is {value.dtype}, expected finite float32 numbers")

    @property
    def table(self) -> TensorTable:
        """The layout of the parameters that travel."""
        return TensorTable.of({name: value.shape for name, value in self.parameters.items()})


def assemble(spec: AssembledGraphs, folder: Path, key: SigningKey) -> Bundle:
    """Check the graphs (the module's checklist), sign and write the Bundle into ``folder``.

    Raises InvalidBundle, or RuntimeMissing for a format that nothing installed here runs.
    """
    runtimes = {graph_format: open_format([graph_format]) for graph_format in spec.graphs}
    slots = {graph_format: _slots(spec, graph_format) for graph_format in spec.graphs}
    for found in slots.values():
        # Before they are filled: what is filled here is what the manifest would refuse.
        check_slots(found, {one.name: one.shape for one in spec.table.specs})
    ports = _ports(spec, runtimes, slots)
    artifacts = {PARAMETERS: encode_parameters(spec.table, spec.table.flatten(spec.parameters))}
    names: dict[str, dict[str, str]] = {name: {} for name in ports}
    for graph_format, graphs in spec.graphs.items():
        for name, data in graphs.items():
            if name == "infer" and graph_format == ONNX:
                initializers = [slot.initializer for slot in slots[graph_format]]
                data = empty_constants(data, initializers, _what(name, graph_format))
            names[name][graph_format] = f"{name}.{graph_format}"
            artifacts[f"{name}.{graph_format}"] = data
    manifest = Manifest(
        name=spec.name,
        batch_size=spec.batch_size,
        num_classes=spec.num_classes,
        num_tokens=spec.num_tokens,
        table=spec.table,
        signatures=MappingProxyType(
            {
                name: Signature(inputs=inputs, outputs=outputs, graphs=MappingProxyType(names[name]))
                for name, (inputs, outputs) in ports.items()
            }
        ),
        slots=MappingProxyType(slots),
        artifacts=MappingProxyType({name: artifact_of(data) for name, data in artifacts.items()}),
        initial=PARAMETERS,
    )
    data = dump_manifest(manifest)
    with tempfile.TemporaryDirectory(prefix="fanin-assemble-") as draft:
        write_bundle(Path(draft), data, artifacts, key)
        bundle = open_folder(Path(draft), trusted=[key.public])
        for runtime in runtimes.values():
            _try(bundle, runtime)
    write_bundle(folder, data, artifacts, key)
    return open_folder(folder, trusted=[key.public])


def _what(name: str, graph_format: str) -> str:
    return f"{name} graph ({graph_format})"


def _slots(spec: AssembledGraphs, graph_format: str) -> tuple[Slot, ...]:
    """The slots that were given, or one for each parameter's own constant (3)."""
    given = spec.slots.get(graph_format)
    what = _what("infer", graph_format)
    if given is None and graph_format == ONNX:
        given = tuple(
            Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=value.shape)
            for name, value in spec.parameters.items()
        )
    elif given is None:
        data = spec.graphs[graph_format]["infer"]
        given = tuple(_slot_at(name, value, data, what) for name, value in spec.parameters.items())
    if unfilled := sorted(set(spec.parameters) - {slot.parameter for slot in given}):
        raise InvalidBundle(f"{what}: no slot takes {unfilled}: its predictions would not follow the Versions")
    if graph_format != ONNX:
        return given
    constants = list_constants(spec.graphs[ONNX]["infer"], what)
    dtypes = {SlotKind.WEIGHT: "int8", SlotKind.BIAS: "int32"}
    for slot in given:
        found = constants.get(slot.initializer)
        if found is None or (found.dtype, found.shape) != (dtypes.get(slot.kind, "float32"), slot.shape):
            got = "none" if found is None else f"{found.dtype or 'another type'} {found.shape}"
            raise InvalidBundle(
                f"{what}: constant {slot.initializer!r}: got {got}, expected {dtypes.get(slot.kind, 'float32')} "
                f"{slot.shape}, which a Version fills; rename the constant, or give the graph's slots"
            )
    return given


def _slot_at(name: str, value: Float32s, data: bytes, what: str) -> Slot:
    """The one place in a file where a parameter's values stand, its dimensions in any order. Raises InvalidBundle."""
    # Orders in which the values are the same ones in a row are one and the same.
    rows: dict[bytes, tuple[int, ...]] = {}
    for order in permutations(range(value.ndim)):
        rows.setdefault(value.transpose(order).astype("<f4").tobytes(), order)
    found = [(place, order) for row, order in rows.items() for place in _places(row, data)]
    if len(found) != 1:
        raise InvalidBundle(
            f"{what}: the values of {name!r} stand at {len(found)} places in the file, expected one, which a Version "
            "fills; export it with values that nothing else has (not all zeros), or give its slot with the offset"
        )
    ((offset, order),) = found
    shape = tuple(value.shape[dim] for dim in order)
    permutation = () if order == tuple(range(value.ndim)) else order
    return Slot(
        initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=shape, permutation=permutation, offset=offset
    )


def _places(row: bytes, data: bytes) -> list[int]:
    """Where float32 values stand in a file, each at a multiple of its size."""
    found, place = [], data.find(row)
    while place >= 0:
        if place % ALIGNMENT == 0:
            found.append(place)
        place = data.find(row, place + 1)
    return found


def _ports(
    spec: AssembledGraphs, runtimes: Mapping[str, Runtime], slots: Mapping[str, tuple[Slot, ...]]
) -> dict[str, Ports]:
    """Each Signature's ports as every format has them (1, 2). Raises InvalidBundle."""
    found: dict[str, Ports] = {}
    for graph_format, graphs in spec.graphs.items():
        for name, data in graphs.items():
            what = _what(name, graph_format)
            values = fill_slots(slots[graph_format], spec.table, spec.table.flatten(spec.parameters))
            if name == "infer" and graph_format == ONNX:
                data = fill_constants(data, values, what)
            opened = runtimes[graph_format].open_model(data, what, "" if graph_format == ONNX else name)
            ports = _signed(opened, what, any_batch=name in ("infer", PREPROCESS))
            if found.setdefault(name, ports) != ports:
                raise InvalidBundle(f"{what}: has other ports than in {next(iter(spec.graphs))}, expected the same")
    _check_contract(spec, found)
    return found


def _signed(opened: LoadedModel, what: str, *, any_batch: bool) -> Ports:
    """A graph's ports as a manifest has them, in the order of their names; -1 for a batch that may vary."""
    rows = []
    for kind, ports in (("inputs", opened.inputs), ("outputs", opened.outputs)):
        row = []
        for port in sorted(ports, key=lambda port: port.name):
            shape = (-1, *port.shape[1:]) if any_batch and port.shape else port.shape
            if port.dtype not in DTYPES or -1 in shape[any_batch:]:
                raise InvalidBundle(
                    f"{what}: {kind}: got {port.name!r} as {port.dtype} {port.shape}, expected one of {list(DTYPES)} "
                    "and fixed lengths; export it for one batch size"
                )
            row.append(Port(name=port.name, dtype=port.dtype, shape=shape))
        rows.append(tuple(row))
    return rows[0], rows[1]


def _check_contract(spec: AssembledGraphs, found: Mapping[str, Ports]) -> None:
    """Dtypes, shapes and batch of what devices feed and read; which names there must be, opening tells. (2)"""
    x = {port.name: port for port in found["infer"][0]}.get("x")
    if x is None:
        raise InvalidBundle(f"infer graph: got inputs {[port.name for port in found['infer'][0]]}, expected 'x'")
    batch, scalar = (spec.batch_size,), ("float32", ())
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "x": (x.dtype, (*batch, *x.shape[1:])),
        "mask": ("float32", batch),
        "loss": scalar,
        "loss_sum": scalar,
        "learning_rate": scalar,
        "step": scalar,
        "proximal_weight": scalar,
    }
    for spec_row in spec.table.specs:
        for name in (spec_row.name, f"next.{spec_row.name}", f"anchor.{spec_row.name}"):
            expected[name] = ("float32", spec_row.shape)
    if controls := control_ports(spec.table, found["train"][0]):
        raise InvalidBundle(
            f"train graph: got the input {controls[0]!r}, expected none of that kind: no device sets SCAFFOLD's "
            "control variates, so it would train without them"
        )
    for name in ("train", "evaluate"):
        ports = {port.name: port for row in found[name] for port in row}
        for port in ports.values():
            wanted = expected.get(port.name, (port.dtype, port.shape))
            if (port.dtype, port.shape) != wanted:
                raise InvalidBundle(
                    f"{name} graph: got {port.name!r} as {port.dtype} {port.shape}, expected {wanted[0]} {wanted[1]}"
                )
        y = ports.get("y")
        label = "int32" if spec.num_classes else "float32"
        if y is None or y.dtype != label or y.shape[:1] != batch:
            raise InvalidBundle(f"{name} graph: got 'y' as {y}, expected {label} for {spec.batch_size} samples")
    if PREPROCESS in found and ([port.name for port in found[PREPROCESS][0]] != [RAW]):
        raise InvalidBundle(f"{PREPROCESS} graph: got inputs {found[PREPROCESS][0]}, expected {RAW!r} alone")


def _try(bundle: Bundle, runtime: Runtime) -> None:
    """Run everything once on zeros, as a device would (4). Raises InvalidBundle."""
    manifest, parameters = bundle.manifest, bundle.initial_parameters()
    ports = {port.name: port for port in manifest.signatures["train"].inputs}
    step, evaluate = runtime.open_train(bundle), runtime.open_evaluate(bundle)
    x, y, mask = (_zeros(ports[name], manifest.batch_size) for name in ("x", "y", "mask"))
    masked = PaddedBatch(x=x, y=y, mask=mask)  # type: ignore[arg-type]  # the dtypes are the ports', as just checked
    step(step.begin(parameters), masked, StepSettings(learning_rate=0.0))
    loss_sum = evaluate(parameters, masked).loss_sum
    if loss_sum != 0.0:
        raise InvalidBundle(f"evaluate graph: got a loss of {loss_sum} from samples with mask 0.0, expected 0.0")
    predict, preprocess = runtime.open_predict(bundle, parameters), open_preprocess(runtime, bundle)
    logits = predict(masked.x[:1])
    last = logits.shape[-1]
    if manifest.num_classes and last != manifest.num_classes:
        raise InvalidBundle(f"infer graph: got logits {logits.shape}, expected {manifest.num_classes} of each sample")
    if preprocess is not None:
        raw = _zeros(manifest.signatures[PREPROCESS].inputs[0], 1)
        preprocess(raw)  # type: ignore[arg-type]  # as above


def _zeros(port: Port, num: int) -> Array:
    return np.zeros((num, *port.shape[1:]), port.dtype)

"""Assembly of a Bundle from graphs that another exporter wrote. It needs a runtime per format, and no torch or onnx.

The graphs must have the inputs and outputs that ``runtimes.graphs`` lists. Checks before the Bundle is written:

1. Each Signature has a graph in each format, and a runtime opens it.
2. Its inputs and outputs have the required dtypes, shapes and batch size, and are the same in every format.
3. The ``infer`` graph has a slot for each parameter. The caller lists the slots, or the assembly detects them. In ONNX
   a slot is a float32 constant with the parameter's name. In TFLite it is the only position of Version 0's values, in
   any order of dimensions.
4. A train step, an evaluation and a prediction run, and a masked sample has no loss.

Whether a train step learns is not checked, because there is no torch module to compare it with.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.formats import file_format
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest, OptimizerSetting
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.bundles.slots import Slot, check_slots
from fanin.edge.files import new_folder
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.ranges import Activation, grids_of
from fanin.edge.runtimes.available import open_format
from fanin.edge.runtimes.base import LoadedModel, Runtime, StepSettings
from fanin.edge.runtimes.graphs import (
    CONTROL,
    form_of,
    next_port,
    parameter_port,
    probe_batch,
    setting_values,
    state_port,
)
from fanin.edge.runtimes.models import PREPROCESS, RAW, open_preprocess
from fanin.edge.signatures import DEVICE_SIGNATURES, DTYPES, Port, Ports, Signature
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.protos.names import check_name
from fanin.protos.roles import role_by_name

PARAMETERS: Final = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledGraphs:
    """The parts of a Bundle.

    Attributes:
        name: Name of the model, for people.
        batch_size: Batch size of the ``train`` and ``evaluate`` graphs.
        num_classes: Number of labels; 0 for a regression model.
        parameters: Version 0 by name.
        graphs: Graph files by format and Signature, ``{"onnx": {"train": ..., ...}}``. A TFLite file with several
            signatures is listed once for each.
        slots: Slots of the ``infer`` graph by format. For a format without an entry they are detected.
        activations: The activations of the ``infer`` graphs whose grids are slots. Without them all grids stay as in
            the graphs.
        num_tokens: Size of the vocabulary of each input that is tokens, by name.
        optimizer: The settings of the optimizer that are inputs of the train graph, by name.
        privacy_floor: The least privacy with which devices train the model.
    """

    name: str
    batch_size: int
    num_classes: int
    parameters: Mapping[str, Float32s]
    graphs: Mapping[str, Mapping[str, bytes]]
    slots: Mapping[str, tuple[Slot, ...]] = field(default_factory=dict)
    activations: tuple[Activation, ...] = ()
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, OptimizerSetting] = field(default_factory=dict)
    privacy_floor: PrivacyFloor = NO_FLOOR

    def __post_init__(self) -> None:
        if not self.parameters or not self.graphs or not self.name:
            raise InvalidBundle("assemble: got no name, no parameters or no graphs, expected all three", code="FN-0313")
        known = (*DEVICE_SIGNATURES, PREPROCESS)
        names = {frozenset(graphs) for graphs in self.graphs.values()}
        for graph_format, graphs in self.graphs.items():
            if len(names) > 1 or not set(DEVICE_SIGNATURES) <= set(graphs) <= set(known):
                raise InvalidBundle(
                    f"assemble: got graphs for {sorted(graphs)} in {graph_format}, expected the same in every format: "
                    f"{list(DEVICE_SIGNATURES)}, and {PREPROCESS!r} in all or in none",
                    code="FN-0313",
                )
        for name, value in self.parameters.items():
            if value.dtype != np.float32 or not np.isfinite(value).all():
                kind = value.dtype if value.dtype != np.float32 else "NaN or infinity"
                raise InvalidBundle(
                    f"assemble: parameter {name!r}: got {kind}, expected finite float32 numbers", code="FN-0351"
                )
        try:
            self.table.check_values(self.table.flatten(self.parameters))
        except InvalidInput as exc:
            raise InvalidBundle(f"assemble: {exc}", code=exc.code) from exc

    @property
    def table(self) -> TensorTable:
        """Layout of the parameters, with the roles that their names show."""
        table = TensorTable.of({name: value.shape for name, value in self.parameters.items()})
        return table.with_roles({name: role_by_name(name) for name in self.parameters})


def assemble(spec: AssembledGraphs, folder: Path | str, key: SigningKey) -> Bundle:
    """Check the graphs by the checklist of this module, sign the Bundle and write it.

    Args:
        spec: The parts of the Bundle.
        folder: A new or empty folder for the Bundle.
        key: The publisher's key.

    Raises:
        InvalidBundle: A check failed.
        InvalidInput: ``folder`` holds files or is no path, or the name is none. Both are checked first.
        RuntimeMissing: No installed runtime runs one of the formats.
    """
    path = new_folder("assemble: folder", folder)
    check_name("name", spec.name)
    runtimes = {graph_format: open_format([graph_format]) for graph_format in spec.graphs}
    slots = {graph_format: _slots(spec, graph_format) for graph_format in spec.graphs}
    for graph_format, slots_of_format in slots.items():
        # The manifest repeats this check, but the slots are filled before it exists.
        listed = [row.name for row in spec.activations if row.graph_format == graph_format]
        check_slots(slots_of_format, {one.name: one.shape for one in spec.table.specs}, activations=listed)
    ports = _ports(spec, runtimes, slots)
    artifacts = {PARAMETERS: encode_parameters(spec.table, spec.table.flatten(spec.parameters))}
    names: dict[str, dict[str, str]] = {name: {} for name in ports}
    for graph_format, graphs in spec.graphs.items():
        for name, data in graphs.items():
            if name == "infer":
                data = file_format(graph_format).empty_slots(data, slots[graph_format], _what(name, graph_format))
            names[name][graph_format] = f"{name}.{graph_format}"
            artifacts[f"{name}.{graph_format}"] = data
    manifest = Manifest(
        name=spec.name,
        batch_size=spec.batch_size,
        num_classes=spec.num_classes,
        num_tokens=MappingProxyType(dict(spec.num_tokens)),
        optimizer=MappingProxyType(dict(spec.optimizer)),
        table=spec.table,
        signatures=MappingProxyType(
            {
                name: Signature(inputs=inputs, outputs=outputs, graphs=MappingProxyType(names[name]))
                for name, (inputs, outputs) in ports.items()
            }
        ),
        slots=MappingProxyType(slots),
        activations=spec.activations,
        artifacts=MappingProxyType({name: artifact_of(data) for name, data in artifacts.items()}),
        initial=PARAMETERS,
        privacy_floor=spec.privacy_floor,
    )
    data = dump_manifest(manifest)
    with tempfile.TemporaryDirectory(prefix="fanin-assemble-") as draft:
        write_bundle(Path(draft), data, artifacts, key)
        bundle = open_folder(Path(draft), trusted=[key.public])
        for runtime in runtimes.values():
            _run_once(bundle, runtime)
    write_bundle(path, data, artifacts, key)
    return open_folder(path, trusted=[key.public])


def _what(name: str, graph_format: str) -> str:
    return f"{name} graph ({graph_format})"


def _slots(spec: AssembledGraphs, graph_format: str) -> tuple[Slot, ...]:
    """Return the listed slots, or one slot per parameter (3)."""
    slots, data, what = spec.slots.get(graph_format), spec.graphs[graph_format]["infer"], _what("infer", graph_format)
    file = file_format(graph_format)
    if slots is None:
        slots = file.find_slots(data, spec.parameters, what)
    if unfilled := sorted(set(spec.parameters) - {slot.parameter for slot in slots}):
        raise InvalidBundle(
            f"{what}: got no slots for {unfilled}, expected one for each parameter; "
            "without it the predictions would not change with the Version",
            code="FN-0318",
        )
    file.check_slots(data, slots, what)
    return slots


def _ports(
    spec: AssembledGraphs, runtimes: Mapping[str, Runtime], slots: Mapping[str, tuple[Slot, ...]]
) -> dict[str, Ports]:
    """Return each Signature's ports, which all formats share (1, 2). Raises InvalidBundle."""
    ports_of: dict[str, Ports] = {}
    for graph_format, graphs in spec.graphs.items():
        file = file_format(graph_format)
        for name, data in graphs.items():
            what = _what(name, graph_format)
            if name == "infer":
                flat, grids = spec.table.flatten(spec.parameters), grids_of(spec.activations)
                values = fill_slots(slots[graph_format], spec.table, flat, grids=grids)
                data = file.fill_slots(data, slots[graph_format], values, what)
            model = runtimes[graph_format].open_model(data, what, name if file.has_signatures else "")
            ports = _manifest_ports(model, what, any_batch=name in ("infer", PREPROCESS))
            if ports_of.setdefault(name, ports) != ports:
                raise InvalidBundle(
                    f"{what}: has other ports than in {next(iter(spec.graphs))}, expected the same", code="FN-0342"
                )
    _check_contract(spec, ports_of)
    return ports_of


def _manifest_ports(model: LoadedModel, what: str, *, any_batch: bool) -> Ports:
    """Return a graph's ports in the manifest's form: sorted by name, with -1 for a batch of any size."""
    rows = []
    for kind, ports in (("inputs", model.inputs), ("outputs", model.outputs)):
        row = []
        for port in sorted(ports, key=lambda port: port.name):
            shape = (-1, *port.shape[1:]) if any_batch and port.shape else port.shape
            if port.dtype not in DTYPES or -1 in shape[any_batch:]:
                raise InvalidBundle(
                    f"{what}: {kind}: got {port.name!r} as {form_of(port.dtype, port.shape)}, expected one of "
                    f"{list(DTYPES)} and fixed lengths; export it for one batch size",
                    code="FN-0342",
                )
            row.append(Port(name=port.name, dtype=port.dtype, shape=shape))
        rows.append(tuple(row))
    return rows[0], rows[1]


def _check_contract(spec: AssembledGraphs, ports_of: Mapping[str, Ports]) -> None:
    """Check dtypes, shapes and batch size (2). The runtime checks the names when it opens a Signature."""
    batch, scalar = (spec.batch_size,), ("float32", ())
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        **{port.name: (port.dtype, (*batch, *port.shape[1:])) for port in ports_of["infer"][0]},
        "mask": ("float32", batch),
        "loss": scalar,
        "loss_sum": scalar,
        "learning_rate": scalar,
        "step": scalar,
        "proximal_weight": scalar,
        **dict.fromkeys(setting_values(dict.fromkeys(spec.optimizer, 0.5)), scalar),
    }
    for spec_row in spec.table.specs:
        parameter = parameter_port(spec_row.name)
        states = (state_port("anchor", spec_row.name), state_port(CONTROL, spec_row.name))
        for name in (parameter, next_port(parameter), *states):
            expected[name] = ("float32", spec_row.shape)
    for name in ("train", "evaluate"):
        ports = {port.name: port for row in ports_of[name] for port in row}
        for port in ports.values():
            dtype, shape = expected.get(port.name, (port.dtype, port.shape))
            if (port.dtype, port.shape) != (dtype, shape):
                raise InvalidBundle(
                    f"{name} graph: got {port.name!r} as {form_of(port.dtype, port.shape)}, expected "
                    f"{form_of(dtype, shape)}",
                    code="FN-0342",
                )
        y = ports.get("y")
        dtypes = ("int32",) if spec.num_classes else ("float32", "int32")
        if y is None or y.dtype not in dtypes or y.shape[:1] != batch:
            received = "no input 'y'" if y is None else f"'y' as {form_of(y.dtype, y.shape)}"
            raise InvalidBundle(
                f"{name} graph: got {received}, expected 'y' as {' or '.join(dtypes)} for {spec.batch_size} samples",
                code="FN-0342",
            )
    if PREPROCESS in ports_of and (names := [port.name for port in ports_of[PREPROCESS][0]]) != [RAW]:
        raise InvalidBundle(
            f"{PREPROCESS} graph: got the inputs {names}, expected {RAW!r} alone; rename or remove inputs",
            code="FN-0342",
        )


def _run_once(bundle: Bundle, runtime: Runtime) -> None:
    """Run every Signature once, as a device would (4). Raises InvalidBundle."""
    manifest, parameters = bundle.manifest, bundle.initial_parameters()
    step, evaluate = runtime.open_train(bundle), runtime.open_evaluate(bundle)
    masked = probe_batch(manifest)
    step(step.begin(parameters), masked, StepSettings(learning_rate=0.0))
    loss_sum = evaluate(parameters, masked).loss_sum
    if loss_sum != 0.0:
        raise InvalidBundle(
            f"evaluate graph: got a loss of {loss_sum} from samples with mask 0.0, expected 0.0", code="FN-0347"
        )
    predict, preprocess = runtime.open_predict(bundle, parameters), open_preprocess(runtime, bundle)
    logits = predict({name: array[:1] for name, array in masked.inputs.items()})
    last = logits.shape[-1]
    if manifest.num_classes and last != manifest.num_classes:
        raise InvalidBundle(
            f"infer graph: got logits {logits.shape}, expected {manifest.num_classes} of each sample", code="FN-0347"
        )
    if preprocess is not None:
        raw = manifest.signatures[PREPROCESS].inputs[0]
        preprocess(np.zeros((1, *raw.shape[1:]), raw.dtype))

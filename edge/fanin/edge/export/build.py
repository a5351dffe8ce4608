"""An App becomes a signed Bundle.

The walk: trace (``trace``, with ``decompositions``) -> ONNX (``onnx``) -> int8 and slots (``int8``) -> manifest
-> verify against eager torch (``verify``) -> write. The folder is written last: what does not verify leaves
nothing behind.
"""

import tempfile
from pathlib import Path
from types import MappingProxyType

import onnx

from fanin.edge.bundle import Bundle, open_folder, write_bundle
from fanin.edge.export.app import App
from fanin.edge.export.int8 import to_int8
from fanin.edge.export.onnx import inputs_to_initializers, ports, to_onnx
from fanin.edge.export.trace import Traced, table_of, trace_evaluate, trace_infer, trace_train, trainable
from fanin.edge.export.verify import verify
from fanin.edge.keys import SigningKey
from fanin.edge.manifest import Manifest, Signature, Slot, dump_manifest
from fanin.edge.runtimes.onnx import FORMAT, OnnxRuntime
from fanin.edge.tensors import encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, UnsupportedModel

PARAMETERS = "parameters"


def export_app(app: App, folder: Path, key: SigningKey) -> Bundle:
    """Trace, quantize, verify and sign; the Bundle in ``folder``.

    Raises UnsupportedModel if the module cannot be trained by a graph, saying which part and what to do.
    """
    manifest, artifacts = _assemble(app)
    data = dump_manifest(manifest)
    with tempfile.TemporaryDirectory(prefix="fanin-export-") as draft:
        write_bundle(Path(draft), data, artifacts, key)
        try:
            verify(app, open_folder(Path(draft), trusted=[key.public]), OnnxRuntime(), OnnxRuntime(plain=True))
        except InvalidBundle as exc:
            raise UnsupportedModel(f"App {app.name} ({type(app.module).__name__}): {exc}") from exc
    write_bundle(folder, data, artifacts, key)
    return open_folder(folder, trusted=[key.public])


def _assemble(app: App) -> tuple[Manifest, dict[str, bytes]]:
    parameters = trainable(app)
    table = table_of(parameters)
    arrays = {name: value.numpy() for name, value in parameters.items()}
    models = {"train": _model(app, "train", trace_train(app)), "evaluate": _model(app, "evaluate", trace_evaluate(app))}
    infer, slots = _infer(app)
    models["infer"] = infer
    artifacts = {f"{name}.onnx": model.SerializeToString(deterministic=True) for name, model in models.items()}
    artifacts[PARAMETERS] = encode_parameters(table, table.flatten(arrays))
    signatures = {
        name: Signature(
            inputs=ports(list(model.graph.input), f"App {app.name}: {name}"),
            outputs=ports(list(model.graph.output), f"App {app.name}: {name}"),
            graphs=MappingProxyType({FORMAT: f"{name}.onnx"}),
        )
        for name, model in models.items()
    }
    manifest = Manifest(
        name=app.name,
        batch_size=app.batch_size,
        num_classes=app.num_classes,
        table=table,
        signatures=MappingProxyType(signatures),
        slots=slots,
        artifacts=MappingProxyType({name: artifact_of(found) for name, found in artifacts.items()}),
        initial=PARAMETERS,
    )
    return manifest, artifacts


def _model(app: App, name: str, traced: Traced) -> onnx.ModelProto:
    return to_onnx(traced, f"App {app.name} ({type(app.module).__name__}): the {name} graph")


def _infer(app: App) -> tuple[onnx.ModelProto, tuple[Slot, ...]]:
    parameters = trainable(app)
    model = _model(app, "infer", trace_infer(app))
    inputs_to_initializers(model, {name: value.numpy() for name, value in parameters.items()})
    found = to_int8(model, table_of(parameters), app.calibration.numpy(), app.batch_size)
    return found.model, found.slots

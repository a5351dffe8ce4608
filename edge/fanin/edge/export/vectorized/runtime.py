"""An App without an export: torch runs the traced train and evaluate steps, for a simulation.

A module may have operators that no graph format can express. Its traced steps still have the Signatures of an export,
so a Bundle describes their ports, and ``TorchRuntime`` runs them. The Bundle has no graphs, so no device can use it,
and there is no int8 model.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fanin.edge.batch_sizes import with_batch
from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.export.app.app import App
from fanin.edge.export.formats.graphs import ports_of
from fanin.edge.export.formats.manifest import assembled
from fanin.edge.export.graph.forward import trace_evaluate
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.vectorized.step import EAGER
from fanin.edge.export.verification.ready import checked
from fanin.edge.files import new_folder
from fanin.edge.runtimes.base import Evaluate, LoadedModel, MeasureRanges, Predict, TrainStep
from fanin.edge.runtimes.engine import Feed, RunGraph
from fanin.edge.runtimes.graphs import GraphEvaluate
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.signatures import Port, Ports
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle, UnsupportedModel


class TorchRuntime:
    """A ``Runtime`` over the traced steps of one App.

    Args:
        app: The App.

    Raises:
        UnsupportedModel: A step cannot be traced, or the App has parts that only an export supports: several lengths,
            personal parameters, or ``preprocess``.
    """

    def __init__(self, app: App) -> None:
        self._prepared = checked(app, ("onnx",))
        for name, value in (("lengths", app.lengths), ("preprocess", app.preprocess), ("local", app.recipe.local)):
            if value:
                raise UnsupportedModel(
                    f"App {app.name}: {name}: got a value, expected none without an export", code="FN-0798"
                )
        sizes = (app.batch_size, *app.other_batch_sizes)
        self._trains = {size: trace_train(self._prepared.for_batches(size), EAGER) for size in sizes}
        self._evaluate = trace_evaluate(self._prepared, EAGER)

    @property
    def name(self) -> str:
        """See Runtime."""
        return f"torch {torch.__version__}"

    @property
    def graph_format(self) -> str:
        """See Runtime."""
        return NO_GRAPHS

    def open_train(self, bundle: Bundle) -> TrainStep:
        """See Runtime."""
        traced = self._trains[bundle.manifest.batch_size]
        return GraphTrainStep(bundle.manifest, bind_by_copy(_run_of(traced)))

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        """See Runtime."""
        return GraphEvaluate(bundle.manifest, _run_of(self._evaluate))

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        """See Runtime. Raises InvalidBundle."""
        raise InvalidBundle(
            "bundle: got no graphs, expected an infer graph: without an export there is no int8 model", code="FN-0846"
        )

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        """See Runtime. Raises InvalidBundle."""
        raise InvalidBundle("bundle: got no graphs, expected an infer graph with activations", code="FN-0846")

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        """See Runtime. Raises InvalidBundle."""
        raise InvalidBundle(
            f"{what}: got a graph file, expected none: torch runs the traced steps of an App alone", code="FN-0846"
        )

    def write(self, folder: Path, key: SigningKey) -> Bundle:
        """Sign a Bundle with the App's Signatures, without graphs, and write it to a new or empty folder."""
        prepared, path = self._prepared, new_folder("bundle: folder", folder)
        own, *others = ((size, ports_of(prepared, traced)) for size, traced in self._trains.items())
        ports = {"train": own[1], "evaluate": ports_of(prepared, self._evaluate)}
        ports |= {with_batch("train", size): each for size, each in others}
        ports["infer"] = _infer_ports(prepared, ports["evaluate"])
        manifest, artifacts = assembled(prepared, {}, ports)
        write_bundle(path, dump_manifest(manifest), artifacts, key)
        return open_folder(path, trusted=[key.public])


def _infer_ports(prepared: Prepared, evaluate: Ports) -> Ports:
    """Return the ports that ``infer`` would have: any number of samples, and logits instead of classes."""
    inputs, (*_, output) = evaluate
    own = [port for port in inputs if port.name in prepared.app.inputs]
    logits = Port(name="logits", dtype="float32", shape=(-1, *output.shape[1:]))
    return tuple(Port(name=port.name, dtype=port.dtype, shape=(-1, *port.shape[1:])) for port in own), (logits,)


def _run_of(traced: Traced) -> RunGraph:
    """Return a function that runs a traced step on arrays."""
    with quiet_torch():
        module = traced.program.run_decompositions({}).module()

    def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        with torch.no_grad():
            values = module(*(torch.from_numpy(np.array(feed[name])) for name in traced.inputs))
        named = dict(zip(traced.outputs, values, strict=True))
        return [named[name].numpy() for name in outputs]

    return run

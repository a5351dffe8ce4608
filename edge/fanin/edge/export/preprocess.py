"""``preprocess``: from what a device has to what the model is given, as a graph, because code does not travel.

It has no parameters and does not learn: all that it knows are constants of the file. Its form in each format is that
of ``infer``: any number of samples in ONNX, one at a time in TFLite. ``torch.stft`` is complex and has no place on
devices; frames times a matrix of cosines and sines are the same spectrum, and plain products.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Port, Ports
from fanin.edge.export.app import App, inputs_of
from fanin.edge.export.formats import Graphs
from fanin.edge.export.onnx.writer import to_onnx
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.tflite.writer import to_tflite
from fanin.edge.export.tracing.trace import Traced
from fanin.edge.runtimes.base import Runtime
from fanin.edge.runtimes.models import PREPROCESS, RAW, open_preprocess
from fanin.edge.runtimes.onnx import FORMAT as ONNX
from fanin.edge.runtimes.tflite import FORMAT as TFLITE
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-4
"""Of max(1, |value|): what the order of additions makes of a long sum. Tokens must be the same."""
VERIFIED_SAMPLES: Final = 16


def _onnx(app: App, what: str) -> bytes:
    data: bytes = to_onnx(trace_preprocess(app, batch_size=0), what).SerializeToString(deterministic=True)
    return data


def _tflite(app: App, what: str) -> bytes:
    return to_tflite({PREPROCESS: trace_preprocess(app, batch_size=1)}, what)


ENCODERS: Final[Mapping[str, Callable[[App, str], bytes]]] = MappingProxyType({ONNX: _onnx, TFLITE: _tflite})
"""(App, what begins an error's message) -> the file, by graph format."""


def with_preprocess(prepared: Prepared, graph_format: str, graphs: Graphs) -> Graphs:
    """The graphs and that of the App's ``preprocess``, if it has one. Raises UnsupportedModel."""
    app = prepared.app
    if app.preprocess is None:
        return graphs
    name = f"{PREPROCESS}.{graph_format}"
    return replace(
        graphs,
        files={**graphs.files, name: ENCODERS[graph_format](app, f"{prepared.what}: the {PREPROCESS} graph")},
        signatures={**graphs.signatures, PREPROCESS: name},
        ports={**graphs.ports, PREPROCESS: _ports(app, graphs.ports["infer"][0])},
    )


def _ports(app: App, x: tuple[Port, ...]) -> Ports:
    raw = _raw(app)
    return (Port(name=RAW, dtype=str(raw.dtype).removeprefix("torch."), shape=(-1, *raw.shape[1:])),), x


def _raw(app: App) -> Tensor:
    assert app.raw is not None, "an App with preprocess has raw inputs"
    return app.raw.detach()


def trace_preprocess(app: App, batch_size: int) -> Traced:
    """The graph for ``batch_size`` samples, or for any number of them (0). Raises UnsupportedModel."""
    assert app.preprocess is not None, "asked only for an App that has it"
    module = copy.deepcopy(app.preprocess).eval()
    example = _raw(app)[: batch_size or 2].clone()
    try:
        with torch.no_grad():
            program = torch.export.export(
                module,
                (example,),
                dynamic_shapes=(({0: Dim("batch")} if not batch_size else None),),
                strict=False,
            )
    except Exception as exc:  # the tracer runs the App's own code, which may raise anything
        raise UnsupportedModel(
            f"App {app.name}: {PREPROCESS} ({type(app.preprocess).__name__}) cannot be traced ({exc}); avoid Python "
            "branches and loops that look at tensor values, and work on each sample by itself"
        ) from exc
    return Traced(program=program, examples=[example], inputs=[RAW], outputs=["x"])


def verify_preprocess(app: App, bundle: Bundle, runtime: Runtime) -> None:
    """The graph does what the module does, for several samples and for one. Raises UnsupportedModel."""
    run = open_preprocess(runtime, bundle)
    if run is None or app.preprocess is None:
        return
    raw = _raw(app)[:VERIFIED_SAMPLES]
    expected = inputs_of(app, raw).numpy()
    for num in (len(raw), 1):
        got = run(raw[:num].numpy())
        worst = float(np.max(np.abs(got - expected[:num]) / np.maximum(1.0, np.abs(expected[:num])), initial=0.0))
        if not worst <= (TOLERANCE if expected.dtype.kind == "f" else 0.0):
            raise UnsupportedModel(
                f"App {app.name}: {PREPROCESS} ({type(app.preprocess).__name__}) in {runtime.name} differs from "
                f"torch's by {worst:.1e} on {num} samples, expected at most {TOLERANCE:.0e} (0 for tokens); it must "
                "draw no random numbers, and treat each sample by itself"
            )

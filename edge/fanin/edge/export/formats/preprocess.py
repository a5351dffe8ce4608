"""``preprocess``: the path from raw data to the model's input, exported as a graph, because code does not travel.

The module has no parameters that learn: its state becomes constants of the file. Like ``infer`` its graph accepts any
number of samples in ONNX and one at a time in TFLite (``GraphFormat.num_samples``).
"""

import copy
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.app.app import App, inputs_of
from fanin.edge.export.app.calls import guarded
from fanin.edge.export.formats.graphs import FORMATS, Graphs
from fanin.edge.export.graph.examples import fixed_batch
from fanin.edge.export.graph.reading import FixedShapes, NoReading
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.module.draws import refused
from fanin.edge.export.module.places import store_by_rows
from fanin.edge.export.refusals import FixedBatch, RandomDraw, Untraceable
from fanin.edge.runtimes.base import Runtime
from fanin.edge.runtimes.models import PREPROCESS, RAW, open_preprocess
from fanin.edge.signatures import Port, Ports
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-4
"""Relative to max(1, |value|): the effect of the order of additions in a long sum. Tokens must be equal."""
VERIFIED_SAMPLES: Final = 16
NO_DRAWS: Final = "remove the random numbers from it: equal raw data must give equal inputs"


def encode_preprocess(app: App, graph_format: str, what: str) -> bytes:
    """Return the file of an App's ``preprocess`` in a graph format.

    Args:
        app: The App.
        graph_format: A key of ``FORMATS``.
        what: Prefix of error messages.

    Raises:
        UnsupportedModel: The module cannot be traced, or the format cannot express it.
    """
    row = FORMATS[graph_format]
    return row.encode(PREPROCESS, trace_preprocess(app, row.num_samples), f"{what}: the {PREPROCESS} graph")


def with_preprocess(app: App, graph_format: str, graphs: Graphs, data: bytes) -> Graphs:
    """Add the file of the App's ``preprocess`` to its graphs."""
    name = f"{PREPROCESS}.{graph_format}"
    return replace(
        graphs,
        files={**graphs.files, name: data},
        signatures={**graphs.signatures, PREPROCESS: name},
        ports={**graphs.ports, PREPROCESS: _ports(app, graphs.ports["infer"][0])},
    )


def _ports(app: App, x: tuple[Port, ...]) -> Ports:
    raw = _raw(app)
    return (Port(name=RAW, dtype=str(raw.dtype).removeprefix("torch."), shape=(-1, *raw.shape[1:])),), x


def _raw(app: App) -> Tensor:
    assert app.raw_data is not None, "an App with preprocess has raw inputs"
    return app.raw_data


class _Watched(nn.Module):
    """The module, refused if it reads a value, or if a shape depends on one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, raw: Tensor) -> object:
        with NoReading(), FixedShapes():
            return self.inner(raw)


def trace_preprocess(app: App, batch_size: int) -> Traced:
    """Trace ``preprocess`` for ``batch_size`` samples, 0 for any number. Raises UnsupportedModel."""
    assert app.preprocess is not None, "the caller checks that the App has preprocess"
    module = copy.deepcopy(app.preprocess).eval()
    store_by_rows(module)
    example = _raw(app)[: batch_size or 2].clone()

    def export() -> ExportedProgram:
        shapes = (({0: Dim("batch")} if not batch_size else None),)
        return torch.export.export(_Watched(module), (example,), dynamic_shapes=shapes, strict=False)

    what = f"App {app.name}: {PREPROCESS}"
    try:
        with torch.no_grad(), refused():
            program = guarded(what, module, export)
    except FixedBatch as exc:
        raise fixed_batch(what, len(example), exc) from exc
    except Untraceable as exc:
        if isinstance(exc.__cause__, RandomDraw):
            raise Untraceable(exc.reason, NO_DRAWS, exc.place, code="FN-0723") from exc
        raise
    return Traced(program=program, examples=[example], inputs=[RAW], outputs=[*app.inputs])


def verify_preprocess(app: App, bundle: Bundle, runtime: Runtime) -> None:
    """Raise UnsupportedModel unless the graph equals the module, for several samples and for one."""
    run = open_preprocess(runtime, bundle)
    if run is None or app.preprocess is None:
        return
    raw = _raw(app)[:VERIFIED_SAMPLES]
    (name,) = app.inputs
    expected = inputs_of(app, {name: raw})[name].numpy()
    for num in (len(raw), 1):
        x = run(raw[:num].numpy())
        worst = float(np.max(np.abs(x - expected[:num]) / np.maximum(1.0, np.abs(expected[:num])), initial=0.0))
        if not worst <= (TOLERANCE if expected.dtype.kind == "f" else 0.0):
            raise UnsupportedModel(
                f"App {app.name}: {PREPROCESS} ({type(app.preprocess).__name__}) in {runtime.name} differs from "
                f"torch's by {worst:.1e} on {num} samples, expected at most {TOLERANCE:.0e} (0 for tokens); process "
                "each sample by itself",
                code="FN-0723",
            )

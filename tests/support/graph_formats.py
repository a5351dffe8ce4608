"""The contract of every graph format in ``FORMATS``: checks of one record with an App and its exported Bundle."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import FILE_FORMATS
from fanin.edge.export import App
from fanin.edge.export.formats.graphs import GraphFormat, Graphs
from fanin.edge.export.graph.decompositions.tables import NO_FORMS
from fanin.edge.export.graph.layers import trace_layer
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.runtimes.available import RUNTIMES, open_runtime
from fanin.edge.runtimes.base import StepSettings
from fanin.edge.runtimes.contract import check_engine
from fanin.edge.runtimes.models import run_rows
from fanin.edge.tensors import Array
from fanin.protos.errors import UnsupportedModel
from support.models import batches, with_artifact

TOLERANCE: Final = 1e-5
"""Tolerance for the graph of a small layer and values near 1. It exceeds the effect of another order of additions."""
SETTINGS: Final = StepSettings(learning_rate=0.05)


def check_graph_format(row: GraphFormat, app: App, bundle: Bundle) -> None:
    """Check a graph format against its record, except for ``make`` and the refusals of ``encode``, which take longer.

    Args:
        row: The format.
        app: A small App on the images of ``support.models``, without preprocess and lengths.
        bundle: Its Bundle, with graphs in this format.

    Raises:
        AssertionError: The format breaks the contract. The text says how.
        InvalidBundle: The format's runtime cannot open or run a file.
    """
    check_names(row)
    # The Bundle has the results of `make`: graphs that train, evaluate and predict, and slots that a Version fills.
    check_engine(RUNTIMES[row.runtime].engine(), bundle)
    check_slots(row, bundle)
    check_train_file(row, prepare(app), bundle)
    check_gradients(row)
    check_forward(row)


def check_make(row: GraphFormat, app: App, bundle: Bundle) -> None:
    """Check that ``make`` builds the graphs of a Bundle again, and that it uses the grids of the longest length.

    The arguments and errors are those of ``check_graph_format``.
    """
    prepared = prepare(app)
    graphs = row.make(prepared, None)
    check_same(row, graphs, bundle)
    assert graphs.ranges, "make: got no ranges, expected those of the activations of infer"
    name, (first, second) = next(iter(graphs.ranges.items()))
    others = {**graphs.ranges, name: (first, second + 1.0)}
    assert row.make(prepared, others).ranges == others, f"make: ignored the range of {name!r}"
    try:
        row.make(prepared, {"of another graph": (first, second)})
    except UnsupportedModel:
        return
    raise AssertionError("make: accepted the grids of another graph, expected UnsupportedModel")


def check_names(row: GraphFormat) -> None:
    """Check that devices know the format, and that its runtime runs it."""
    name = row.forms.graph_format
    assert name in FILE_FORMATS, f"forms.graph_format: got {name!r}, expected one of {sorted(FILE_FORMATS)}"
    assert row.runtime in RUNTIMES, f"runtime: got {row.runtime!r}, expected one of {sorted(RUNTIMES)}"
    runs = RUNTIMES[row.runtime].graph_format
    assert runs == name, f"runtime: {row.runtime} runs {runs} graphs, expected one that runs {name}"
    assert row.num_samples >= 0, f"num_samples: got {row.num_samples}, expected at least 0"


def check_slots(row: GraphFormat, bundle: Bundle) -> None:
    """Check that ``infer`` has a slot for each parameter, with bytes that the file's format fills."""
    name, manifest = row.forms.graph_format, bundle.manifest
    slots = manifest.slots[name]
    missing = {spec.name for spec in manifest.model_table.specs} - {slot.parameter for slot in slots}
    assert not missing, f"make: the parameters {sorted(missing)} have no slot"
    FILE_FORMATS[name].check_slots(bundle.graph("infer", name), slots, "infer graph")


def check_train_file(row: GraphFormat, prepared: Prepared, bundle: Bundle) -> None:
    """Check that the file of ``make_train`` has the ports and the train step of the Bundle's."""
    data, ports = row.make_train(prepared)
    train = bundle.manifest.signatures["train"]
    assert ports == (train.inputs, train.outputs), f"make_train: got the ports {ports}, expected those of make"
    candidate = with_artifact(bundle, train.graphs[row.forms.graph_format], data)
    runtime, (batch, *_) = open_runtime(row.runtime), batches(bundle.manifest.batch_size, seed=1)
    results = []
    for each in (bundle, candidate):
        step = runtime.open_train(each)
        results.append(step(step.begin(each.initial_parameters()), batch, SETTINGS))
    (state, loss), (candidate_state, candidate_loss) = results
    check_near("make_train: the loss", np.array(candidate_loss), np.array(loss))
    check_near("make_train: the next parameters", candidate_state.parameters, state.parameters)


def check_gradients(row: GraphFormat) -> None:
    """Check that ``encode`` writes the graph of a layer's gradients, alone in its file."""
    torch.manual_seed(1)
    layer, x = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True)
    data = row.encode("layer", trace_layer(layer, [x.detach()], row.forms, "layer", NO_FORMS), "layer")
    output = layer(x)
    (output * output.detach()).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    values: dict[str, Tensor] = {**dict(layer.named_parameters()), "in.0": x}
    expected = {f"gradient.{name}": value.grad for name, value in values.items() if value.grad is not None}
    results = run_file(row, data, values)
    assert results.keys() == expected.keys(), f"encode: got the outputs {sorted(results)}, expected {sorted(expected)}"
    for name, value in expected.items():
        check_near(f"encode: {name}", results[name], value.numpy())


def check_forward(row: GraphFormat) -> None:
    """Check that a graph that runs forward accepts ``num_samples``, or any number of them."""
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(3, 4)
    example = x[: row.num_samples or 2]
    shapes = None if row.num_samples else ({0: Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
        expected = module(x)
    data = row.encode("forward", Traced(program=program, examples=[example], inputs=["raw"], outputs=["x"]), "forward")
    for num in (3, 1):
        results = run_file(row, data, {"raw": x[:num]})
        assert results.keys() == {"x"}, f"encode: got the outputs {sorted(results)}, expected those of the traced graph"
        check_near(f"encode: {num} samples", results["x"], expected[:num].numpy())


class NoForm(nn.Module):
    """A module with an operator that no format supports."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the eigenvalues (2,) of a matrix."""
        return torch.linalg.eigvalsh(x)


def check_refusal(row: GraphFormat) -> None:
    """Check that ``encode`` refuses an operator without a form by an error of fanin, with the prefix."""
    x = torch.eye(2)
    traced = Traced(program=torch.export.export(NoForm(), (x,)), examples=[x], inputs=["x"], outputs=["y"])
    try:
        row.encode("none", traced, "App x")
    except UnsupportedModel as exc:
        assert str(exc).startswith("App x: "), f"encode: got the error {exc}, expected the prefix 'App x: '"
    else:
        raise AssertionError("encode: wrote an operator without a form, expected UnsupportedModel")


def check_same(row: GraphFormat, graphs: Graphs, bundle: Bundle) -> None:
    """Check that graphs are those of a Bundle, bit for bit."""
    name, manifest = row.forms.graph_format, bundle.manifest
    files = {signature.graphs[name] for signature in manifest.signatures.values()}
    assert graphs.files.keys() == files, f"make: got the files {sorted(graphs.files)}, expected {sorted(files)}"
    for file, data in graphs.files.items():
        assert bundle.artifact(file) == data, f"make: {file} differs from the file of another export of the same App"
    for key, signature in manifest.signatures.items():
        assert graphs.signatures[key] == signature.graphs[name], f"make: {key} is in another file than it was"
        assert graphs.ports[key] == (signature.inputs, signature.outputs), f"make: {key} has other ports than it had"
    assert graphs.slots == manifest.slots[name], "make: got other slots than another export of the same App"


def run_file(row: GraphFormat, data: bytes, values: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the outputs of the file's only graph."""
    model = open_runtime(row.runtime).open_model(data, "file")
    return run_rows(model, {name: value.detach().numpy() for name, value in values.items()})


def check_near(what: str, actual: Array, expected: Array) -> None:
    """Compare small values of about 1."""
    assert actual.shape == expected.shape, f"{what}: got the shape {actual.shape}, expected {expected.shape}"
    worst = np.abs(actual.astype(np.float64) - expected).max()
    assert worst <= TOLERANCE, f"{what}: differs by {worst:.1e}, expected at most {TOLERANCE:.0e}"

"""The contract of ``GraphFormat``: one suite over all registered formats, which reports a format that breaks it."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.nightly import in_ci

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import FILE_FORMATS

if TYPE_CHECKING:
    from fanin.edge.export.formats.graphs import GraphFormat, Graphs
    from fanin.edge.export.formats.int8.activations import Ranges
    from fanin.edge.export.graph.traced import Traced
    from fanin.edge.export.module.prepare import Prepared
    from fanin.edge.signatures import Ports


@pytest.fixture
def mlp(both_formats: Callable[[str], Bundle]) -> Bundle:
    """The Bundle of the App "mlp" in all formats, exported once a session."""
    return both_formats("mlp")


@pytest.fixture
def onnx(mlp: Bundle) -> "GraphFormat":
    """The ONNX format, whose parts a test replaces."""
    from fanin.edge.export.formats.graphs import FORMATS

    return FORMATS["onnx"]


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_a_format_keeps_the_contract(name: str, mlp: Bundle) -> None:
    from support.graph_formats import check_graph_format
    from support.models import app_of

    from fanin.edge.export.formats.graphs import FORMATS

    assert FORMATS.keys() == FILE_FORMATS.keys()
    check_graph_format(FORMATS[name], app_of("mlp"), mlp)


# The converter to TFLite tries its second layout in a child process, which imports torch.
@pytest.mark.parametrize("name", in_ci(FILE_FORMATS, ["onnx"]))
def test_a_format_refuses_an_operator_without_a_form(name: str, mlp: Bundle) -> None:
    from support.graph_formats import check_refusal

    from fanin.edge.export.formats.graphs import FORMATS

    check_refusal(FORMATS[name])


# The test builds all graphs three times. In TFLite this takes 11 s.
@pytest.mark.parametrize("name", in_ci(FILE_FORMATS, ["onnx"]))
def test_a_format_builds_the_same_graphs_again(name: str, mlp: Bundle) -> None:
    from support.graph_formats import check_make
    from support.models import app_of

    from fanin.edge.export.formats.graphs import FORMATS

    check_make(FORMATS[name], app_of("mlp"), mlp)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("runtime", "litert", "runtime: litert runs tflite graphs, expected one that runs onnx"),
        ("runtime", "none", "runtime: got 'none', expected one of"),
        ("num_samples", -1, "num_samples: got -1, expected at least 0"),
    ],
)
def test_a_record_that_no_runtime_runs_breaks_it(
    part: str, value: str | int, message: str, onnx: "GraphFormat"
) -> None:
    from support.graph_formats import check_names

    with pytest.raises(AssertionError, match=message):
        check_names(replace(onnx, **{part: value}))  # type: ignore[arg-type]  # the mistake


def test_a_format_that_devices_do_not_know_breaks_it(onnx: "GraphFormat") -> None:
    from support.graph_formats import check_names

    with pytest.raises(AssertionError, match=r"forms.graph_format: got 'own', expected one of"):
        check_names(replace(onnx, forms=replace(onnx.forms, graph_format="own")))


def test_a_train_file_with_another_step_breaks_it(onnx: "GraphFormat", mlp: Bundle) -> None:
    from support.graph_formats import check_train_file
    from support.models import app_of

    from fanin.edge.export.module.prepare import prepare

    def make_train(prepared: "Prepared") -> "tuple[bytes, Ports]":
        recipe = replace(prepared.app.recipe, rates={"*": 2.0})
        return onnx.make_train(prepare(replace(prepared.app, recipe=recipe)))

    with pytest.raises(AssertionError, match="make_train: the next parameters: differs by"):
        check_train_file(replace(onnx, make_train=make_train), prepare(app_of("mlp")), mlp)


def test_a_writer_that_loses_names_breaks_it(onnx: "GraphFormat") -> None:
    from support.graph_formats import check_forward

    def encode(signature: str, traced: "Traced", what: str) -> bytes:
        return onnx.encode(signature, replace(traced, outputs=["first"]), what)

    with pytest.raises(AssertionError, match=r"encode: got the outputs \['first'\], expected those of the traced"):
        check_forward(replace(onnx, encode=encode))


def test_a_writer_that_accepts_any_operator_breaks_it(onnx: "GraphFormat") -> None:
    from support.graph_formats import check_refusal

    with pytest.raises(AssertionError, match="encode: wrote an operator without a form, expected UnsupportedModel"):
        check_refusal(replace(onnx, encode=lambda signature, traced, what: b""))


def test_graphs_that_ignore_their_ranges_break_it(onnx: "GraphFormat", mlp: Bundle) -> None:
    from support.graph_formats import check_make
    from support.models import app_of

    def make(prepared: "Prepared", ranges: "Ranges | None") -> "Graphs":
        return onnx.make(prepared, None)

    with pytest.raises(AssertionError, match="make: ignored the range of 'flatten'"):
        check_make(replace(onnx, make=make), app_of("mlp"), mlp)

"""Results of other packages' engines are checked: a wrong result raises one clear error, and is never a prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.models import batches, bundle_of, samples

from fanin.edge.runtimes.available import RUNTIMES, open_runtime
from fanin.edge.runtimes.base import StepSettings
from fanin.edge.runtimes.contract import check_engine
from fanin.edge.runtimes.engine import Feed, GraphEngine, GraphFile, LoadedGraph
from fanin.edge.runtimes.runtime import GraphRuntime
from fanin.edge.runtimes.stepping import bind_by_copy
from fanin.edge.tensors import Array
from fanin.protos.errors import FaninError, InvalidBundle

Change = Callable[[list[Array]], Any]


def changed(change: Change, *, only: str = "") -> GraphEngine:
    """Return onnxruntime with changed results; ``only`` selects the graphs with this single output."""
    engine = RUNTIMES["onnx"].engine()

    def load(file: GraphFile) -> LoadedGraph:
        graph = engine.load(file)
        if only and [port.name for port in graph.outputs] != [only]:
            return graph

        def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
            results: Sequence[Array] = change(list(graph.run(outputs, feed)))
            return results

        return replace(graph, run=run, bind=None)

    return replace(engine, name="changed", load=load)


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda arrays: None, r"returned NoneType, expected the arrays of \['logits'\]"),
        (lambda arrays: dict(enumerate(arrays)), "returned dict, expected the arrays of"),
        (lambda arrays: [], "returned 0 results, expected the arrays of"),
        (lambda arrays: [each.tolist() for each in arrays], "returned logits as list, expected float32"),
        (lambda arrays: [each.astype(np.float64) for each in arrays], r"returned logits as float64 \(3, 4\), expected"),
        (lambda arrays: [each[:, :3] for each in arrays], r"returned logits as float32 \(3, 3\), expected float32"),
        (lambda arrays: [each[None] for each in arrays], r"returned logits as float32 \(1, 3, 4\), expected float32"),
        (lambda arrays: [each[:2] for each in arrays], "infer graph: got logits of 2 samples, expected 3"),
    ],
)
def test_results_of_another_form_are_refused(change: Change, received: str) -> None:
    bundle, (x, _) = bundle_of("mlp"), samples(3, seed=1)
    predict = GraphRuntime(changed(change)).open_predict(bundle, bundle.initial_parameters())
    with pytest.raises(InvalidBundle, match=received):
        predict({"x": x})


def test_load_returns_a_graph() -> None:
    engine = replace(RUNTIMES["onnx"].engine(), name="empty", load=lambda file: None)  # type: ignore[arg-type, return-value]  # the mistake
    with pytest.raises(InvalidBundle, match="FN-0415"):
        GraphRuntime(engine).open_evaluate(bundle_of("mlp"))


@pytest.mark.parametrize(
    "change", [lambda arrays: [-arrays[0]], lambda arrays: [arrays[0][:, ::-1]], lambda arrays: [2.0 * arrays[0]]]
)
def test_the_contract_compares_predictions_with_the_twin(change: Change) -> None:
    with pytest.raises(AssertionError, match=r"infer: the logits differ by up to .* from those of onnxruntime"):
        check_engine(changed(change, only="logits"), bundle_of("mlp"), twin=open_runtime("onnx"))


def test_the_contract_detects_a_bound_graph_that_ignores_later_batches() -> None:
    engine = RUNTIMES["onnx"].engine()

    def load(file: GraphFile) -> LoadedGraph:
        graph = engine.load(file)

        def bind(inputs: Feed, outputs: Feed) -> Callable[[], None]:
            copies = {name: array.copy() for name, array in inputs.items()}
            return bind_by_copy(graph.run)(copies, outputs)

        return replace(graph, bind=bind)

    with pytest.raises(AssertionError, match=r"bind: step 3 .* the function that bind returns must read its inputs"):
        check_engine(replace(engine, name="stale", load=load), bundle_of("mlp"))


class Driver:
    """A driver whose hardware is lost."""

    def fails(self, *_: object) -> Any:
        """Raise an exception that no engine lists in ``errors``."""
        raise RuntimeError("device driver\nlost")


def failing(call: str) -> GraphEngine:
    """Return onnxruntime with one function that raises an exception outside of ``errors``."""
    engine = replace(RUNTIMES["onnx"].engine(), name="lost", errors=(ValueError,))
    if call == "load":
        return replace(engine, load=Driver().fails)
    load = engine.load
    return replace(engine, load=lambda file: replace(load(file), **{"bind": None, call: Driver().fails}))


@pytest.mark.parametrize("call", ["load", "bind", "run"])
def test_an_exception_outside_of_errors_is_logged_in_one_line_with_one_traceback(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, runtime = bundle_of("mlp"), GraphRuntime(failing(call))
    # The export of the Bundle also writes log messages.
    caplog.clear()
    batch = next(iter(batches(1, seed=1)))
    text = (
        rf"^train graph: lost: {call} raised RuntimeError: device driver lost, which is not among the engine's `errors`"
        rf"; add it there if it means a bad graph, or correct `{call}`\n"
    )
    for _ in range(3):
        with pytest.raises(FaninError, match=text) as excinfo:
            step = runtime.open_train(bundle)
            step(step.begin(bundle.initial_parameters()), batch, StepSettings(learning_rate=0.1))
        assert not isinstance(excinfo.value, InvalidBundle), "the bundle is right"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "\n" not in record.getMessage()

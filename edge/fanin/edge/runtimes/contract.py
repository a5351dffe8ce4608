"""The contract of engines, as a check for the tests of one's own. It needs a Bundle in the engine's format."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import FILE_FORMATS
from fanin.edge.runtimes.base import NamedInputs, PaddedBatch, Runtime, StepSettings, TrainState
from fanin.edge.runtimes.engine import GraphEngine, GraphFile
from fanin.edge.runtimes.graphs import input_names, parameter_port
from fanin.edge.runtimes.runtime import GraphRuntime
from fanin.edge.runtimes.stepping import MAX_SLABS
from fanin.edge.signatures import Port
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle

_SETTINGS: Final = StepSettings(learning_rate=0.05)
_NUM_STEPS: Final = MAX_SLABS + 2
"""More than slabs, so that a training that keeps only the newest state uses each binding again."""
_TOLERANCE: Final = 1e-4
"""Relative to max(1, |value|): the effect of the order of additions in a small model."""
_INT8_TOLERANCE: Final = 0.05
"""Error of logits relative to the largest one. Libraries round int8 values differently."""
_DAMAGE: Final = (b"", b"no graph at all", b"\x08\x0a" + b"\xff" * 40)


def check_engine(engine: GraphEngine, bundle: Bundle, *, twin: Runtime | None = None, seed: int = 1) -> None:
    """Check that an engine keeps the contract that ``GraphRuntime`` and devices rely on.

    Args:
        engine: The engine.
        bundle: A Bundle of a small model with graphs in the engine's format.
        twin: A runtime whose results the engine must reproduce: within 1e-4 in training and evaluation, and logits
            within a twentieth of the largest one. Without it only the engine's own consistency is checked.
        seed: Seed of the batches.

    Raises:
        AssertionError: The engine breaks the contract. The text says how.
        InvalidBundle: The engine cannot open or run the graphs of the Bundle.
    """
    for what, text in (("name", engine.name), ("version", engine.version)):
        assert text and not text.split()[1:], f"{what}: got {text!r}, expected a text without spaces"
    assert engine.graph_format in FILE_FORMATS, f"graph_format: got {engine.graph_format!r}"
    runtime, rng = GraphRuntime(engine), np.random.default_rng(seed)
    batches = [_batch(bundle, rng) for _ in range(_NUM_STEPS)]
    state = _check_training(runtime, bundle, batches)
    _check_padding(runtime, bundle, batches[0])
    _check_prediction(runtime, bundle, state.parameters, rng)
    _check_graph(engine, bundle, batches)
    _check_refusals(engine, bundle)
    if twin is not None:
        _check_twin(runtime, twin, bundle, batches)


def _check_training(runtime: Runtime, bundle: Bundle, batches: Sequence[PaddedBatch]) -> TrainState:
    """Check that states are values: later steps do not change them, and a repetition is bit-identical."""
    states, losses = _train(runtime, bundle, batches)
    bits = [state.parameters.tobytes() + state.optimizer.tobytes() for state in states]
    again, losses_again = _train(runtime, bundle, batches)
    assert np.isfinite(losses).all(), f"train: got the losses {losses}, expected finite numbers"
    assert losses == losses_again, f"train: a repetition gave the losses {losses_again}, not {losses}"
    for number, (old, new) in enumerate(zip(states, again, strict=True)):
        bits_now = old.parameters.tobytes() + old.optimizer.tobytes()
        assert bits_now == bits[number], f"train: the state after step {number} was changed by a later step"
        same = np.array_equal(old.parameters, new.parameters) and np.array_equal(old.optimizer, new.optimizer)
        assert same, f"train: a repetition gave other bits in step {number}"
    assert bits[0] != bits[-1], "train: the steps changed no parameter"
    _check_bindings(runtime, bundle, batches, (bits, losses))
    return states[-1]


def _check_bindings(
    runtime: Runtime, bundle: Bundle, batches: Sequence[PaddedBatch], expected: tuple[list[bytes], list[float]]
) -> None:
    """Check a training that keeps only the newest state, as a device does: it binds the graph twice, not in each step.

    Args:
        runtime: The engine's.
        bundle: The Bundle.
        batches: A batch for each step.
        expected: (the bits of each state, the loss of each step) of a training that keeps all states.
    """
    bits, losses = expected
    step = runtime.open_train(bundle)
    state = step.begin(bundle.completed(bundle.initial_parameters()))
    for index, batch in enumerate(batches):
        state, loss = step(state, batch, _SETTINGS)
        same = loss == losses[index] and state.parameters.tobytes() + state.optimizer.tobytes() == bits[index + 1]
        assert same, (
            f"bind: step {index + 1} gave other results (loss {loss:.7g}, not {losses[index]:.7g}) where a function "
            "was called again than where the graph was bound anew; the function that bind returns must read its inputs "
            "and write its outputs anew in each call, in the arrays that bind received"
        )


def _train(runtime: Runtime, bundle: Bundle, batches: Sequence[PaddedBatch]) -> tuple[list[TrainState], list[float]]:
    step = runtime.open_train(bundle)
    states, losses = [step.begin(bundle.completed(bundle.initial_parameters()))], list[float]()
    for batch in batches:
        state, loss = step(states[-1], batch, _SETTINGS)
        states.append(state)
        losses.append(loss)
    return states, losses


def _check_padding(runtime: Runtime, bundle: Bundle, batch: PaddedBatch) -> None:
    step, evaluate = runtime.open_train(bundle), runtime.open_evaluate(bundle)
    parameters = bundle.completed(bundle.initial_parameters())
    empty = replace(batch, mask=np.zeros_like(batch.mask))
    _, loss = step(step.begin(parameters), empty, _SETTINGS)
    loss_sum = evaluate(parameters, empty).loss_sum
    assert (loss, loss_sum) == (0.0, 0.0), f"mask: got the losses {loss} and {loss_sum} of padding, expected 0.0"
    with_logits = evaluate(parameters, batch, with_logits=True)
    if with_logits.logits is not None:
        is_same = np.array_equal(with_logits.logits.argmax(axis=-1), with_logits.predicted)
        assert is_same, "evaluate: the predictions are not the largest logits"


def _check_prediction(runtime: Runtime, bundle: Bundle, parameters: Float32s, rng: np.random.Generator) -> None:
    predict = runtime.open_predict(bundle, parameters)
    num, ports = bundle.manifest.batch_size + 1, bundle.manifest.signatures["infer"].inputs
    inputs = _inputs(bundle, [replace(port, shape=(num, *port.shape[1:])) for port in ports], rng)
    logits = predict(inputs)
    first = predict({name: array[:1] for name, array in inputs.items()})
    assert logits.shape[0] == num, f"infer: got {logits.shape} for {num} samples"
    assert _is_near(first, logits[:1]), "infer: the logits of a sample depend on the other samples of the batch"
    other = runtime.open_predict(bundle, bundle.completed(bundle.initial_parameters()))(inputs)
    assert not np.array_equal(logits, other), "infer: two Versions gave equal logits; fill the slots, see GraphFile"


def _check_graph(engine: GraphEngine, bundle: Bundle, batches: Sequence[PaddedBatch]) -> None:
    """Check ``run``: the order of outputs, and that results are not the library's own memory."""
    file = GraphFile(
        data=bundle.graph("evaluate", engine.graph_format),
        graph_format=engine.graph_format,
        what="evaluate graph",
        signature="evaluate",
    )
    graph, parameters = (
        engine.load(file),
        bundle.manifest.model_table.views(bundle.completed(bundle.initial_parameters())),
    )
    ports = [parameter_port(spec.name) for spec in bundle.manifest.model_table.specs]
    feeds = [
        {**dict(zip(ports, parameters.values(), strict=True)), **each.inputs, "y": each.y, "mask": each.mask}
        for each in batches[:2]
    ]
    loss_sum, predicted = graph.run(["loss_sum", "predicted"], feeds[0])
    bits = loss_sum.tobytes() + predicted.tobytes()
    graph.run(["loss_sum", "predicted"], feeds[1])
    assert loss_sum.tobytes() + predicted.tobytes() == bits, "run: a later call changed the arrays of an earlier one"
    (alone,) = graph.run(["predicted"], feeds[0])
    assert np.array_equal(alone, predicted), "run: an output alone differs from the same output among others"


def _check_refusals(engine: GraphEngine, bundle: Bundle) -> None:
    runtime, data = GraphRuntime(engine), bundle.graph("evaluate", engine.graph_format)
    for damaged in (*_DAMAGE, data[: len(data) // 2]):
        try:
            runtime.open_model(damaged, "damaged file", "evaluate")
        except InvalidBundle:
            continue
        raise AssertionError(f"load: accepted a damaged file of {len(damaged)} bytes, expected one of engine.errors")


def _check_twin(runtime: Runtime, twin: Runtime, bundle: Bundle, batches: Sequence[PaddedBatch]) -> None:
    (states, losses), (expected_states, expected_losses) = (_train(each, bundle, batches) for each in (runtime, twin))
    for number, (state, expected) in enumerate(zip(states, expected_states, strict=True)):
        assert _is_near(state.parameters, expected.parameters), f"train: step {number} differs from {twin.name}"
    assert _is_near(np.array(losses), np.array(expected_losses)), f"train: {losses} differ from {expected_losses}"
    parameters = states[-1].parameters
    evaluations = [each.open_evaluate(bundle)(parameters, batches[0]).loss_sum for each in (runtime, twin)]
    assert _is_near(*map(np.array, evaluations)), f"evaluate: got {evaluations[0]}, {twin.name} has {evaluations[1]}"
    logits, targets = (each.open_predict(bundle, parameters)(batches[0].inputs) for each in (runtime, twin))
    difference, largest = np.abs(logits - targets).max(), np.abs(targets).max()
    assert difference <= _INT8_TOLERANCE * largest, (
        f"infer: the logits differ by up to {difference:.3g} from those of {twin.name}, of which the largest is "
        f"{largest:.3g}"
    )


def _batch(bundle: Bundle, rng: np.random.Generator) -> PaddedBatch:
    """Return a random batch whose last sample is padding."""
    manifest = bundle.manifest
    ports = {port.name: port for port in manifest.signatures["train"].inputs}
    mask = np.ones(manifest.batch_size, np.float32)
    mask[1:][-1:] = 0.0
    return PaddedBatch(
        inputs=_inputs(bundle, [ports[name] for name in input_names(manifest)], rng),
        y=_array(ports["y"], manifest.num_classes, rng),  # type: ignore[arg-type]  # the dtype is the port's
        mask=mask,
    )


def _inputs(bundle: Bundle, ports: Sequence[Port], rng: np.random.Generator) -> NamedInputs:
    num_tokens = bundle.manifest.num_tokens
    arrays = {port.name: _array(port, num_tokens.get(port.name, 0), rng) for port in ports}
    return cast(NamedInputs, arrays)


def _array(port: Port, num_values: int, rng: np.random.Generator) -> Array:
    if np.dtype(port.dtype).kind == "f":
        return rng.normal(0.0, 1.0, port.shape).astype(port.dtype)
    values = rng.integers(0, num_values or 2, port.shape)
    if not num_values:
        # An attention mask shows at least one position.
        values.reshape(len(values), -1)[:, 0] = 1
    return values.astype(port.dtype)


def _is_near(actual: Array, expected: Array) -> bool:
    if actual.shape != expected.shape:
        return False
    values, targets = actual.astype(np.float64), expected.astype(np.float64)
    return bool((np.abs(values - targets) <= _TOLERANCE * np.maximum(1.0, np.abs(targets))).all())

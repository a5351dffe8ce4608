"""``edge.assembly.assemble``: graphs written by hand become a Bundle that trains, or the error names the fault."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from support import linear
from support.linear import BATCH_SIZE, BIAS, NUM_CLASSES, NUM_INPUTS, WEIGHT, linear_graphs, numpy_step
from support.models import app_of, batches, bundle_of, samples
from support.values import PUBLISHER

from fanin.edge.assembly.assemble import AssembledGraphs, assemble
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.formats import FILE_FORMATS
from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.bundles.slots import Slot, SlotKind, check_slots
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.decompositions.tables import TFLITE
from fanin.edge.export.graph.forward import trace_evaluate
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.ranges import Activation
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.protos.errors import InvalidBundle, InvalidInput

RATE = StepSettings(learning_rate=0.5)


def with_graphs(**graphs: bytes) -> AssembledGraphs:
    """Return the linear model's graphs with some of them replaced."""
    spec = linear_graphs()
    return replace(spec, graphs={"onnx": {**spec.graphs["onnx"], **graphs}})


def one_batch(seed: int, num: int = BATCH_SIZE) -> PaddedBatch:
    """Return a batch of ``num`` random samples; the other rows are padding."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH_SIZE, NUM_INPUTS)).astype(np.float32)
    y = rng.integers(0, NUM_CLASSES, BATCH_SIZE).astype(np.int32)
    return PaddedBatch(inputs={"x": x}, y=y, mask=(np.arange(BATCH_SIZE) < num).astype(np.float32))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_graphs_written_by_hand_train_and_predict_as_numpy_does(tmp_path: Path, name: str) -> None:
    bundle, runtime = assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER), open_runtime(name)
    assert open_folder(tmp_path / "bundle", trusted=[PUBLISHER.public]).sha256 == bundle.sha256
    step = runtime.open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    w, b = WEIGHT.astype(np.float64), BIAS.astype(np.float64)
    for seed in range(20):
        num = 1 + seed % BATCH_SIZE
        batch = one_batch(seed, num)
        state, loss = step(state, batch, RATE)
        w, b, expected = numpy_step(w, b, batch.inputs["x"][:num], batch.y[:num], RATE.learning_rate)
        assert loss == pytest.approx(expected, abs=1e-5)
    tensors = bundle.manifest.table.views(state.parameters)
    np.testing.assert_allclose(tensors["w"], w, atol=1e-5)
    np.testing.assert_allclose(tensors["b"], b, atol=1e-5)
    x = one_batch(99).inputs["x"][:3]
    np.testing.assert_allclose(runtime.open_predict(bundle, state.parameters)({"x": x}), x @ w + b, atol=1e-4)
    evaluated = runtime.open_evaluate(bundle)(state.parameters, one_batch(99))
    np.testing.assert_array_equal(evaluated.predicted[:3], (x @ w + b).argmax(axis=1))


def test_the_values_in_the_infer_graph_are_removed(tmp_path: Path) -> None:
    bundle = assemble(linear_graphs(), tmp_path, PUBLISHER)
    model = onnx.load_from_string(bundle.graph("infer", "onnx"))
    assert all(value.data_location == TensorProto.EXTERNAL and not value.raw_data for value in model.graph.initializer)
    x = one_batch(3).inputs["x"]
    predictions = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    np.testing.assert_allclose(predictions, x @ WEIGHT + BIAS, atol=1e-6)


def test_a_folder_with_files_is_refused_before_a_graph_is_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    with pytest.raises(InvalidInput) as excinfo:
        assemble(with_graphs(infer=b"no graph"), str(tmp_path), PUBLISHER)
    assert (
        str(excinfo.value)
        == f"assemble: folder: {tmp_path} is not empty, expected a new folder; name another one, or remove it"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_an_invalid_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-0105"):
        assemble(replace(linear_graphs(), name="my digits!"), tmp_path / "bundle", PUBLISHER)
    assert not (tmp_path / "bundle").exists()


def test_explicit_slots_are_used(tmp_path: Path) -> None:
    spec = with_graphs(infer=linear.infer_graph(("weight:0", "bias:0")))
    slots = tuple(
        Slot(initializer=initializer, kind=SlotKind.FLOAT, parameter=name, shape=spec.parameters[name].shape)
        for name, initializer in (("w", "weight:0"), ("b", "bias:0"))
    )
    bundle = assemble(replace(spec, slots={"onnx": slots}), tmp_path, PUBLISHER)
    assert bundle.manifest.slots["onnx"] == slots
    x = one_batch(3).inputs["x"]
    predictions = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    np.testing.assert_allclose(predictions, x @ WEIGHT + BIAS, atol=1e-6)


def test_activations_may_be_listed(tmp_path: Path) -> None:
    ports = [linear.port("x", "n", 6)], [linear.port("logits", "n", WEIGHT.shape[1])]
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        onnx.helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["rounded"]),
        onnx.helper.make_node("MatMul", ["rounded", "w"], ["product"]),
        onnx.helper.make_node("Add", ["product", "b"], ["logits"]),
    ]
    grid = {"scale": np.array(1.0, np.float32), "zero": np.array(0, np.int8)}
    spec = with_graphs(infer=linear.file(nodes, *ports, {**grid, "w": WEIGHT, "b": BIAS}))
    activation = Activation(name="onnx:x", graph_format="onnx", low=-4.0, high=4.0)
    floats = tuple(
        Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=value.shape)
        for name, value in spec.parameters.items()
    )
    kinds = (("scale", SlotKind.ACTIVATION_SCALE), ("zero", SlotKind.ZERO_POINT))
    grids = tuple(
        Slot(initializer=name, kind=kind, parameter="", shape=(), activation="onnx:x") for name, kind in kinds
    )
    listed = replace(spec, slots={"onnx": (*floats, *grids)}, activations=(activation,))
    bundle = assemble(listed, tmp_path, PUBLISHER)
    x, runtime, parameters = one_batch(3).inputs["x"], open_runtime("onnx"), bundle.initial_parameters()
    coarse, fine = (
        runtime.open_predict(bundle, parameters, np.array([-high, high], np.float32))({"x": x}) for high in (400.0, 4.0)
    )
    np.testing.assert_array_equal(fine, runtime.open_predict(bundle, parameters)({"x": x}))
    exact = x @ WEIGHT + BIAS
    assert np.abs(fine - exact).max() < 0.1 * np.abs(coarse - exact).max()
    lows, highs = runtime.open_ranges(bundle, parameters)({"x": x})
    np.testing.assert_array_equal(np.stack([lows, highs]), [x.min(axis=1)[:, None], x.max(axis=1)[:, None]])


@cache
def tflite_spec() -> AssembledGraphs:
    """Return an MLP in TFLite: three Signatures in one file. Each slot is at the bytes of an initial parameter."""
    app = app_of("mlp")
    prepared, x = prepare(app), app.examples(app.batch_size)["x"]
    infer = torch.export.export(copy.deepcopy(app.module).eval(), (x,))
    graphs = {
        "train": trace_train(prepared, TFLITE),
        "evaluate": trace_evaluate(prepared, TFLITE),
        "infer": Traced(program=infer, examples=[x], inputs=["x"], outputs=["logits"]),
    }
    data = to_tflite(graphs, "mlp")
    parameters = {name: value.numpy() for name, value in prepared.parameters.items()}
    return AssembledGraphs(
        name="mlp",
        batch_size=app.batch_size,
        num_classes=app.num_classes,
        parameters=parameters,
        graphs={"tflite": dict.fromkeys(graphs, data)},
        slots={"tflite": tuple(slot_at(name, value, data) for name, value in parameters.items())},
        optimizer=app.recipe.optimizer.settings,
    )


def slot_at(name: str, value: np.ndarray, data: bytes) -> Slot:
    """Return the slot at the parameter's bytes, which occur once in the file."""
    assert data.count(value.tobytes()) == 1
    offset = data.find(value.tobytes())
    return Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=value.shape, offset=offset)


def test_a_tflite_file_of_three_signatures_becomes_a_bundle(tmp_path: Path) -> None:
    bundle, runtime = assemble(tflite_spec(), tmp_path, PUBLISHER), open_runtime("litert")
    step, reference = runtime.open_train(bundle), open_runtime("onnx").open_train(bundle_of("mlp"))
    state = twin = step.begin(bundle.initial_parameters())
    for batch in batches(20, seed=1):
        state, _ = step(state, batch, RATE)
        twin, _ = reference(twin, batch, RATE)
    np.testing.assert_allclose(state.parameters, twin.parameters, atol=1e-5)
    x, _ = samples(5, seed=2)
    predictions = runtime.open_predict(bundle, state.parameters)({"x": x})
    module = app_of("mlp").module
    tensors = {
        name: torch.from_numpy(value.copy()) for name, value in bundle.manifest.table.views(state.parameters).items()
    }
    with torch.no_grad():
        np.testing.assert_allclose(
            predictions, torch.func.functional_call(module, tensors, torch.from_numpy(x)), atol=1e-4
        )


def test_slots_of_a_tflite_file_are_located_by_their_values(tmp_path: Path) -> None:
    spec = tflite_spec()
    bundle = assemble(replace(spec, slots={}), tmp_path, PUBLISHER)
    assert bundle.manifest.slots == spec.slots


@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple),
    order=st.permutations(range(3)),
    before=st.integers(0, 3),
)
def test_values_are_located_in_any_order_of_dimensions(shape: tuple[int, ...], order: list[int], before: int) -> None:
    value = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    transposed = value.transpose([dim for dim in order if dim < value.ndim])
    data = bytes(4 * before) + transposed.tobytes() + bytes(4)
    (slot,) = FILE_FORMATS["tflite"].find_slots(data, {"w": value}, "here")
    assert slot.offset == 4 * before
    slot_value = value.transpose(slot.permutation) if slot.permutation else value
    assert (slot_value.tobytes(), slot_value.shape) == (transposed.tobytes(), slot.shape)
    check_slots((slot,), {"w": shape})
    for bad_file in (data + transposed.tobytes(), bytes(8)):
        with pytest.raises(InvalidBundle, match="FN-0335"):
            FILE_FORMATS["tflite"].find_slots(bad_file, {"w": value}, "here")


def test_a_tflite_file_needs_its_slots_and_its_signatures(tmp_path: Path) -> None:
    spec = tflite_spec()
    parameters = {**spec.parameters, "1.bias": np.zeros(32, np.float32)}
    with pytest.raises(InvalidBundle, match="FN-0335"):
        assemble(replace(spec, slots={}, parameters=parameters), tmp_path, PUBLISHER)
    one_signature = to_tflite({"other": trace_evaluate(prepare(app_of("mlp")), TFLITE)}, "mlp")
    graphs = {"tflite": {**spec.graphs["tflite"], "train": one_signature}}
    with pytest.raises(InvalidInput, match="FN-0325"):
        assemble(replace(spec, graphs=graphs), tmp_path, PUBLISHER)


def rename_ports(data: bytes, **names: str) -> bytes:
    """Return the graph with some of its ports renamed."""
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for row in (*model.graph.input, *model.graph.output):
        row.name = names.get(row.name, row.name)
    return bytes(model.SerializeToString())


def reshape_input(data: bytes, name: str, *shape: int | str) -> bytes:
    """Return the graph with another declared shape of one input."""
    model = onnx.load_from_string(data)
    for row in model.graph.input:
        if row.name == name:
            row.CopyFrom(linear.port(name, *shape, dtype=row.type.tensor_type.elem_type))
    return bytes(model.SerializeToString())


def add_control(data: bytes) -> bytes:
    """Return the train graph with an input for SCAFFOLD's control variate of a parameter."""
    model = onnx.load_from_string(data)
    model.graph.input.append(linear.port("control.w", NUM_INPUTS, NUM_CLASSES))
    return bytes(model.SerializeToString())


def with_float_predictions(data: bytes) -> bytes:
    """Return the evaluate graph with its predictions as float32 values."""
    model = onnx.load_from_string(rename_ports(data, predicted="numbers"))
    model.graph.node.append(onnx.helper.make_node("Cast", ["numbers"], ["predicted"], to=TensorProto.FLOAT))
    model.graph.output[1].CopyFrom(linear.port("predicted", BATCH_SIZE))
    return bytes(model.SerializeToString())


TRAIN, EVALUATE, INFER = linear.train_graph(), linear.evaluate_graph(), linear.infer_graph()


def test_integer_targets_of_a_model_of_values_are_accepted(tmp_path: Path) -> None:
    spec = replace(with_graphs(evaluate=with_float_predictions(EVALUATE)), num_classes=0)
    bundle = assemble(spec, tmp_path / "bundle", PUBLISHER)
    evaluated = open_runtime("onnx").open_evaluate(bundle)(bundle.initial_parameters(), one_batch(1))
    assert evaluated.predicted.dtype == np.float32


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ({"train": b"no graph"}, r"train graph \(onnx\): onnxruntime cannot open it"),
        ({"infer": INFER[:60]}, r"infer graph \(onnx\): (not an ONNX file|the ONNX file is cut off)"),
        ({"infer": linear.infer_graph(("W", "b"))}, r"infer graph \(onnx\): constant 'w': got none, expected float32"),
        ({"train": rename_ports(TRAIN, loss="cost")}, r"signature 'train' has outputs \[.*'cost'.*expected .*'loss'"),
        ({"train": rename_ports(TRAIN, mask="m")}, r"signature 'train' has inputs .* expected .*'mask'"),
        (
            {"train": rename_ports(TRAIN, y="labels")},
            r"train graph: got no input 'y', expected 'y' as int32 for 4 samples",
        ),
        (
            {"train": reshape_input(add_control(TRAIN), "control.w", 3)},
            r"train graph: got 'control\.w' as float32 \(3,\), expected float32 \(",
        ),
        ({"infer": rename_ports(INFER, x="input")}, r"'train' has inputs .*'x', 'y'\], expected .*'input', "),
        (
            {"infer": rename_ports(INFER, x="mask")},
            r"'infer' has inputs \['mask'\], expected at least one, with different",
        ),
        ({"evaluate": reshape_input(EVALUATE, "x", "n", 6)}, r"got 'x' as float32 \(n, 6\), expected .* fixed lengths"),
        (
            {"evaluate": reshape_input(EVALUATE, "mask", 1)},
            r"evaluate graph: got 'mask' as float32 \(1,\), expected .*\(4,\)",
        ),
        ({"evaluate": linear.evaluate_graph(masked=False)}, r"a loss of \S+ from samples with mask 0.0, expected 0.0"),
    ],
)
def test_graphs_that_no_device_could_use_are_refused(tmp_path: Path, graphs: Mapping[str, bytes], message: str) -> None:
    with pytest.raises(InvalidBundle, match=message):
        assemble(with_graphs(**graphs), tmp_path / "bundle", PUBLISHER)
    assert not (tmp_path / "bundle").exists()


def test_a_setting_of_the_optimizer_is_an_input_of_the_train_graph(tmp_path: Path) -> None:
    spec = replace(linear_graphs(), optimizer={"momentum": OptimizerSetting(default=0.9, below=1.0)})
    with pytest.raises(InvalidBundle, match="FN-0417"):
        assemble(spec, tmp_path / "bundle", PUBLISHER)
    # The graph's learning rate is renamed to a setting, so the input learning_rate is missing.
    train = rename_ports(TRAIN, learning_rate="optimizer.momentum")
    with pytest.raises(InvalidBundle, match="FN-0417"):
        assemble(replace(with_graphs(train=train), optimizer=spec.optimizer), tmp_path / "bundle", PUBLISHER)


def test_an_incomplete_spec_is_refused(tmp_path: Path) -> None:
    spec = linear_graphs()
    graphs = dict(spec.graphs["onnx"])
    del graphs["evaluate"]
    for change, message in (
        ({"parameters": {}}, "no parameters or no graphs"),
        ({"graphs": {"onnx": graphs}}, r"got graphs for \['infer', 'train'\] in onnx, expected .* 'evaluate'"),
        ({"parameters": {"w": WEIGHT * np.nan, "b": BIAS}}, "parameter 'w': got NaN or infinity, expected finite"),
        ({"parameters": {"w": WEIGHT.astype(np.float64), "b": BIAS}}, "parameter 'w': got float64, expected finite"),
    ):
        with pytest.raises(InvalidBundle, match=message):
            replace(spec, **change)
    slots = (Slot(initializer="w", kind=SlotKind.FLOAT, parameter="w", shape=WEIGHT.shape),)
    with pytest.raises(InvalidBundle, match="FN-0318"):
        assemble(replace(spec, slots={"onnx": slots}), tmp_path, PUBLISHER)
    with pytest.raises(InvalidBundle, match="FN-0347"):
        assemble(replace(spec, num_classes=5), tmp_path, PUBLISHER)
    with pytest.raises(InvalidBundle, match="FN-0342"):
        assemble(replace(spec, batch_size=8), tmp_path, PUBLISHER)
    wide_parameters = {"w": np.zeros((6, 4), np.float32), "b": np.zeros(4, np.float32)}
    outputs = [linear.port("logits", "n", 4)]
    infer = linear.file(linear.FORWARD, [linear.port("x", "n", 6)], outputs, wide_parameters)
    with pytest.raises(InvalidBundle, match="FN-0342"):
        assemble(replace(with_graphs(infer=infer), parameters=wide_parameters), tmp_path, PUBLISHER)


def test_slots_that_contradict_each_other_are_reported_before_they_are_filled(tmp_path: Path) -> None:
    slots = tuple(
        Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=value.shape, permutation=(0,))
        for name, value in (("b", BIAS), ("w", WEIGHT))
    )
    with pytest.raises(InvalidBundle, match="FN-0320"):
        assemble(replace(linear_graphs(), slots={"onnx": slots}), tmp_path / "bundle", PUBLISHER)
    assert not (tmp_path / "bundle").exists()


def test_preprocess_in_one_format_alone_is_refused() -> None:
    graphs = linear_graphs().graphs["onnx"]
    with pytest.raises(InvalidBundle, match="FN-0313"):
        replace(linear_graphs(), graphs={"onnx": {**graphs, "preprocess": b""}, "tflite": graphs})


def test_a_step_that_fails_at_run_time_raises_a_fanin_error(tmp_path: Path) -> None:
    # The graph opens. Only the lookup of the labels is out of the table's range, in every batch.
    nodes = [copy.deepcopy(node) for node in linear.STEP]
    (lookup,) = (node for node in nodes if node.op_type == "Gather")
    lookup.input[1] = "far"
    nodes.insert(nodes.index(lookup), onnx.helper.make_node("Add", ["y", "hundred"], ["far"]))
    model = onnx.load_from_string(TRAIN)
    constants = {**linear.CONSTANTS, "hundred": np.array(100, np.int32)}
    train = linear.file(nodes, model.graph.input, model.graph.output, constants)
    with pytest.raises(InvalidBundle, match="FN-0412"):
        assemble(with_graphs(train=train), tmp_path / "bundle", PUBLISHER)


def test_a_damaged_name_in_a_file_raises_a_fanin_error() -> None:
    # The library's error message quotes these bytes, which are not valid UTF-8.
    damaged = TRAIN.replace(b"LogSoftmax", b"Log\xff\xfe\xfdtmax")
    assert damaged != TRAIN
    with pytest.raises(InvalidBundle, match="FN-0412"):
        open_runtime("onnx").open_model(damaged, "m")


def test_an_infer_graph_with_a_fixed_batch_predicts_any_number_of_samples(tmp_path: Path) -> None:
    bundle = assemble(with_graphs(infer=reshape_input(INFER, "x", 4, 6)), tmp_path, PUBLISHER)
    x = np.random.default_rng(3).normal(size=(10, 6)).astype(np.float32)
    logits = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    np.testing.assert_allclose(logits, x @ WEIGHT + BIAS, atol=1e-6)

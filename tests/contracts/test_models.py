"""The contract of ``LoadedModel``: any file in any runtime, with checked inputs and clear errors."""

import os
import subprocess
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import linear
from support.data import real_places

from fanin.edge.bundles.formats import format_of
from fanin.edge.runtimes.available import open_format, open_runtime
from fanin.edge.runtimes.base import LoadedModel, ModelPort
from fanin.edge.runtimes.models import dequantize_output, feed_of, quantize_input, run_rows
from fanin.protos.errors import InvalidBundle, InvalidInput, RuntimeMissing

ONNX_RUNTIMES = ("onnx", "reference")
FILES = MappingProxyType(
    {
        "ad01_fp32": ("float32", (-1, 640), (-1, 640)),
        "ad01_int8": ("int8", (-1, 640), (-1, 640)),
        "kws_ref_model": ("int8", (-1, 49, 10, 1), (-1, 12)),
        "kws_ref_model_float32": ("float32", (-1, 49, 10, 1), (-1, 12)),
        "pretrainedResnet": ("float32", (-1, 32, 32, 3), (-1, 10)),
        "pretrainedResnet_quant": ("int8", (-1, 32, 32, 3), (-1, 10)),
        "vww_96_float": ("float32", (-1, 96, 96, 3), (-1, 2)),
        "vww_96_int8": ("int8", (-1, 96, 96, 3), (-1, 2)),
    }
)
"""The MLPerf Tiny reference models: the dtype of inputs and outputs, and the shape of each."""
PAIRS = MappingProxyType(
    {
        "ad01": ("ad01_fp32", "ad01_int8", (-40.0, 0.0), 0.15),
        "resnet": ("pretrainedResnet", "pretrainedResnet_quant", (0.0, 255.0), 0.25),
        "vww": ("vww_96_float", "vww_96_int8", (0.0, 1.0), 0.10),
    }
)
"""Float file, int8 file, range of the inputs, and the largest RMS difference relative to the float output's RMS."""


def two_ports(dtype: int) -> bytes:
    """Return a file that maps (a, b) of any length to their sum and twice a."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Add", ["a", "a"], ["twice"])]
    ports = [[linear.port(name, "n", 2, dtype=dtype) for name in names] for names in (("a", "b"), ("sum", "twice"))]
    return linear.file(nodes, *ports)


@pytest.mark.parametrize("name", ONNX_RUNTIMES)
@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [
        (TensorProto.FLOAT, "float32"),
        (TensorProto.INT64, "int64"),
        (TensorProto.INT8, "int8"),
        (TensorProto.UINT8, "uint8"),
    ],
)
def test_a_file_runs_with_its_own_names_and_dtypes(name: str, dtype: int, numpy_dtype: str) -> None:
    data = two_ports(dtype)
    try:
        model = open_runtime(name).open_model(data, "two.onnx")
    except InvalidBundle as exc:
        # onnxruntime has no addition of bytes, and reports that when it opens the file.
        assert "two.onnx: onnxruntime" in str(exc) and numpy_dtype in ("int8", "uint8")
        return
    assert model.inputs == tuple(ModelPort(name=port, dtype=numpy_dtype, shape=(-1, 2)) for port in ("a", "b"))
    assert [port.name for port in model.outputs] == ["sum", "twice"]
    a, b = np.array([[1, 2]], numpy_dtype), np.array([[3, 4]], numpy_dtype)
    outputs = model({"a": a, "b": b})
    np.testing.assert_array_equal(outputs["sum"], a + b)
    np.testing.assert_array_equal(outputs["twice"], a + a)
    assert outputs["sum"].dtype == numpy_dtype


@pytest.mark.parametrize("name", ONNX_RUNTIMES)
def test_bytes_in_and_out(name: str) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["values"]),
        helper.make_node("Relu", ["values"], ["above"]),
        helper.make_node("QuantizeLinear", ["above", "scale", "zero"], ["y"]),
    ]
    constants = {"scale": np.array(0.5, np.float32), "zero": np.array(-10, np.int8)}
    ports = [[linear.port(port, "n", 3, dtype=TensorProto.INT8)] for port in ("x", "y")]
    model = open_runtime(name).open_model(linear.file(nodes, *ports, constants), "relu.onnx")
    outputs = model({"x": np.array([[-128, -10, 100]], np.int8)})
    np.testing.assert_array_equal(outputs["y"], np.array([[-10, -10, 100]], np.int8))


@pytest.mark.parametrize("name", ONNX_RUNTIMES)
def test_inputs_that_do_not_match_the_model_are_refused(name: str) -> None:
    model = open_runtime(name).open_model(two_ports(TensorProto.FLOAT), "two.onnx")
    a = np.ones((1, 2), np.float32)
    for feed, message in (
        ({"a": a}, r"inputs: got \['a'\], expected \['a', 'b'\]"),
        ({"a": a, "b": a.astype(np.float64)}, r"b: got float64 \(1, 2\), expected float32 \(n, 2\)"),
        ({"a": a, "b": a[:, :1]}, r"b: got float32 \(1, 1\), expected float32 \(n, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(feed)
    with pytest.raises(InvalidBundle, match="FN-0412"):
        model({"a": np.ones((2, 2), np.float32), "b": np.ones((3, 2), np.float32)})


@pytest.mark.parametrize(("name", "file"), [("onnx", "x.onnx"), ("reference", "x.onnx"), ("litert", "x.tflite")])
@pytest.mark.parametrize(
    "data", [b"", b"no model at all", b"\x08\x0a" + b"\xff" * 40, b"\x1c\0\0\0TFL3" + b"\x07" * 40]
)
def test_a_file_that_is_no_model_is_refused_by_its_name(name: str, file: str, data: bytes) -> None:
    with pytest.raises(InvalidBundle, match=f"^{file}: "):
        open_runtime(name).open_model(data, file)


def test_a_port_that_is_no_tensor_is_refused() -> None:
    text = linear.port("x", 2, dtype=TensorProto.STRING)
    node = helper.make_node("Identity", ["x"], ["y"])
    data = linear.file([node], [text], [linear.port("y", 2, dtype=TensorProto.STRING)])
    with pytest.raises(InvalidBundle, match="FN-0410"):
        open_runtime("onnx").open_model(data, "x.onnx")
    with pytest.raises(InvalidBundle, match="FN-0410"):
        open_runtime("reference").open_model(data, "x.onnx")


def test_a_constant_among_the_inputs_is_no_input() -> None:
    model = onnx.load_from_string(linear.infer_graph())
    model.graph.input.append(linear.port("b", linear.NUM_CLASSES))
    for name in ONNX_RUNTIMES:
        opened = open_runtime(name).open_model(model.SerializeToString(), "old.onnx")
        assert [port.name for port in opened.inputs] == ["x"]


def test_the_ending_of_a_file_selects_its_format_and_runtime() -> None:
    assert [format_of(name) for name in ("a.onnx", "b/c.TFLITE")] == ["onnx", "tflite"]
    with pytest.raises(InvalidInput, match="FN-0325"):
        format_of("model.pt")
    assert open_format(["onnx"]).graph_format == "onnx"
    assert open_format(["tflite"]).graph_format == "tflite"
    with pytest.raises(RuntimeMissing, match="FN-0401"):
        open_format(["tflite"], "onnx")
    with pytest.raises(RuntimeMissing, match="FN-0401"):
        open_format(["magic"])


class Doubles:
    """A model with a fixed batch of 4 that counts its runs."""

    inputs = (ModelPort(name="x", dtype="float32", shape=(4, 2)),)
    outputs = (ModelPort(name="y", dtype="float32", shape=(4, 2)),)

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert feed["x"].shape == (4, 2)
        self.num_calls += 1
        return {"y": 2 * feed["x"]}


@pytest.mark.parametrize(("num", "calls"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_fixed_batch_is_run_until_all_rows_are_processed(num: int, calls: int) -> None:
    model, x = Doubles(), np.arange(2.0 * num, dtype=np.float32).reshape(num, 2)
    np.testing.assert_array_equal(run_rows(model, {"x": x})["y"], 2 * x)
    assert model.num_calls == calls
    with pytest.raises(ValueError, match="got no rows"):
        run_rows(model, {"x": x[:0]})


def test_values_are_stored_on_the_files_own_scale() -> None:
    port = ModelPort(name="x", dtype="int8", shape=(-1,), scale=0.5, zero_point=3)
    values = np.array([0.0, 0.25, -0.25, 0.26, 1e9, -1e9], np.float32)
    stored = feed_of(port, values)
    np.testing.assert_array_equal(stored, np.array([3, 4, 2, 4, 127, -128], np.int8))
    np.testing.assert_array_equal(dequantize_output(port, stored[:3]), np.array([0.0, 0.5, -0.5], np.float32))
    assert feed_of(port, stored) is stored
    plain = ModelPort(name="x", dtype="float32", shape=(-1,))
    assert feed_of(plain, values.astype(np.float64)).dtype == np.float32
    assert dequantize_output(plain, values) is values
    with pytest.raises(ValueError, match="x: got values that are not finite"):
        quantize_input(port, np.array([np.nan]))
    with pytest.raises(ValueError, match="x: got float32, expected int8: the file has no scale"):
        quantize_input(ModelPort(name="x", dtype="int8", shape=(-1,)), values)


def tiny(name: str) -> Path:
    """Return the path of an MLPerf Tiny model. Skip the test if the models are not available."""
    data = real_places("mlperf-tiny").data
    assert data is not None
    return data / "mlperf-tiny" / f"{name}.tflite"


def opened(name: str) -> LoadedModel:
    """Open the MLPerf Tiny model in LiteRT."""
    return open_runtime("litert").open_model(tiny(name).read_bytes(), f"{name}.tflite")


def dequantized_outputs(name: str, bounds: tuple[float, float], num: int) -> np.ndarray:
    """Return a model's dequantized outputs for ``num`` random inputs, which are the same for all models of a shape."""
    model = opened(name)
    (input_port,), (output_port,) = model.inputs, model.outputs
    x = np.random.default_rng(7).uniform(*bounds, (num, *input_port.shape[1:]))
    return dequantize_output(output_port, run_rows(model, {input_port.name: feed_of(input_port, x)})[output_port.name])


@pytest.mark.parametrize("name", FILES)
def test_each_mlperf_tiny_model_runs_with_its_own_dtypes(name: str) -> None:
    model = opened(name)
    (input_port,), (output_port,) = model.inputs, model.outputs
    dtype, inputs, outputs = FILES[name]
    assert (input_port.dtype, input_port.shape, output_port.dtype, output_port.shape) == (dtype, inputs, dtype, outputs)
    assert (input_port.scale > 0.0) == (output_port.scale > 0.0) == (dtype == "int8")
    rng = np.random.default_rng(3)
    shape = (3, *inputs[1:])
    x = rng.integers(-128, 128, shape).astype(np.int8) if dtype == "int8" else rng.random(shape, np.float32)
    first, second = (model({input_port.name: x})[output_port.name] for _ in range(2))
    assert (first.dtype, first.shape) == (dtype, (3, *outputs[1:]))
    assert first.tobytes() == second.tobytes() == opened(name)({input_port.name: x})[output_port.name].tobytes()
    assert len(np.unique(first)) > 1


@pytest.mark.parametrize("pair", PAIRS)
def test_int8_outputs_are_near_float_outputs(pair: str) -> None:
    in_float, in_int8, bounds, allowed = PAIRS[pair]
    expected, actual = (dequantized_outputs(name, bounds, 8) for name in (in_float, in_int8))
    difference = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    assert difference < allowed


def test_a_missing_signature_is_named() -> None:
    data = tiny("ad01_int8").read_bytes()
    with pytest.raises(InvalidInput, match="FN-0325"):
        open_runtime("litert").open_model(data, "ad01", "serve")


ALL_FILES = """
import sys
from pathlib import Path
import numpy as np
from fanin.edge.runtimes.available import open_runtime
runtime = open_runtime("tflite")
for path in sorted(Path(sys.argv[1]).glob("*.tflite")):
    model = runtime.open_model(path.read_bytes(), path.name)
    (input_port,), (output_port,) = model.inputs, model.outputs
    x = np.ones((2, *input_port.shape[1:]), input_port.dtype)
    y = model({input_port.name: x})[output_port.name]
    assert y.dtype == input_port.dtype and y.shape[0] == 2, path
    print(path.stem)
"""


def test_tflite_runtime_runs_them_too() -> None:
    folder, root = tiny("ad01_int8").parent, Path(__file__).parents[2]
    python = root / ".venv-device-tflite" / "bin" / "python"
    assert python.exists(), "make devices makes the devices' environments"
    path = os.pathsep.join(str(root / name) for name in ("server", "clients", "edge", "datacenter", "protos"))
    command = [str(python), "-c", ALL_FILES, str(folder)]
    completed = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == sorted(FILES)

"""The contract of ``Runtime``: one suite over all implementations, on both models.

tflite-runtime is installed in a separate environment (`make devices`). ``support.remote_runtime`` drives it from here.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnxruntime
import pytest
from support.models import (
    BATCH_SIZE,
    NUM_CLASSES,
    PUBLISHER,
    app_of,
    batches,
    export_bundle,
    samples,
    with_artifact,
    with_manifest,
    write_copy,
)
from support.remote_runtime import PYTHON, ROOT, SOURCES, runtime_of

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.initializers import fill_constants
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.ranges import grids_of
from fanin.edge.runtimes.available import RUNTIMES as AVAILABLE
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, Runtime, StepSettings, TrainState
from fanin.edge.runtimes.contract import check_engine
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, InvalidVersion

RATE = StepSettings(learning_rate=0.05)
RUNTIMES = MappingProxyType(
    {"onnx": "onnxruntime", "reference": "onnx.reference", "litert": "ai-edge-litert", "tflite": "tflite-runtime"}
)
"""Each runtime and its library."""
FORMATS = MappingProxyType({"onnx": ("onnx", "reference"), "tflite": ("litert", "tflite")})
"""The runtimes of each graph format."""
FILES = MappingProxyType(
    {
        "onnx": {"train": "train.onnx", "infer": "infer.onnx"},
        "tflite": dict.fromkeys(("train", "infer"), "model.tflite"),
    }
)
"""The artifacts that contain these Signatures."""
MODELS = ("mlp", "cnn")
INT8_STEPS = 3
"""Largest difference of logits in int8 steps: runtimes round some activations differently, and few reach the logits."""
INT8_GAP = 0.02
"""Mean difference of logits between formats, as a share of their range: each has its own activation scales."""


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Each runtime in turn."""
    return runtime_of(request.param)


@pytest.fixture(params=MODELS)
def bundle(request: pytest.FixtureRequest, both_formats: Callable[[str], Bundle]) -> Bundle:
    """Each model's Bundle in turn."""
    return both_formats(request.param)


@pytest.fixture
def mlp(both_formats: Callable[[str], Bundle]) -> Bundle:
    """The Bundle of the MLP."""
    return both_formats("mlp")


def first_state(bundle: Bundle) -> TrainState:
    """Return the state of Version 0 with an empty optimizer state."""
    return open_runtime("onnx").open_train(bundle).begin(bundle.initial_parameters())


def trained(bundle: Bundle, runtime: Runtime, *, epochs: int = 1) -> TrainState:
    """Train for some epochs of 60 samples, in which the last batch is short. Return the state."""
    step, state = runtime.open_train(bundle), first_state(bundle)
    for epoch in range(epochs):
        for batch in batches(60, seed=epoch):
            state, _ = step(state, batch, RATE)
    return state


def test_a_runtime_has_a_name_and_a_format(runtime: Runtime) -> None:
    library, version = runtime.name.split()
    assert library in RUNTIMES.values()
    assert version[0].isdigit()
    assert runtime.graph_format == ("onnx" if library.startswith("onnx") else "tflite")


def test_training_lowers_the_loss_and_does_not_change_its_arguments(runtime: Runtime, bundle: Bundle) -> None:
    step, state = runtime.open_train(bundle), first_state(bundle)
    before = state.parameters.copy()
    (batch, *_) = batches(BATCH_SIZE, seed=1)
    next_state, first_loss = step(state, batch, RATE)
    _, second_loss = step(next_state, batch, RATE)
    assert second_loss < first_loss
    np.testing.assert_array_equal(state.parameters, before)
    assert not state.optimizer.any()
    assert not np.array_equal(next_state.parameters, before)


def test_padding_has_no_effect(runtime: Runtime, bundle: Bundle) -> None:
    *_, short = batches(BATCH_SIZE + 3, seed=2)
    noisy = replace(
        short, inputs={"x": np.where(short.mask[:, None, None, None] > 0, short.inputs["x"], np.float32(9.0))}
    )
    step, evaluate, state = runtime.open_train(bundle), runtime.open_evaluate(bundle), first_state(bundle)
    clean_state, clean_loss = step(state, short, RATE)
    noisy_state, noisy_loss = step(state, noisy, RATE)
    assert noisy_loss == clean_loss
    np.testing.assert_allclose(noisy_state.parameters, clean_state.parameters, rtol=0, atol=1e-6)
    assert evaluate(state.parameters, noisy).loss_sum == evaluate(state.parameters, short).loss_sum


def test_a_batch_of_padding_only_changes_no_parameter(runtime: Runtime, bundle: Bundle) -> None:
    (batch, *_) = batches(BATCH_SIZE, seed=1)
    state, loss = runtime.open_train(bundle)(first_state(bundle), replace(batch, mask=np.zeros_like(batch.mask)), RATE)
    assert loss == 0.0
    np.testing.assert_array_equal(state.parameters, bundle.initial_parameters())


def test_evaluation_adds_up_over_batches(bundle: Bundle) -> None:
    state = trained(bundle, open_runtime("onnx"))
    sums = {}
    for name in RUNTIMES:
        evaluate = runtime_of(name).open_evaluate(bundle)
        evaluations = [evaluate(state.parameters, batch) for batch in batches(60, seed=9)]
        sums[name] = (sum(row.loss_sum for row in evaluations), [row.predicted.tolist() for row in evaluations])
    for name in RUNTIMES:
        assert sums[name][1] == sums["onnx"][1]
        np.testing.assert_allclose(sums[name][0], sums["onnx"][0], rtol=1e-5)


@pytest.mark.parametrize("num", [0, 1, 3, BATCH_SIZE, 2 * BATCH_SIZE + 1])
def test_prediction_takes_any_number_of_samples(runtime: Runtime, bundle: Bundle, num: int) -> None:
    predict = runtime.open_predict(bundle, bundle.initial_parameters())
    x, _ = samples(2 * BATCH_SIZE + 1, seed=4)
    logits = predict({"x": x[:num]})
    assert logits.shape == (num, NUM_CLASSES)
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, predict({"x": x})[:num])


def test_runtimes_predict_nearly_the_same_logits(bundle: Bundle) -> None:
    state = trained(bundle, open_runtime("onnx"))
    x, _ = samples(50, seed=4)
    logits = {name: runtime_of(name).open_predict(bundle, state.parameters)({"x": x}) for name in RUNTIMES}
    for first, second in FORMATS.values():
        step = np.diff(np.unique(logits[second])).min()
        assert np.abs(logits[first] - logits[second]).max() <= INT8_STEPS * step * 1.01
    gap = np.abs(logits["onnx"] - logits["litert"]).mean()
    assert 0.0 < gap <= INT8_GAP * np.ptp(logits["onnx"])


CONTRACT = """
import sys
from pathlib import Path
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.runtimes.available import RUNTIMES
from fanin.edge.runtimes.contract import check_engine

check_engine(RUNTIMES[sys.argv[1]].engine(), open_folder(Path(sys.argv[2]), trusted=[sys.argv[3]]))
"""


@pytest.mark.parametrize("name", ["reference", "litert"])
def test_engines_keep_the_contract(name: str, bundle: Bundle) -> None:
    check_engine(AVAILABLE[name].engine(), bundle, twin=open_runtime("onnx"))


def test_the_default_engine_keeps_the_contract(bundle: Bundle) -> None:
    check_engine(AVAILABLE["onnx"].engine(), bundle, twin=open_runtime("onnx", plain=True))


def test_the_engine_of_another_environment_keeps_the_contract(bundle: Bundle, tmp_path: Path) -> None:
    write_copy(bundle, tmp_path / "bundle")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in SOURCES)}
    command = [str(PYTHON), "-c", CONTRACT, "tflite", str(tmp_path / "bundle"), PUBLISHER.public]
    outcome = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_the_slotted_graph_is_the_edited_graph_bit_for_bit(bundle: Bundle) -> None:
    parameters = trained(bundle, open_runtime("onnx"), epochs=2).parameters
    grids = grids_of(bundle.manifest.activations)
    values = fill_slots(bundle.manifest.slots["onnx"], bundle.manifest.table, parameters, grids=grids)
    edited = onnx.load_from_string(fill_constants(bundle.graph("infer", "onnx"), values, "graph"))
    x, _ = samples(50, seed=4)
    (expected,) = plain_session(edited).run(None, {"x": x})
    logits = open_runtime("onnx").open_predict(bundle, parameters)({"x": x})
    assert logits.tobytes() == expected.tobytes()
    first = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    assert not np.array_equal(logits, first)


def plain_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session over the model, on one thread and with the exact int8 kernels that devices use."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# In CI the demo tests this: after a federation, its int8 model agrees with the float model.
@pytest.mark.nightly
def test_int8_agrees_with_float_on_a_trained_model(both_formats: Callable[[str], Bundle]) -> None:
    app = app_of("cnn")
    first = both_formats("cnn")
    parameters = trained(first, open_runtime("onnx"), epochs=40).parameters
    fill_module(app.module, first.manifest.table.views(parameters))
    # Activation scales belong to the exported model. So export the trained model, then train further.
    bundle = export_bundle(app)
    final = trained(bundle, open_runtime("onnx")).parameters
    x, y = samples(400, seed=11)
    evaluate = open_runtime("onnx").open_evaluate(bundle)
    num_correct = sum(
        int(((evaluate(final, batch).predicted == batch.y) & (batch.mask > 0)).sum()) for batch in batches(400, seed=11)
    )
    num_int8_correct = int((open_runtime("onnx").open_predict(bundle, final)({"x": x}).argmax(axis=1) == y).sum())
    assert num_correct > 380
    assert abs(num_correct - num_int8_correct) <= 4


def fill_module(module: object, tensors: dict[str, Float32s]) -> None:
    """Load these tensors into a torch module."""
    import torch

    assert isinstance(module, torch.nn.Module)
    module.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in tensors.items()})


WITHOUT_TORCH = """
import hashlib, sys
for name in ("torch", "onnx", "jax", "litert_torch"):
    sys.modules[name] = None
from pathlib import Path
import numpy as np
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.available import open_runtime

bundle = open_folder(Path(sys.argv[1]), trusted=[sys.argv[2]])
arrays = np.load(sys.argv[3])
step = open_runtime(sys.argv[4]).open_train(bundle)
state = step.begin(bundle.initial_parameters())
for x, y, mask in zip(arrays["x"], arrays["y"], arrays["mask"], strict=True):
    state, _ = step(state, PaddedBatch(inputs={"x": x}, y=y, mask=mask), StepSettings(learning_rate=0.05))
print(hashlib.sha256(state.parameters.tobytes()).hexdigest())
"""


@pytest.mark.parametrize("name", ["onnx", "litert"])
def test_another_process_without_torch_and_onnx_trains_to_the_same_bits(
    name: str, bundle: Bundle, tmp_path: Path
) -> None:
    write_copy(bundle, tmp_path / "bundle")
    rows = list(batches(60, seed=0))
    np.savez(
        tmp_path / "data.npz",
        x=[row.inputs["x"] for row in rows],
        **{name: [getattr(row, name) for row in rows] for name in ("y", "mask")},
    )
    arguments = (str(tmp_path / "bundle"), PUBLISHER.public, str(tmp_path / "data.npz"), name)
    state = trained(bundle, open_runtime(name))
    assert child(WITHOUT_TORCH, *arguments) == hashlib.sha256(state.parameters.tobytes()).hexdigest()


def child(code: str, *arguments: str) -> str:
    """Run the code in a new Python process. Return its standard output."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_batch_of_another_form_is_refused(runtime: Runtime, bundle: Bundle) -> None:
    step, evaluate, state = runtime.open_train(bundle), runtime.open_evaluate(bundle), first_state(bundle)
    (batch, *_) = batches(BATCH_SIZE, seed=1)
    x = batch.inputs["x"]
    for wrong, message in (
        (replace(batch, inputs={"x": x.astype(np.float64)}), r"x: got float64 \(8, 1, 8, 8\), expected float32"),
        (replace(batch, inputs={"x": x[:3]}), r"x: got float32 \(3, 1, 8, 8\), expected float32 \(8, 1, 8, 8\)"),
        (replace(batch, y=batch.y.astype(np.int64)), r"y: got int64 \(8,\), expected int32 \(8,\)"),
        (replace(batch, y=batch.y + NUM_CLASSES), r"y: got labels from \d to \d, expected 0 to 3"),
        (replace(batch, y=batch.y - NUM_CLASSES), r"y: got labels from -\d to -\d, expected 0 to 3"),
        (replace(batch, mask=batch.mask[:, None]), r"mask: got float32 \(8, 1\), expected float32 \(8,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            step(state, wrong, RATE)
        with pytest.raises(ValueError, match=message):
            evaluate(state.parameters, wrong)


def test_vectors_and_inputs_of_another_form_are_refused(runtime: Runtime, bundle: Bundle) -> None:
    (batch, *_) = batches(BATCH_SIZE, seed=1)
    state = first_state(bundle)
    short = state.parameters[:-1]
    with pytest.raises(ValueError, match=r"parameters: got float32 \(\d+,\), expected float32 \(\d+,\)"):
        runtime.open_train(bundle)(replace(state, parameters=short), batch, RATE)
    with pytest.raises(ValueError, match=r"optimizer state: got float64 \(\d+,\), expected float32"):
        runtime.open_train(bundle)(replace(state, optimizer=np.zeros(short.size + 1)), batch, RATE)
    with pytest.raises(ValueError, match=r"flat vector: got shape"):
        runtime.open_predict(bundle, short)
    with pytest.raises(ValueError, match=r"x: got float32 \(2, 8, 8\), expected float32 \(n, 1, 8, 8\)"):
        runtime.open_predict(bundle, state.parameters)({"x": batch.inputs["x"][:2, 0]})


def test_a_version_that_is_not_finite_is_refused(runtime: Runtime, bundle: Bundle) -> None:
    parameters = bundle.initial_parameters().copy()
    parameters[0] = np.nan
    with pytest.raises(InvalidVersion, match="hold values that are not finite"):
        runtime.open_predict(bundle, parameters)


def test_a_tampered_graph_is_never_opened(runtime: Runtime, mlp: Bundle) -> None:
    name = FILES[runtime.graph_format]["train"]
    digest = mlp.manifest.artifacts[name].chunks[0].sha256
    chunks = {ref.sha256: b"" for artifact in mlp.manifest.artifacts.values() for ref in artifact.chunks}
    data = bytearray(mlp.artifact(name))
    data[100] ^= 1
    chunks[digest] = bytes(data)
    tampered = Bundle.open(mlp.signed, trusted=[PUBLISHER.public], read=chunks.__getitem__)
    with pytest.raises(InvalidBundle, match=rf"artifact {name}: chunk 0: digest mismatch"):
        runtime.open_train(tampered)


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"no graph at all", lambda data: b"\x08\x0a" + b"\xff" * 40, lambda data: data[:1000]],
    ids=["text", "noise", "cut off"],
)
def test_a_corrupt_graph_with_the_right_digest_is_refused(
    runtime: Runtime, mlp: Bundle, damage: Callable[[bytes], bytes]
) -> None:
    message = r"(cannot open it|expected a TFLite file|cut off|not an ONNX file|slot .* has the bytes)"
    for signature, name in FILES[runtime.graph_format].items():
        wrong = with_artifact(mlp, name, damage(mlp.artifact(name)))
        with pytest.raises(InvalidBundle, match=rf"{signature} graph: .*{message}"):
            if signature == "train":
                runtime.open_train(wrong)
            else:
                runtime.open_predict(wrong, wrong.initial_parameters())


def test_a_graph_with_other_ports_than_signed_is_refused(mlp: Bundle) -> None:
    wrong = with_artifact(mlp, "evaluate.onnx", mlp.artifact("train.onnx"))
    with pytest.raises(InvalidBundle, match="FN-0417"):
        open_runtime("onnx").open_evaluate(wrong)


@pytest.mark.parametrize("name", [name for name in RUNTIMES if name != "reference"])
def test_a_graph_with_ports_of_another_shape_than_signed_is_refused(name: str, mlp: Bundle) -> None:
    infer = mlp.manifest.signatures["infer"]
    (x,) = infer.inputs
    narrow = replace(infer, inputs=(replace(x, shape=(-1, 1, 8, 4)),))
    wrong = with_manifest(mlp, replace(mlp.manifest, signatures={**mlp.manifest.signatures, "infer": narrow}))
    with pytest.raises(InvalidBundle, match=r"infer graph: inputs: got 'x' as .* expected .*-1, 1, 8, 4"):
        runtime_of(name).open_predict(wrong, wrong.initial_parameters())


def test_signatures_with_other_ports_than_a_runtime_feeds_are_refused(runtime: Runtime, mlp: Bundle) -> None:
    signatures = dict(mlp.manifest.signatures)
    swapped = {**signatures, "train": signatures["evaluate"]}
    wrong = with_manifest(mlp, replace(mlp.manifest, signatures=swapped))
    with pytest.raises(InvalidBundle, match=r"(has inputs .* expected|train graph: inputs: got) .*'learning_rate'"):
        runtime.open_train(wrong)


def test_a_slot_that_is_unfilled_or_missing_is_refused(runtime: Runtime, mlp: Bundle) -> None:
    slots = mlp.manifest.slots[runtime.graph_format]
    misplaced = replace(slots[0], initializer="nowhere", offset=slots[0].offset and len(mlp.artifact("model.tflite")))
    # A TFLite file has zeros in slots that are not filled, and no error reports it. The signed manifest protects them.
    others = tuple(slot for slot in slots if slots[0].parameter not in (slot.parameter, slot.weight))
    incomplete = [others] if runtime.graph_format == "onnx" else []
    for slots_of_format in (*incomplete, (misplaced, *slots[1:])):
        changed = {**mlp.manifest.slots, runtime.graph_format: slots_of_format}
        wrong = with_manifest(mlp, replace(mlp.manifest, slots=changed))
        with pytest.raises(InvalidBundle, match="infer graph: "):
            runtime.open_predict(wrong, wrong.initial_parameters())


def test_an_empty_batch_is_refused(runtime: Runtime, bundle: Bundle) -> None:
    empty = PaddedBatch(
        inputs={"x": np.empty((0, 1, 8, 8), np.float32)}, y=np.empty(0, np.int32), mask=np.empty(0, np.float32)
    )
    with pytest.raises(ValueError, match=r"x: got float32 \(0, 1, 8, 8\)"):
        runtime.open_evaluate(bundle)(bundle.initial_parameters(), empty)

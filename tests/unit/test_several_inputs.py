"""A model of several inputs on a device, in a simulation and in the evaluator: data by name, and the errors."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process, one_line
from support.several import LENGTH, NUM_CLASSES, NUM_WORDS, several_app, several_examples

from fanin.clients.data.examples import Examples, model_examples
from fanin.clients.data.npz import open_npz, read_npz, write_npz
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import NamedInputs
from fanin.edge.runtimes.contract import check_engine
from fanin.edge.runtimes.engines.onnx import onnxruntime_engine
from fanin.edge.runtimes.models import model_inputs
from fanin.edge.signatures import Port
from fanin.protos.errors import InvalidInput
from fanin.simulation import Iid, SimulationSettings, examples_of, load_data, partition, simulate

EXAMPLES = several_examples(120, seed=2)
INPUTS = dict(EXAMPLES.inputs)


def inputs_without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in INPUTS.items() if key != name}


@pytest.fixture(scope="module")
def bundle(bundle_for: Callable[[str, str], Bundle]) -> Bundle:
    return bundle_for("several", "onnx")


def test_the_manifest_declares_the_inputs(bundle: Bundle) -> None:
    infer, train = bundle.manifest.signatures["infer"], bundle.manifest.signatures["train"]
    assert infer.inputs == (
        Port(name="ids", dtype="int32", shape=(-1, LENGTH)),
        Port(name="attention_mask", dtype="int32", shape=(-1, LENGTH)),
        Port(name="numbers", dtype="float32", shape=(-1, 3)),
    )
    assert {port.name for port in infer.inputs} | {"y", "mask", "uniform.0"} < {port.name for port in train.inputs}
    assert bundle.manifest.num_tokens == {"ids": NUM_WORDS}


def test_the_engine_contract_holds(bundle: Bundle) -> None:
    check_engine(onnxruntime_engine(), bundle)


def test_a_device_trains_from_a_file_with_an_array_for_each_input(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **INPUTS, y=EXAMPLES.y, more=np.zeros((len(EXAMPLES), 1)))
    examples = read_npz(path)
    assert examples.inputs.keys() == {*INPUTS, "more"}
    trainer = RuntimeTrainer(open_runtime("onnx"), open_npz(path, 0, 0.2))
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())
    change = trainer.train(model, example_assignment(bundle), lambda: True)
    assert change.num_steps == 12 * example_assignment(bundle).training.epochs
    assert change.counts["examples"] == 96 and np.abs(change.values).max() > 0.0
    write_npz(tmp_path / "again.npz", EXAMPLES)
    second_trainer = RuntimeTrainer(open_runtime("onnx"), open_npz(tmp_path / "again.npz", 0, 0.2))
    assert np.array_equal(second_trainer.train(model, example_assignment(bundle), lambda: True).values, change.values)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            inputs_without("attention_mask"),
            r"got the arrays \['ids', 'numbers'\], expected \['attention_mask', 'ids', 'numbers'\]; add \['attention_m",
        ),
        (
            {"x": INPUTS["ids"]},
            r"inputs: got the arrays \['x'\], expected .*; add \['ids', 'attention_mask', 'numbers'\]",
        ),
        (
            INPUTS | {"numbers": INPUTS["numbers"][:, :2]},
            r"numbers: got float32 \(120, 2\), expected float32 \(n, 3\)",
        ),
        (
            INPUTS | {"ids": INPUTS["ids"].astype(np.float32)},
            r"ids: got float32 \(120, 6\), expected int32 \(n, 6\); convert it by ids\.astype\('int32'\)",
        ),
        (
            INPUTS | {"ids": INPUTS["ids"].astype(np.uint8)},
            r"ids: got uint8 \(120, 6\), expected int32 \(n, 6\); convert it by ids\.astype\('int32'\)",
        ),
        (
            INPUTS | {"numbers": INPUTS["numbers"].astype(np.int32)},
            r"numbers: got int32 \(120, 3\), expected float32 \(n, 3\); convert it by numbers\.astype\('float32'\)",
        ),
        (
            INPUTS | {"numbers": INPUTS["numbers"].astype(np.uint8)},
            r"numbers: got uint8 \(120, 3\), expected float32 \(n, 3\); convert it by numbers\.astype\('float32'\)",
        ),
        (
            INPUTS | {"ids": INPUTS["ids"][:7]},
            r"got {'ids': 7, 'attention_mask': 120, 'numbers': 120} samples, expected",
        ),
        (INPUTS | {"ids": INPUTS["ids"] + 5}, r"ids: token \d+ at sample \d+, expected 0 to 19"),
    ],
)
def test_wrong_inputs_raise_one_error(bundle: Bundle, inputs: NamedInputs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_inputs(bundle, inputs, None)


def test_predict_names_an_array_that_is_no_dict(bundle: Bundle) -> None:
    predict = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())
    with pytest.raises(ValueError, match=r"inputs: got ndarray, expected a dict of arrays with the names \['attention"):
        predict(INPUTS["ids"])  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match=r"inputs: got \['ids'\], expected \['attention_mask', 'ids', 'numbers'\]"):
        predict({"ids": INPUTS["ids"]})
    assert predict({name: array[:0] for name, array in INPUTS.items()}).shape == (0, NUM_CLASSES)


def test_the_evaluator_accepts_a_data_set_by_names(bundle: Bundle) -> None:
    runtime = open_runtime("onnx")
    assert model_examples(EXAMPLES, bundle, runtime) is EXAMPLES
    with pytest.raises(ValueError, match=r"add \['numbers'\]"):
        model_examples(Examples(inputs=inputs_without("numbers"), y=EXAMPLES.y), bundle, runtime)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    return fanin_in_process(capsys, monkeypatch)


def test_infer_reads_each_input_and_the_labels(fanin: Fanin, bundle: Bundle, tmp_path: Path) -> None:
    from support.models import write_copy

    write_copy(bundle, tmp_path / "bundle")
    np.savez(tmp_path / "data.npz", **INPUTS, y=EXAMPLES.y)
    row = json.loads(fanin("infer", tmp_path / "bundle", "--data", tmp_path / "data.npz", "--json").out)
    predict = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())
    np.testing.assert_allclose(row["outputs"]["logits"]["values"], predict(INPUTS), rtol=1e-6)
    assert 0.0 <= row["accuracy"] <= 1.0 and len(row["predictions"]) == len(EXAMPLES)
    np.savez(tmp_path / "data.npz", **inputs_without("numbers"), y=EXAMPLES.y)
    line = one_line(fanin("infer", tmp_path / "bundle", "--data", tmp_path / "data.npz"), "infer")
    assert "got arrays ['attention_mask', 'ids', 'y'], expected the model's inputs" in line


@pytest.mark.parametrize("engine", ["graph", pytest.param("vmap", marks=pytest.mark.nightly)])
def test_a_simulation_learns_and_partitions_all_inputs_alike(engine: str, tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz", EXAMPLES)
    data = load_data(str(tmp_path / "data.npz"))
    clients = partition(data.train, 4, Iid(), seed=1)
    assert all(part.inputs.keys() == INPUTS.keys() for part in clients)
    rows = [
        {**{name: array[index] for name, array in INPUTS.items()}, "label": int(EXAMPLES.y[index])}
        for index in range(len(EXAMPLES))
    ]
    examples = examples_of(rows, x=(*INPUTS,), y="label")
    assert all(np.array_equal(examples.inputs[name], array) for name, array in INPUTS.items())
    plan = {"training.learning_rate": 0.2, "training.epochs": 4}
    settings = SimulationSettings(test=data.test, plan=plan, engine=engine)
    result = simulate(several_app(), clients, cohort=4, rounds=4, settings=settings)
    assert result.rounds[-1].test_loss < result.rounds[0].test_loss


def test_a_simulation_names_an_input_without_data() -> None:
    wrong = Examples(inputs=inputs_without("ids"), y=EXAMPLES.y)
    with pytest.raises(InvalidInput, match="FN-0853"):
        simulate(several_app(), partition(wrong, 2, Iid()), cohort=2, rounds=1)
    wrong = Examples(inputs=INPUTS | {"numbers": INPUTS["ids"]}, y=EXAMPLES.y)
    with pytest.raises(InvalidInput, match="FN-1184"):
        simulate(several_app(), partition(wrong, 2, Iid()), cohort=2, rounds=1)

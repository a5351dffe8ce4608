"""A job's files round-trip, and errors in a config are reported before anything runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import raw
from support.raw import raw_app, raw_of
from support.synced import durable_files, synced

from fanin.clients.data.digits import split_digits
from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.config.settings import (
    DataSettings,
    EvaluationSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.loading import split_text
from fanin.datacenter.families.known import family_model
from fanin.datacenter.files.jobfiles import (
    ERROR_FILE,
    METRICS_FILE,
    PARAMETERS_FILE,
    ROWS_FILE,
    HeldOutEvaluation,
    Metrics,
    TrainingHistory,
    TrainResult,
    read_config,
    read_error,
    read_result,
    write_config,
    write_error,
    write_file,
    write_result,
)
from fanin.datacenter.jobs.job import main, train_rank
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.observers.loading import RankPlace
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.edge.parameter_files import read_parameters
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.errors import InvalidInput, UnsupportedModel

RAW_APPS = raw.__file__
LAYERS = f"{Path(__file__).with_name('apps.py')}:stacked"
positive_floats = st.floats(1e-6, 1e3)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5),
    losses=st.lists(positive_floats),
    replicate=st.integers(1, 9),
)
def test_a_result_round_trips(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], losses: list[float], replicate: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    evaluations = tuple(
        HeldOutEvaluation(step=step, epoch=0, train_loss=loss, validation_loss=2 * loss, validation_accuracy=0.5)
        for step, loss in enumerate(losses)
    )
    metrics = Metrics(
        trained=TrainingHistory(losses=tuple(losses), evaluated=evaluations, best=1, flat=True),
        mesh=MeshShape(dp_replicate=replicate),
        num_ranks=2,
        train_s=0.25,
        units_per_second=3.0,
        peak_memory_bytes=7,
        layer_times=tuple(losses),
        stage_times=tuple(losses),
        bytes_by_axis={"pp": replicate},
        predicted_bytes_by_axis={"pp": 3} if replicate > 1 else None,
    )
    (folder / "parameters.bin").unlink(missing_ok=True)
    write_result(folder, TrainResult(metrics=metrics))
    assert read_result(folder) == TrainResult(metrics=metrics)
    table = TensorTable.of({"w": (2, 2), "b": (1,)})
    result = TrainResult(metrics=metrics, table=table, parameters=np.array(values, np.float32))
    assert "; see .losses and .evaluated)" in repr(result) and "array" not in repr(result)
    write_result(folder, result)
    stored_result = read_result(folder)
    assert (stored_result.table, stored_result.metrics) == (result.table, result.metrics)
    assert stored_result.parameters is not None
    assert stored_result.parameters.tobytes() == np.array(values, np.float32).tobytes()
    assert not list(folder.glob("*.new"))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        write_file(tmp_path / "a", [1])  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_result_and_an_error_are_synced(tmp_path: Path) -> None:
    metrics = Metrics(
        trained=TrainingHistory(losses=(0.5,), evaluated=(), best=0, flat=False),
        mesh=MeshShape(),
        num_ranks=1,
        train_s=0.25,
        units_per_second=3.0,
        peak_memory_bytes=7,
    )
    table = TensorTable.of({"w": (2,)})
    with synced(tmp_path) as syncs:
        write_result(tmp_path, TrainResult(metrics=metrics, table=table, parameters=np.zeros(2, np.float32)))
        write_error(tmp_path, InvalidInput("an observer has failed"))
    names = (PARAMETERS_FILE, METRICS_FILE, ERROR_FILE)
    assert durable_files(syncs) == [tmp_path / name for name in names]


def test_an_error_keeps_its_type(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    write_error(tmp_path, UnsupportedModel("the model is too large"))
    # The error of a rank that lost its connection to the first one.
    write_error(tmp_path, InvalidInput("connection closed by peer"))
    error = read_error(tmp_path)
    assert type(error) is UnsupportedModel
    assert str(error) == "the model is too large"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 1}, "got format 1, expected 2"),
        ({"config": 3}, "config.json: got 3, expected a table"),
        ({"config": {}}, "config.json: got no model, expected a value"),
    ],
)
def test_a_file_without_a_config_is_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    path = write_config(usable_config(tmp_path), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidInput, match=expected):
        read_config(path)


def test_an_unreadable_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(InvalidInput, match="FN-1352"):
        read_config(path)
    for text, expected in (("{", "not JSON"), ("[1]", "got list, expected an object")):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=expected):
            read_config(path)
    assert main([str(path)]) == 2
    assert "InvalidInput" in capsys.readouterr().err
    assert main([]) == 2
    assert "got 0 arguments, expected one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ModelSettings(app="no.such.module:app")}, "App: no module 'no' on the path"),
        ({"data": DataSettings(examples=Path("missing.npz"))}, "missing.npz: no such file"),
        ({"data": DataSettings(text="missing.txt")}, r"missing.txt: cannot be read \(No such file or directory\)"),
        ({"parallel": ParallelSettings(mesh=MeshShape(dp_replicate=3))}, "got a world of 2"),
    ],
)
def test_unusable_settings_are_refused_before_the_first_collective(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    parallel = ParallelSettings(mesh=MeshShape(dp_replicate=2))
    with pytest.raises(InvalidInput, match=expected):
        train_rank(replace(usable_config(tmp_path), **{"parallel": parallel} | changes), RankPlace(num_ranks=2))


def test_initial_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "initial.bin"
    config = usable_config(tmp_path)
    config = replace(config, model=replace(config.model, initial=path))
    with pytest.raises(InvalidInput, match="FN-0352"):
        train_rank(config)
    path.write_bytes(b"not parameters")
    with pytest.raises(InvalidInput, match="FN-0355"):
        read_parameters(path)
    path.write_bytes(encode_parameters(TensorTable.of({"w": (1,)}), np.ones(1, np.float32)))
    with pytest.raises(InvalidInput, match="FN-1315"):
        train_rank(config)


def test_data_that_a_decoder_cannot_read_is_refused(tmp_path: Path) -> None:
    config = replace(
        usable_config(tmp_path), model=ModelSettings(family=family_model("decoder", DecoderConfig(vocabulary=3)))
    )
    with pytest.raises(InvalidInput, match="FN-1234"):
        train_rank(config)
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 9)
    with pytest.raises(InvalidInput, match="FN-1233"):
        train_rank(replace(config, data=DataSettings(text=str(text), length=4)))
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="FN-1230"):
        train_rank(replace(config, data=DataSettings(text=str(text), length=4)))
    x = np.arange(12, dtype=np.int32).reshape(2, 6)
    for inputs, targets in ((x, x % 3), (x % 3, x)):
        np.savez(tmp_path / "tokens.npz", x=inputs, y=targets)
        with pytest.raises(InvalidInput, match="FN-1233"):
            train_rank(replace(config, data=DataSettings(examples=tmp_path / "tokens.npz")))
    np.savez(tmp_path / "one.npz", x=x[:1] % 3, y=x[:1] % 3)
    with pytest.raises(InvalidInput, match="FN-1121"):
        train_rank(replace(config, data=DataSettings(examples=tmp_path / "one.npz")))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            LayoutSettings(layers="blocks", num_layers=2),
            "got 'blocks', which is no module of the model, expected names",
        ),
        (
            LayoutSettings(layers="layers", num_layers=2, outputs=("tail",)),
            "got 'tail', which is no module of the model",
        ),
        (
            LayoutSettings(layers="layers", num_layers=2),
            "got num_layers 2, expected 4, the number of modules in layers",
        ),
        (
            LayoutSettings(layers="layers", num_layers=4, plan={"layers.*.gate": "column"}),
            r"the pattern 'layers.\*.gate' of the plan matches no module, expected at least one",
        ),
        (
            LayoutSettings(layers="layers", num_layers=4, plan={"layers.*": "whole", "*.1": "shared"}),
            r"the patterns 'layers.\*' and '\*.1' of the plan match the module layers.1, expected one",
        ),
    ],
)
def test_names_of_no_module_are_refused(tmp_path: Path, layout: LayoutSettings, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        train_rank(replace(usable_config(tmp_path), model=ModelSettings(app=LAYERS, layout=layout)))


def test_a_text_is_cut_once_and_its_end_is_held_out() -> None:
    train_part, held_out = split_text("cabbage", 0.3)
    assert list(train_part) == [2, 0, 1, 1, 0]
    assert list(held_out) == [4, 3]


def usable_config(folder: Path) -> TrainConfig:
    """Return a config with which a job can run."""
    public = split_digits(1, 1.0, 0).public
    np.savez(folder / "data.npz", x=public.inputs["x"], y=public.y)
    return TrainConfig(
        model=ModelSettings(app="fanin.datacenter.models.digits_app:app"),
        data=DataSettings(examples=folder / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=16, learning_rate=0.1, optimizer="sgd"),
        stop=StopSettings(epochs=1),
    )


def test_raw_data_trains_as_the_models_inputs_do(tmp_path: Path) -> None:
    app = raw_app("pixels")
    labels = np.arange(len(app.inputs["x"])) % app.num_classes
    vectors = []
    for name, x in (("raw", raw_of("pixels")), ("x", app.inputs["x"])):
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=labels)
        config = TrainConfig(
            model=ModelSettings(app=f"{RAW_APPS}:pixels"),
            data=DataSettings(examples=tmp_path / f"{name}.npz"),
            training=TrainingSettings(batch_size=4, learning_rate=0.1, optimizer="sgd"),
            stop=StopSettings(epochs=1),
        )
        vectors.append(train_rank(config).parameters)
    np.testing.assert_array_equal(*vectors)


def test_adascale_logs_the_gain_of_each_step(tmp_path: Path) -> None:
    config = usable_config(tmp_path)
    rate = RateSettings(scale="adascale", base_batch=4)
    config = replace(config, rate=rate, training=replace(config.training, accumulate=4), stop=StopSettings(steps=12))
    history = train_rank(config, RankPlace(folder=tmp_path)).metrics.trained
    rows = [json.loads(line) for line in (tmp_path / ROWS_FILE).read_text().splitlines()]
    gains = [row["gain"] for row in rows]
    assert len(gains) == len(history.losses) < 12
    assert all(1.0 < gain <= 4.0 for gain in gains)
    assert len(set(gains)) > 1
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1 * gain for gain in gains])


def test_a_decoder_learns_a_text_over_tokens_or_samples(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    config = TrainConfig(
        model=ModelSettings(
            family=family_model("decoder", DecoderConfig(vocabulary=16, width=16, num_layers=1, feed_forward=16))
        ),
        data=DataSettings(text=str(text), length=16),
        training=TrainingSettings(batch_size=8, learning_rate=0.03),
        stop=StopSettings(steps=25),
        evaluation=EvaluationSettings(every=25),
    )
    tokens = train_rank(config)
    samples = train_rank(replace(config, model=replace(config.model, mean_over="samples")))
    assert tokens.parameters is None, "what a decoder learnt is in its checkpoints"
    for result in (tokens, samples):
        history = result.metrics.trained
        assert history.losses[0] == pytest.approx(math.log(16), rel=0.1)
        assert history.evaluated[-1].validation_loss < 1.5
        assert result.metrics.units_per_second > 0
        assert result.metrics.peak_memory_bytes > 1e7
    # The last window is short, so the two means differ for its batch.
    assert tokens.metrics.trained.losses != samples.metrics.trained.losses
    assert torch.get_default_dtype() == torch.float32

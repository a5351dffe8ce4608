"""A job's files come back as they went in, and what is wrong with a config is told before anything runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import raw
from support.raw import raw_app, raw_of

from fanin.clients.digits import split_digits
from fanin.datacenter.job import main, train
from fanin.datacenter.jobfiles import (
    Epoch,
    TrainConfig,
    Trained,
    TrainResult,
    TrainSettings,
    read_config,
    read_error,
    read_parameters,
    read_result,
    write_config,
    write_error,
    write_file,
    write_result,
)
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.errors import InvalidInput, UnsupportedModel

RAW_APPS = raw.__file__
positive = st.floats(1e-6, 1e3)
settings_of = st.builds(
    TrainSettings,
    learning_rate=positive,
    batch_size=st.integers(1, 99),
    momentum=st.floats(0.0, 0.99),
    max_epochs=st.integers(1, 99),
    patience=st.integers(1, 99),
    min_delta=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**63),
)
names = st.text("ab/. é", min_size=1, max_size=9)


@given(
    training=settings_of,
    app=names,
    data=names.map(Path),
    initial=st.none() | names.map(Path),
    replicate=st.none() | st.integers(1, 9),
)
def test_a_config_comes_back_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory,
    training: TrainSettings,
    app: str,
    data: Path,
    initial: Path | None,
    replicate: int | None,
) -> None:
    config = TrainConfig(
        app=app,
        data=data,
        num_validation=3,
        training=training,
        folder=tmp_path_factory.getbasetemp(),
        initial=initial,
        dp_replicate=replicate,
    )
    assert read_config(write_config(config)) == config


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5), losses=st.lists(positive))
def test_a_result_comes_back_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], losses: list[float]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    epochs = tuple(Epoch(train_loss=loss, validation_loss=2 * loss, validation_accuracy=0.5) for loss in losses)
    result = TrainResult(
        table=TensorTable.of({"w": (2, 2), "b": (1,)}),
        parameters=np.array(values, np.float32),
        trained=Trained(epochs=epochs, best_epoch=1, flat=True),
        num_ranks=2,
        train_s=0.25,
    )
    write_result(folder, result)
    found = read_result(folder)
    assert (found.table, found.trained, found.num_ranks, found.train_s) == (result.table, result.trained, 2, 0.25)
    assert found.parameters.tobytes() == result.parameters.tobytes()
    assert not list(folder.glob("*.new"))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        write_file(tmp_path / "a", [])  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_comes_back_as_itself(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    write_error(tmp_path, UnsupportedModel("the model is too large"))
    found = read_error(tmp_path)
    assert type(found) is UnsupportedModel
    assert str(found) == "the model is too large"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("batch_size", 0, "got batch_size 0, expected at least 1"),
        ("max_epochs", 0, "got max_epochs 0, expected at least 1"),
        ("patience", 0, "got patience 0, expected at least 1"),
        ("seed", -1, "got seed -1, expected at least 0"),
        ("learning_rate", 0.0, "got learning_rate 0.0, expected a positive number"),
        ("learning_rate", float("nan"), "got learning_rate nan, expected a positive number"),
        ("momentum", 1.0, "got momentum 1.0, expected 0.0 to below 1.0"),
        ("min_delta", -0.1, "got min_delta -0.1, expected 0.0 or more"),
        ("momentum", True, "momentum: got True, expected int or float"),
        ("batch_size", 1.5, "batch_size: got 1.5, expected int"),
        ("learning_rate", "fast", "learning_rate: got 'fast', expected int or float"),
    ],
)
def test_a_setting_out_of_range_is_told(tmp_path: Path, field: str, value: object, expected: str) -> None:
    path = edited(tmp_path, lambda row: row["training"].update({field: value}))
    with pytest.raises(InvalidInput, match=expected):
        read_config(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 2}, "got format 2, expected 1"),
        ({"extra": 1}, r"got unknown keys \['extra'\], missing \[\]"),
        ({"training": 3}, "config.json: training: got int, expected an object"),
        ({"training": {}}, r"training: got unknown keys \[\], missing \['batch_size', 'learning_rate'"),
        ({"num_validation": 0}, "got num_validation 0, expected at least 1"),
        ({"app": None}, "app: got None, expected str"),
    ],
)
def test_a_config_that_is_none_is_told(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        read_config(edited(tmp_path, lambda row: row.update(changes)))


def test_a_config_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(InvalidInput, match=r"cannot be read \(No such file or directory\)"):
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
        ({"app": "no.such.module:app"}, "App: no module 'no' on the path"),
        ({"data": Path("missing.npz")}, "missing.npz: no such file"),
        ({"num_validation": 100}, "got 100 examples, expected more than the 100 that num_validation holds out"),
        ({"initial": Path("missing.bin")}, r"missing.bin: cannot be read \(No such file"),
        ({"dp_replicate": 3}, "got a world of 2"),
        ({"dp_replicate": 0}, "got dp_replicate 0, expected at least 1"),
    ],
)
def test_what_a_job_cannot_use_is_told_before_its_first_collective(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(InvalidInput, match=expected):
        train(dataclasses.replace(usable(tmp_path), **changes), 0, 2)


def test_initial_parameters_of_another_model_are_told(tmp_path: Path) -> None:
    path = tmp_path / "initial.bin"
    path.write_bytes(b"not parameters")
    with pytest.raises(InvalidInput, match=r"initial.bin: parameters: got magic b'not para'"):
        read_parameters(path)
    path.write_bytes(encode_parameters(TensorTable.of({"w": (1,)}), np.ones(1, np.float32)))
    with pytest.raises(InvalidInput, match="expected the parameters of this very model"):
        train(dataclasses.replace(usable(tmp_path), initial=path), 0, 2)


def usable(folder: Path) -> TrainConfig:
    """A config with which a job would run."""
    public = split_digits(1, 1.0, 0).public
    np.savez(folder / "data.npz", x=public.x, y=public.y)
    return TrainConfig(
        app="fanin.datacenter.models.digits_app:app",
        data=folder / "data.npz",
        num_validation=20,
        training=TrainSettings(learning_rate=0.1),
        folder=folder,
    )


def edited(folder: Path, edit: object) -> Path:
    """The path of a config file after ``edit`` changed its object."""
    assert callable(edit)
    path = write_config(usable(folder))
    row = json.loads(path.read_text())
    edit(row)
    path.write_text(json.dumps(row))
    return path


def test_raw_data_trains_as_what_the_model_is_given(tmp_path: Path) -> None:
    app = raw_app("pixels")
    labels = np.arange(len(app.calibration)) % app.num_classes
    vectors = []
    for name, x in (("raw", raw_of("pixels")), ("x", app.calibration)):
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=labels)
        config = TrainConfig(
            app=f"{RAW_APPS}:pixels",
            data=tmp_path / f"{name}.npz",
            num_validation=4,
            training=TrainSettings(learning_rate=0.1, batch_size=4, max_epochs=1),
            folder=tmp_path,
        )
        vectors.append(train(config, 0, 1).parameters)
    np.testing.assert_array_equal(*vectors)

"""A value of a wrong type in a public class of the export is one error that names the field and the value."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from support.errors import raises
from support.values import PUBLISHER

from fanin.edge.export import (
    Adagrad,
    Adam,
    Adapters,
    App,
    Lengths,
    Lion,
    Recipe,
    RmsProp,
    Sgd,
    check_app,
    export,
)
from fanin.protos.errors import InvalidInput

VALUES: Final = (
    *(12, -1, 1.5, "0.9", "x", b"x", None, True, float("nan")),
    *([1], ["a", 2], (1, 2), [[1]], {"a": 1}, {1: 2}, {"x": "1"}, {"x": None}),
    *(object(), lambda value: value, int, torch.ones(2), torch.tensor(0.5)),
)
APP: Final[Mapping[str, object]] = {
    "name": "first",
    "module": torch.nn.Linear(4, 3),
    "calibration": torch.linspace(0.0, 1.0, 32).reshape(8, 4),
    "batch_size": 4,
    "num_classes": 3,
}


@pytest.mark.parametrize(
    ("kind", "valid"),
    [
        (Lengths, {"sizes": (2, 4), "axes": {"x": 1}}),
        *((optimizer, {}) for optimizer in (Sgd, Adam, RmsProp, Adagrad, Lion)),
        (Adapters, {"rank": 2}),
        (Recipe, {}),
        (App, APP),
    ],
)
def test_a_field_accepts_a_value_or_raises_an_error_of_ours(kind: type[Any], valid: Mapping[str, object]) -> None:
    names = [each.name for each in fields(kind) if each.init]
    for name, value in ((name, value) for name in names for value in VALUES):
        try:
            kind(**{**valid, name: value})
        except InvalidInput as exc:
            assert "got " in str(exc) and "expected " in str(exc), f"{name} {value!r}: {exc}"


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (
            lambda wrong: Lengths(sizes=wrong(12), axes={"x": 1}),
            "lengths: sizes: got 12, expected 1 to 4 different integers of at least 1, in ascending order",
        ),
        (
            lambda wrong: Lengths(sizes=(4,), axes=wrong(1)),
            "lengths: axes: got 1, expected the axis of the length, an integer of at least 1, by the name of an input",
        ),
        (
            lambda wrong: Lengths(sizes=(4,), axes={"x": 1}, padding=wrong({"x": "0"})),
            "lengths: padding: got {'x': '0'}, expected finite numbers by the names of axes: ['x']",
        ),
        (
            lambda wrong: Sgd(momentum=wrong("0.9")),
            "optimizer: got momentum '0.9', expected a float of at least 0.0 and below 1.0",
        ),
        (lambda wrong: Sgd(nesterov=wrong("no")), "Sgd: nesterov: got 'no', expected True or False"),
        (lambda wrong: Adam(decoupled=wrong(None)), "Adam: decoupled: got None, expected True or False"),
        (lambda wrong: Recipe(proximal=wrong("no")), "recipe: proximal: got 'no', expected True or False"),
        (
            lambda wrong: Recipe(local=wrong(1)),
            "recipe: local: got 1, expected a list of patterns such as ['head.*']",
        ),
        (
            lambda wrong: Recipe(rates=wrong(10.0)),
            "recipe: rates: got 10.0, expected factors by pattern such as {'head.*': 10.0}",
        ),
        (lambda wrong: Adapters(rank=wrong("4")), "adapters: rank: got '4', expected an int"),
        (
            lambda wrong: App(**{**APP, "decompositions": wrong([])}),
            "App first: decompositions: got [], expected a function by operator overload, such as {torch.ops.aten.",
        ),
    ],
)
def test_a_wrong_type_is_named_with_the_expected_one(create: Callable[[Any], object], message: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        create(lambda value: value)
    assert str(excinfo.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"app": torch.nn.Linear(4, 3)}, "got Linear, expected an App; load one from a file by load_app(path)"),
        ({"formats": "onnx"}, "got formats 'onnx', expected a list of one or more of ['onnx', 'tflite']"),
        ({"formats": 3}, "got formats 3, expected a list of one or more of ['onnx', 'tflite']"),
        ({"formats": ["onx"]}, "got formats ['onx'], expected a list of one or more of ['onnx', 'tflite']"),
    ],
)
def test_a_wrong_argument_of_an_export_is_refused(change: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"app": App(**APP), "formats": ["onnx"], **change}
    with raises(InvalidInput, f"export: {message}"):
        export(folder=tmp_path / "bundle", key=PUBLISHER, **arguments)
    with raises(InvalidInput, f"check_app: {message}"):
        check_app(**arguments)


def test_a_limit_that_is_no_number_is_refused_first(tmp_path: Path) -> None:
    error = "export: got max_drop '1' for the cost of int8, expected a number of at least 0"
    with raises(InvalidInput, error):
        export(App(**APP), tmp_path / "bundle", PUBLISHER, max_drop="1")  # type: ignore[arg-type]  # the mistake

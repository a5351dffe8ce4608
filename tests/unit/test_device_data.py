"""A device compares its data with the Bundle's model before the first step. The error shows how to convert them."""

import re

import numpy as np
import pytest
from conftest import BundleFor
from support.models import app_of

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.training.local_data import LocalData
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.available import open_runtime

APP = app_of("cnn")
SHAPE = APP.inputs["x"].shape[1:]
CLASSES = APP.num_classes
X = np.zeros((6, *SHAPE), np.float32)
Y = (np.arange(6) % CLASSES).astype(np.int32)


def read(bundle: Bundle, examples: Examples) -> None:
    validation = Examples(inputs={"x": X}, y=Y)
    graphs = BundleGraphs(open_runtime("onnx"))
    LocalData(graphs, MemoryStore(partition=0, train=examples, validation=validation)).examples(bundle)


def test_fitting_data_is_accepted(bundle_for: BundleFor) -> None:
    read(bundle_for("cnn", "onnx"), Examples(inputs={"x": X}, y=Y))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            X,
            Y + 1,
            f"; count classes from 0: y - 1, or set num_classes={CLASSES + 1} in the App",
        ),
        (X, Y + 2, f"y: got labels from 2 to {CLASSES + 1}, expected 0 to {CLASSES - 1}"),
        (X, Y.astype(np.float32), "y: got float32 (6,), expected int32 (n,); convert it by y.astype('int32')"),
        (
            X,
            np.eye(CLASSES, dtype=np.float32)[Y],
            f"float32 (6, {CLASSES}), expected int32 (n,); convert one-hot values by y.argmax(-1).astype('int32')",
        ),
        (X, Y[:, None], "y: got int32 (6, 1), expected int32 (n,); remove a dimension by y.squeeze(-1)"),
        (
            np.moveaxis(np.zeros((6, *SHAPE), np.float32), 1, -1),
            Y,
            "; channels are the first dimension of a sample: np.moveaxis(x, -1, 1)",
        ),
        (X.reshape(6, -1), Y, f"; x.reshape(-1, {', '.join(map(str, SHAPE))}) has this shape"),
        (X.astype(np.uint8), Y, "; scale the values as the App's calibration data, or give the App a preprocess="),
    ],
)
def test_other_data_is_refused_with_its_conversion(
    bundle_for: BundleFor, x: np.ndarray, y: np.ndarray, message: str
) -> None:
    bundle = bundle_for("cnn", "onnx")
    with pytest.raises(ValueError, match=rf"^training examples: .*{re.escape(message)}") as excinfo:
        read(bundle, Examples(inputs={"x": x}, y=y))
    assert "-1," not in str(excinfo.value).split(";", maxsplit=1)[0]

"""A runtime runs inside an app: standard error belongs to the app and its threads."""

import os
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from support.tflite_file import small_file

from fanin.edge.runtimes.engines.interpreter import interpreter_engine
from fanin.edge.runtimes.runtime import GraphRuntime
from fanin.edge.tensors import Array

ROW = {
    "name": "x",
    "dtype": np.float32,
    "shape": np.array([2]),
    "shape_signature": np.array([2]),
    "quantization": (0.0, 0),
}


class Interpreter:
    """An interpreter whose graph returns its input. While it runs, another thread of the app writes a line."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.lines: list[str] = []

    def get_signature_list(self) -> Sequence[str]:
        return ["add"]

    def get_signature_runner(self, name: str) -> "Interpreter":
        return self

    def get_input_details(self) -> dict[str, object]:
        return {"x": ROW}

    def get_output_details(self) -> dict[str, object]:
        return {"y": ROW}

    def __call__(self, x: Array) -> dict[str, Array]:
        writer = threading.Thread(target=os.write, args=(2, b"the app's line\n"))
        writer.start()
        writer.join()
        self.lines.append(self._capture.readouterr().err)
        return {"y": x}


def test_other_threads_write_to_standard_error_during_a_graphs_first_run(capfd: pytest.CaptureFixture[str]) -> None:
    interpreter = Interpreter(capfd)
    runtime = GraphRuntime(interpreter_engine("fake", "1", lambda **_: interpreter, lambda **_: interpreter))
    model = runtime.open_model(small_file(), "model.tflite", "add")
    for _ in range(2):
        model({"x": np.ones(2, np.float32)})
    assert interpreter.lines == ["the app's line\n"] * 2

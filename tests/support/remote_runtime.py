"""tflite-runtime as a ``Runtime`` of the test, although its library is in another environment: a process behind pipes.

The process receives Bundles as folders. Its errors are raised again here, so a test can use it like a local runtime.
"""

import atexit
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.bundle import CHUNKS_FOLDER, MANIFEST_FILE, SIGNATURE_FILE, Bundle
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import (
    BatchEvaluation,
    LoadedModel,
    MeasureRanges,
    ModelPort,
    NamedInputs,
    PaddedBatch,
    Predict,
    Runtime,
    StepSettings,
    TrainState,
    TrainStep,
)
from fanin.edge.tensors import Float32s
from fanin.protos import errors
from support.frames import INPUT, Arrays, Row, read_frame, write_frame

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-device-tflite" / "bin" / "python"
SOURCES = ("server", "clients", "edge", "datacenter", "protos")


def runtime_of(name: str) -> Runtime:
    """Return the runtime of this name, in this environment or in another."""
    return tflite_runtime() if name == "tflite" else open_runtime(name)


@cache
def tflite_runtime() -> "RemoteRuntime":
    """Return the single process with tflite-runtime."""
    assert PYTHON.exists(), f"{PYTHON.parents[1].name} is missing: run `make devices`"
    return RemoteRuntime(PYTHON, "tflite")


class RemoteRuntime:
    """A ``Runtime`` in another process."""

    def __init__(self, python: Path, name: str) -> None:
        # The sources of the working tree precede the wheel that is installed in the environment.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in SOURCES)}
        server = Path(__file__).with_name("runtime_server.py")
        self._child = subprocess.Popen(
            [str(python), str(server), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self._folder = tempfile.TemporaryDirectory(prefix="fanin-remote-")
        self._num_bundles = 0
        atexit.register(self.close)
        self._description, _ = self.ask({"do": "describe"}, {})

    def close(self) -> None:
        """End the process."""
        self._child.communicate(timeout=30)
        self._folder.cleanup()

    def ask(self, row: Row, arrays: Mapping[str, npt.NDArray[np.generic]]) -> tuple[Row, Arrays]:
        """Make one call to the process."""
        assert self._child.stdin is not None and self._child.stdout is not None
        write_frame(self._child.stdin, row, arrays)
        frame = read_frame(self._child.stdout)
        assert frame is not None, f"{self._child.args}: ended with {self._child.wait(10)}"
        answer, values = frame
        if "error" in answer:
            raise known_error(str(answer["error"]))(answer["message"])
        return answer, values

    def _open(self, what: str, bundle: Bundle, arrays: Arrays) -> int:
        folder = Path(self._folder.name) / str(self._num_bundles)
        self._num_bundles += 1
        write_as_is(bundle, folder)
        size = bundle.manifest.batch_size
        row: Row = {"do": what, "folder": str(folder), "publisher": bundle.signed.public_key, "batch_size": size}
        answer, _ = self.ask(row, arrays)
        return int(str(answer["number"]))

    @property
    def name(self) -> str:
        return str(self._description["name"])

    @property
    def graph_format(self) -> str:
        return str(self._description["graph_format"])

    def open_train(self, bundle: Bundle) -> TrainStep:
        return _TrainStep(self, self._open("open_train", bundle, {}))

    def open_evaluate(self, bundle: Bundle) -> "_Evaluate":
        return _Evaluate(self, self._open("open_evaluate", bundle, {}))

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        arrays = {"parameters": parameters} | ({} if ranges is None else {"ranges": ranges})
        return _Predict(self, self._open("open_predict", bundle, arrays))

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        return _Ranges(self, self._open("open_ranges", bundle, {"parameters": parameters}))

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        row = {"do": "open_model", "what": what, "signature": signature}
        answer, _ = self.ask(row, {"graph": np.frombuffer(graph, np.uint8)})
        return _Model(self, answer)


class _TrainStep:
    def __init__(self, remote: RemoteRuntime, number: int) -> None:
        self._remote, self._number = remote, number

    def begin(self, parameters: Float32s) -> TrainState:
        return state_of(*self._remote.ask({"do": "begin", "number": self._number}, {"parameters": parameters}))

    def __call__(self, state: TrainState, batch: PaddedBatch, settings: StepSettings) -> tuple[TrainState, float]:
        row = {
            "do": "step",
            "number": self._number,
            "num_steps": state.num_steps,
            "learning_rate": settings.learning_rate,
            "proximal_weight": settings.proximal_weight,
            "random_key": settings.random_key,
            "settings": dict(settings.optimizer),
            "group": settings.group,
        }
        extras = {"anchor": settings.anchor, "control": settings.control}
        arrays = {"parameters": state.parameters, "optimizer": state.optimizer, **arrays_of(batch)}
        arrays |= {name: value for name, value in extras.items() if value is not None}
        answer, values = self._remote.ask(row, arrays)
        return state_of(answer, values), float(str(answer["loss"]))


class _Ranges:
    def __init__(self, remote: RemoteRuntime, number: int) -> None:
        self._remote, self._number = remote, number

    def __call__(self, inputs: NamedInputs) -> tuple[Float32s, Float32s]:
        _, values = self._remote.ask({"do": "measure", "number": self._number}, dict(inputs))
        return values["lows"].astype(np.float32), values["highs"].astype(np.float32)


class _Evaluate:
    def __init__(self, remote: RemoteRuntime, number: int) -> None:
        self._remote, self._number = remote, number

    def __call__(self, parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
        row = {"do": "evaluate", "number": self._number, "with_logits": with_logits}
        answer, values = self._remote.ask(row, {"parameters": parameters, **arrays_of(batch)})
        loss_sum = float(str(answer["loss_sum"]))
        return BatchEvaluation(loss_sum=loss_sum, predicted=values["predicted"], logits=values.get("logits"))


class _Predict:
    def __init__(self, remote: RemoteRuntime, number: int) -> None:
        self._remote, self._number = remote, number

    def __call__(self, inputs: NamedInputs) -> Float32s:
        _, values = self._remote.ask({"do": "predict", "number": self._number}, inputs)
        return values["logits"]


class _Model:
    def __init__(self, remote: RemoteRuntime, answer: Row) -> None:
        self._remote, self._number = remote, answer["number"]
        self.inputs, self.outputs = (
            tuple(ModelPort(**{**row, "shape": tuple(row["shape"])}) for row in answer[kind])
            for kind in ("inputs", "outputs")
        )

    def __call__(self, feed: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
        return self._remote.ask({"do": "run", "number": self._number}, feed)[1]


def known_error(name: str) -> type[Exception]:
    """Return the exception class of this name."""
    error_class = ValueError if name == "ValueError" else getattr(errors, name)
    assert issubclass(error_class, Exception)
    return error_class


def state_of(answer: Row, values: Arrays) -> TrainState:
    """Return the state in an answer."""
    return TrainState(
        parameters=values["parameters"], optimizer=values["optimizer"], num_steps=int(str(answer["num_steps"]))
    )


def arrays_of(batch: PaddedBatch) -> Arrays:
    """Return the arrays of a batch for a message."""
    return {f"{INPUT}{name}": array for name, array in batch.inputs.items()} | {"y": batch.y, "mask": batch.mask}


def write_as_is(bundle: Bundle, folder: Path) -> None:
    """Write a Bundle's folder with its own Chunks and signature, so that its faults are kept."""
    chunks = folder / CHUNKS_FOLDER
    chunks.mkdir(parents=True)
    (folder / MANIFEST_FILE).write_bytes(bundle.signed.data)
    signed = {"public_key": bundle.signed.public_key, "signature": bundle.signed.signature.hex()}
    (folder / SIGNATURE_FILE).write_text(json.dumps(signed))
    for artifact in bundle.manifest.artifacts.values():
        for ref in artifact.chunks:
            (chunks / ref.sha256).write_bytes(bundle._read(ref.sha256))

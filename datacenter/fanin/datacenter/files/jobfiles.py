"""Files of a datacenter job: the interface between ``launch`` and the ranks of ``job``.

A job has one folder::

    config.json         the TrainConfig; with several machines its name includes its digest
    initial.safetensors the initial parameters of a job of several ranks; removed at the end of the job
    initial-*           the initial parameters of the caller, named by their digest; removed by a caller of one machine
    caller              where the first rank calls the caller after each step; removed at the end of the job
    parameters.bin      the final parameters of an App, canonical bytes
    metrics.json        the result; written last, so the job is complete if this file exists
    error.json          the error of a job that failed: one of our own errors, by name
    rows.jsonl          one line per step, written by the first rank
    logs/               output of torchrun and its ranks; with several machines, one folder for each
    lock                excludes other jobs of the same machine; the checkpoint folder has one, too

and one file in the folder of its checkpoints::

    layer-times.json    measured layer times, which decide how a pipeline is split into stages

Each file is written aside, synced and renamed into place, and nothing is pickled. Several machines share the folder,
and a file may belong to any of them. Therefore only the first rank removes files, before it joins the others.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from fanin.datacenter.config.records import record_of, row_of
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.edge.files import replace_file
from fanin.edge.parameter_files import read_parameters
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos.errors import FaninError, InvalidInput, error_named, kind_name

FORMAT: Final = 2
CONFIG_FILE: Final = "config.json"
DIGEST_CHARS: Final = 16
SEED_FILE: Final = "initial.safetensors"
PARAMETERS_FILE: Final = "parameters.bin"
METRICS_FILE: Final = "metrics.json"
ERROR_FILE: Final = "error.json"
ROWS_FILE: Final = "rows.jsonl"
CALLER_FILE: Final = "caller"
LAYER_TIMES_FILE: Final = "layer-times.json"
MACHINES: Final = "--machines"
"""Option of the ranks' program that announces several machines."""
LOGS_FOLDER: Final = "logs"
THREADS: Final = "OMP_NUM_THREADS"
"""Environment variable with the number of CPU threads of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """An evaluation on the held-out samples. Losses are means over tokens or samples.

    Attributes:
        step: Steps completed.
        epoch: Current epoch, from 0.
        train_loss: Mean training loss of the steps since the last evaluation that were not skipped; each step's loss is
            computed before the step. None without such a step.
        validation_loss: Mean loss on the held-out samples.
        validation_accuracy: Share of correct labels or tokens; 0 if the targets are floating-point values.
    """

    step: int
    epoch: int
    train_loss: float | None
    validation_loss: float
    validation_accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHistory:
    """The history of a training.

    Attributes:
        losses: Loss before each step; None if the step was skipped, or if the trace of an earlier job is lost.
        evaluated: All evaluations, except those of a trace that is lost.
        best: Number of the evaluation with the lowest loss, from 1; 0 if ``evaluated`` does not have it.
        flat: Whether training stopped because the validation loss no longer improved.
        skipped: Steps that were skipped because their loss or gradients were not finite.
    """

    losses: tuple[float | None, ...]
    evaluated: tuple[HeldOutEvaluation, ...]
    best: int
    flat: bool
    skipped: int = 0

    def __repr__(self) -> str:
        loss, num = self.losses[-1] if self.losses else None, len(self.evaluated)
        return f"TrainingHistory(steps={len(self.losses)}, loss={loss}, evaluations={num}; see .losses and .evaluated)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The result of a job, without its parameters.

    Attributes:
        trained: Losses and evaluations.
        mesh: The job's mesh.
        num_ranks: Number of ranks.
        train_s: Seconds of training.
        units_per_second: Tokens or samples a second of all ranks, from the second step on.
        peak_memory_bytes: Highest memory use of any rank, on its GPU if it has one.
        device: Device type of the ranks, ``cpu`` or ``cuda``.
        stopped: Whether the job was stopped by a signal; it has saved its state then.
        layer_times: Layer times that a pipeline was split by; empty for an even split.
        stage_times: Sum of the layer times of each stage; empty for an even split.
        bytes_by_axis: Payload that the first rank sends in a step, as counted; None if it was not counted.
        predicted_bytes_by_axis: The planner's prediction of it; None if the planner has no formula for the job.
        skipped_checkpoints: Faults of the damaged checkpoints that were skipped on resume.
        lost_history: Reason why the losses and evaluations before the resume are unknown; empty if they are known.
    """

    trained: TrainingHistory
    mesh: MeshShape
    num_ranks: int
    train_s: float
    units_per_second: float
    peak_memory_bytes: int
    device: str = "cpu"
    stopped: bool = False
    layer_times: tuple[float, ...] = field(default=(), repr=False)
    stage_times: tuple[float, ...] = ()
    bytes_by_axis: Mapping[str, int] | None = None
    predicted_bytes_by_axis: Mapping[str, int] | None = None
    skipped_checkpoints: tuple[str, ...] = ()
    lost_history: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of a model's inputs, each layer and the outputs, in any unit."""

    layer_times: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a job: metrics, and an App's final parameters (num_values,) in the table's layout.

    Other models' parameters stay in their checkpoints, because they may not fit in one process.

    Attributes:
        metrics: The metrics.
        table: Table of the parameters; None if the model is no App.
        parameters: The parameters; None if the model is no App.
        failure: Error of an observer after the last step; empty if there is none. The result is complete, and is
            written before the error is.
    """

    metrics: Metrics
    table: TensorTable | None = field(default=None, repr=False)
    parameters: Float32s | None = field(default=None, repr=False)
    failure: str = ""


def write_config(config: TrainConfig, folder: Path, *, shared: bool = False) -> Path:
    """Write the config into the job's folder and return its path.

    If several machines share the folder (``shared``), the file's name includes its digest. A machine with a mistyped
    config then cannot overwrite the others' config.
    """
    data = _encoded({"config": row_of(config)})
    path = folder / (f"config-{sha256(data).hexdigest()[:DIGEST_CHARS]}.json" if shared else CONFIG_FILE)
    write_file(path, data)
    return path


def read_config(path: Path) -> TrainConfig:
    """Return the config in a file. Raises InvalidInput."""
    return record_of(TrainConfig, _read_json(path).get("config"), str(path))


def machine_name() -> str:
    """Return a name for this process that is unique among the machines that share a folder."""
    return f"{socket.gethostname()}-{os.getpid()}"


def clear(folder: Path) -> None:
    """Remove the result of an earlier job or attempt, so that it is not mistaken for this one's."""
    for name in (METRICS_FILE, PARAMETERS_FILE, ERROR_FILE):
        (folder / name).unlink(missing_ok=True)


def write_result(folder: Path, result: TrainResult) -> None:
    """Write the parameters, and then the metrics: if the metrics exist, both files are complete."""
    if result.table is not None and result.parameters is not None:
        write_file(folder / PARAMETERS_FILE, encode_parameters(result.table, result.parameters))
    _write_json(folder / METRICS_FILE, {"metrics": row_of(result.metrics)})


def read_result(folder: Path) -> TrainResult:
    """Return the result in a job's folder. Raises InvalidInput if it is incomplete."""
    path = folder / METRICS_FILE
    metrics = record_of(Metrics, _read_json(path).get("metrics"), str(path))
    if not (folder / PARAMETERS_FILE).exists():
        return TrainResult(metrics=metrics)
    table, parameters = read_parameters(folder / PARAMETERS_FILE)
    return TrainResult(metrics=metrics, table=table, parameters=parameters)


def write_layer_times(folder: Path, times: tuple[float, ...]) -> None:
    """Store the measured layer times for the jobs that resume from this folder."""
    _write_json(folder / LAYER_TIMES_FILE, {"measured": row_of(LayerTimes(layer_times=times))})


def read_layer_times(folder: Path) -> tuple[float, ...]:
    """Return the layer times stored in a folder; empty if none were measured. Raises InvalidInput."""
    path = folder / LAYER_TIMES_FILE
    return record_of(LayerTimes, _read_json(path).get("measured"), str(path)).layer_times if path.exists() else ()


def write_error(folder: Path, error: FaninError) -> None:
    """Store the error of a job, unless there is an earlier one.

    A rank stores its error before it closes its connections. The errors of the ranks that lose it are later ones.
    """
    if ERROR_FILE not in {name for name, _ in outcome_files(folder)}:
        _write_json(folder / ERROR_FILE, {"error": kind_name(error), "message": str(error), "code": error.code})


def is_complete(new: set[tuple[str, int]]) -> bool:
    """Return whether the outcome files that a job has written are those of a job without an error.

    A job that completes and then has an error writes the metrics first. An error before them is one of a machine that
    the job has lost.
    """
    last = max(new, key=lambda file: (file[1], file[0] == ERROR_FILE), default=("", 0))
    return last[0] == METRICS_FILE


def outcome_files(folder: Path) -> set[tuple[str, int]]:
    """Return (name, modification time in ns) of the outcome files that exist: metrics.json and error.json."""
    files = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # NFS caches that a name does not exist until the folder is listed.
        list(folder.iterdir())
    for name in (METRICS_FILE, ERROR_FILE):
        # The first rank may remove a file at any time, possibly on another machine.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files.add((name, (folder / name).stat().st_mtime_ns))
    return files


def read_error(folder: Path) -> FaninError | None:
    """Return the error that a job stored; None if there is none."""
    if ERROR_FILE not in {name for name, _ in outcome_files(folder)}:
        return None
    row = _read_json(folder / ERROR_FILE)
    return error_named(str(row.get("error")), str(row.get("message")), str(row.get("code")))


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably. Ranks of several machines may write it at the same time."""
    replace_file(path, data, writer=machine_name())


def _write_json(path: Path, row: Mapping[str, object]) -> None:
    write_file(path, _encoded(row))


def _encoded(row: Mapping[str, object]) -> bytes:
    return json.dumps({"format": FORMAT, **row}, indent=1, allow_nan=False).encode() + b"\n"


def _read_json(path: Path) -> dict[str, object]:
    try:
        row = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})", code="FN-1352") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})", code="FN-1352") from exc
    if not isinstance(row, dict):
        raise InvalidInput(f"{path}: got {type(row).__name__}, expected an object", code="FN-1352")
    if row.get("format") != FORMAT:
        raise InvalidInput(f"{path}: got format {row.get('format')!r}, expected {FORMAT}", code="FN-1352")
    return row

"""What goes into a datacenter job and what comes out: the files between ``launch`` and the ranks of ``job``.

A job has one folder::

    config.json         what to train (TrainConfig); of several machines, with its digest in its name
    parameters.bin      what an App's model ended with, canonical bytes
    metrics.json        what happened; written last, so where it stands the job is complete
    error.json          why there is none: one of our own errors, by name
    rows.jsonl          a line a step, by the first rank
    logs/               what torchrun and its ranks wrote; of several machines, a folder for each
    lock                keeps other jobs of one machine out; there is one beside the checkpoints, too

and beside its checkpoints::

    layer-times.json    by what its pipeline is cut, where that was measured

Each file is written aside and renamed into place, and nothing is pickled. Several machines share the folder. None of
them removes what is there, since it may be another's: the first rank does, before it joins the others.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from fanin.datacenter.jobs.config import TrainConfig
from fanin.datacenter.jobs.records import record_of, row_of
from fanin.datacenter.parallel.mesh import MeshShape
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters, encode_parameters
from fanin.protos.errors import FaninError, InvalidInput, error_named

FORMAT: Final = 2
CONFIG_FILE: Final = "config.json"
DIGEST_CHARS: Final = 16
PARAMETERS_FILE: Final = "parameters.bin"
METRICS_FILE: Final = "metrics.json"
ERROR_FILE: Final = "error.json"
ROWS_FILE: Final = "rows.jsonl"
LAYER_TIMES_FILE: Final = "layer-times.json"
MACHINES: Final = "--machines"
"""What the ranks' program is told before its config if they are on several machines."""
LOGS_FOLDER: Final = "logs"
THREADS: Final = "OMP_NUM_THREADS"
"""Threads of each rank on the CPU, in its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the held-out part said after ``step`` steps, in epoch ``epoch`` (from 0).

    Losses are means over tokens or samples; ``train_loss`` is that of the steps since the last evaluation, each taken
    before its step. ``accuracy`` is of labels or tokens; a model of values has 0.
    """

    step: int
    epoch: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The loss before each step, all evaluations, and the number (from 1) of the one with the best loss.

    A loss is None where it is not finite. ``flat``: training stopped because the validation loss was flat, not at the
    limit. ``skipped``: steps that were left out, since their loss or gradients were not finite.
    """

    losses: tuple[float | None, ...]
    evaluated: tuple[Evaluated, ...]
    best: int
    flat: bool
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """How a job went.

    ``device``: ``cpu`` or ``cuda``, what its ranks computed on. ``units_per_second``: tokens or samples that steps
    took, from the second step on, of all ranks. ``peak_memory_bytes``: of the rank that took most, of its GPU where it
    has one. ``layer_times``: by what a pipeline was cut, and ``stage_times`` what that makes of each stage; empty where
    layers were dealt out evenly. ``stopped``: it was told to stop, and has saved what it came to. ``bytes_by_axis``:
    payload that the first rank sends in a step, as counted, and as the planner has it; None where it was not counted,
    or the planner has no formula. ``skipped_checkpoints``: what was wrong with each damaged checkpoint that the job did
    not resume from.
    """

    trained: Trained
    mesh: MeshShape
    num_ranks: int
    train_s: float
    units_per_second: float
    peak_memory_bytes: int
    device: str = "cpu"
    stopped: bool = False
    layer_times: tuple[float, ...] = ()
    stage_times: tuple[float, ...] = ()
    bytes_by_axis: Mapping[str, int] | None = None
    predicted_bytes_by_axis: Mapping[str, int] | None = None
    skipped_checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds, or any unit, of a model's inputs, each layer and the outputs."""

    layer_times: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a job brought: how it came to it, and an App's parameters (num_values,) in the table's layout.

    A decoder's parameters stay in its checkpoints: they may not fit in one process.
    """

    metrics: Metrics
    table: TensorTable | None = None
    parameters: Float32s | None = None


def write_config(config: TrainConfig, folder: Path, *, shared: bool = False) -> Path:
    """Write ``config.json`` into the job's folder; returns its path.

    Machines that share the folder (``shared``) name it by its digest: one that was mistyped takes no other's place.
    """
    data = _encoded({"config": row_of(config)})
    path = folder / (f"config-{sha256(data).hexdigest()[:DIGEST_CHARS]}.json" if shared else CONFIG_FILE)
    write_file(path, data)
    return path


def read_config(path: Path) -> TrainConfig:
    """The config in a file. Raises InvalidInput."""
    return record_of(TrainConfig, _read_json(path).get("config"), str(path))


def machine_name() -> str:
    """What this process is called among those of other machines in the same folder."""
    return f"{socket.gethostname()}-{os.getpid()}"


def clear(folder: Path) -> None:
    """Remove what an earlier job, or attempt, came to: it must not pass for this one's."""
    for name in (METRICS_FILE, PARAMETERS_FILE, ERROR_FILE):
        (folder / name).unlink(missing_ok=True)


def write_result(folder: Path, result: TrainResult) -> None:
    """Write parameters and then metrics: where the metrics stand, both are whole."""
    if result.table is not None and result.parameters is not None:
        write_file(folder / PARAMETERS_FILE, encode_parameters(result.table, result.parameters))
    _write_json(folder / METRICS_FILE, {"metrics": row_of(result.metrics)})


def read_result(folder: Path) -> TrainResult:
    """What a job left in its folder. Raises InvalidInput if it is not complete."""
    path = folder / METRICS_FILE
    metrics = record_of(Metrics, _read_json(path).get("metrics"), str(path))
    if not (folder / PARAMETERS_FILE).exists():
        return TrainResult(metrics=metrics)
    table, parameters = read_parameters(folder / PARAMETERS_FILE)
    return TrainResult(metrics=metrics, table=table, parameters=parameters)


def read_parameters(path: Path) -> tuple[TensorTable, Float32s]:
    """Table and vector (num_values,) in a file of canonical bytes. Raises InvalidInput."""
    try:
        return decode_parameters(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})") from exc
    except InvalidInput as exc:
        raise InvalidInput(f"{path}: {exc}") from exc


def write_layer_times(folder: Path, times: tuple[float, ...]) -> None:
    """Keep by what a pipeline is cut, for those that go on from this folder."""
    _write_json(folder / LAYER_TIMES_FILE, {"measured": row_of(LayerTimes(layer_times=times))})


def read_layer_times(folder: Path) -> tuple[float, ...]:
    """By what the pipeline of a folder's checkpoints is cut; empty if nobody has measured. Raises InvalidInput."""
    path = folder / LAYER_TIMES_FILE
    return record_of(LayerTimes, _read_json(path).get("measured"), str(path)).layer_times if path.exists() else ()


def write_error(folder: Path, error: FaninError) -> None:
    """Leave word why there is no result; of several ranks the last one's stays, and all say the same."""
    _write_json(folder / ERROR_FILE, {"error": type(error).__name__, "message": str(error)})


def written(folder: Path) -> set[tuple[str, int]]:
    """Which of the files that say how a job ended are there, and when they were written."""
    found = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # NFS remembers that a name was not there, until its folder is listed.
        list(folder.iterdir())
    for name in (METRICS_FILE, ERROR_FILE):
        # Of several machines, another's first rank may remove it at any moment.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.add((name, (folder / name).stat().st_mtime_ns))
    return found


def read_error(folder: Path) -> FaninError | None:
    """The error that a job left, rebuilt; None if it left none."""
    if ERROR_FILE not in {name for name, _ in written(folder)}:
        return None
    row = _read_json(folder / ERROR_FILE)
    return error_named(str(row.get("error")), str(row.get("message")))


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f"{path.name}.{machine_name()}.new")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write_json(path: Path, row: Mapping[str, object]) -> None:
    write_file(path, _encoded(row))


def _encoded(row: Mapping[str, object]) -> bytes:
    return json.dumps({"format": FORMAT, **row}, indent=1, allow_nan=False).encode() + b"\n"


def _read_json(path: Path) -> dict[str, object]:
    try:
        row = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})") from exc
    if not isinstance(row, dict):
        raise InvalidInput(f"{path}: got {type(row).__name__}, expected an object")
    if row.get("format") != FORMAT:
        raise InvalidInput(f"{path}: got format {row.get('format')!r}, expected {FORMAT}")
    return row

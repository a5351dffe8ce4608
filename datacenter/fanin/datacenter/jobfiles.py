"""What goes into a datacenter job and what comes out: the files between ``launch`` and the ranks of ``job``.

A job has one folder::

    config.json         what to train (TrainConfig)
    parameters.bin      the best parameters, canonical bytes
    metrics.json        what happened; written last, so where it stands the job is complete
    error.json          why there is none: one of our own errors, by name
    logs/               what torchrun and its ranks wrote

Each file is written aside and renamed into place, and nothing is pickled. This module needs no torch.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from fanin.edge.tensors import Float32s, TensorTable, decode_parameters, encode_parameters
from fanin.protos.errors import FaninError, InvalidInput, error_named

FORMAT: Final = 1
CONFIG_FILE: Final = "config.json"
PARAMETERS_FILE: Final = "parameters.bin"
METRICS_FILE: Final = "metrics.json"
ERROR_FILE: Final = "error.json"
LOGS_FOLDER: Final = "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How to train. ``batch_size`` is global; flat means ``patience`` epochs without a gain of ``min_delta``."""

    learning_rate: float
    batch_size: int = 16
    momentum: float = 0.9
    max_epochs: int = 100
    patience: int = 15
    min_delta: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("max_epochs", 1), ("patience", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise InvalidInput(f"training: got {name} {getattr(self, name)}, expected at least {low}")
        if not 0.0 < self.learning_rate < math.inf:
            raise InvalidInput(f"training: got learning_rate {self.learning_rate}, expected a positive number")
        if not 0.0 <= self.momentum < 1.0:
            raise InvalidInput(f"training: got momentum {self.momentum}, expected 0.0 to below 1.0")
        if not 0.0 <= self.min_delta < math.inf:
            raise InvalidInput(f"training: got min_delta {self.min_delta}, expected 0.0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train, and in which folder.

    ``app`` is found as ``fanin.edge.export.load_app`` finds it; ``data`` is an .npz file with arrays x and y, of
    which ``num_validation`` are held out; ``initial`` (canonical bytes) replaces the App's own parameters;
    ``dp_replicate`` is the number of copies of the model, None for as many as there are processes.
    """

    app: str
    data: Path
    num_validation: int
    training: TrainSettings
    folder: Path
    initial: Path | None = None
    dp_replicate: int | None = None

    def __post_init__(self) -> None:
        if self.num_validation < 1:
            raise InvalidInput(f"training: got num_validation {self.num_validation}, expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch ended with; losses are means over samples."""

    train_loss: float
    validation_loss: float
    validation_accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """All epochs, and the number (from 1) of the one whose parameters are kept.

    ``flat``: training stopped because the validation loss was flat, not at the limit.
    """

    epochs: tuple[Epoch, ...]
    best_epoch: int
    flat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a job brought: parameters (num_values,) in the table's layout, and how it came to them."""

    table: TensorTable
    parameters: Float32s
    trained: Trained
    num_ranks: int
    train_s: float


def write_config(config: TrainConfig) -> Path:
    """Write ``config.json`` into the job's folder; returns its path."""
    path = config.folder / CONFIG_FILE
    _write_json(path, {"format": FORMAT, **asdict(config)})
    return path


def read_config(path: Path) -> TrainConfig:
    """The config in a file. Raises InvalidInput."""
    row = _read_json(path)
    row.only({"format", *(field.name for field in fields(TrainConfig))})
    training = row.child("training")
    training.only({field.name for field in fields(TrainSettings)})
    initial, replicate = row.get("initial"), row.get("dp_replicate")
    return TrainConfig(
        app=row.text("app"),
        data=Path(row.text("data")),
        num_validation=row.integer("num_validation"),
        training=TrainSettings(
            learning_rate=training.number("learning_rate"),
            batch_size=training.integer("batch_size"),
            momentum=training.number("momentum"),
            max_epochs=training.integer("max_epochs"),
            patience=training.integer("patience"),
            min_delta=training.number("min_delta"),
            seed=training.integer("seed"),
        ),
        folder=Path(row.text("folder")),
        initial=None if initial is None else Path(row.text("initial")),
        dp_replicate=None if replicate is None else row.integer("dp_replicate"),
    )


def write_result(folder: Path, result: TrainResult) -> None:
    """Write parameters and then metrics: where the metrics stand, both are whole."""
    write_file(folder / PARAMETERS_FILE, encode_parameters(result.table, result.parameters))
    row = {"format": FORMAT, "num_ranks": result.num_ranks, "train_s": result.train_s, **asdict(result.trained)}
    _write_json(folder / METRICS_FILE, row)


def read_result(folder: Path) -> TrainResult:
    """What a job left in its folder. Raises InvalidInput if it is not complete."""
    row = _read_json(folder / METRICS_FILE)
    row.only({"format", "num_ranks", "train_s", "epochs", "best_epoch", "flat"})
    table, parameters = read_parameters(folder / PARAMETERS_FILE)
    trained = Trained(
        epochs=tuple(
            Epoch(
                train_loss=epoch.number("train_loss"),
                validation_loss=epoch.number("validation_loss"),
                validation_accuracy=epoch.number("validation_accuracy"),
            )
            for epoch in row.children("epochs")
        ),
        best_epoch=row.integer("best_epoch"),
        flat=row.flag("flat"),
    )
    return TrainResult(
        table=table,
        parameters=parameters,
        trained=trained,
        num_ranks=row.integer("num_ranks"),
        train_s=row.number("train_s"),
    )


def read_parameters(path: Path) -> tuple[TensorTable, Float32s]:
    """Table and vector (num_values,) in a file of canonical bytes. Raises InvalidInput."""
    try:
        return decode_parameters(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})") from exc
    except InvalidInput as exc:
        raise InvalidInput(f"{path}: {exc}") from exc


def write_error(folder: Path, error: FaninError) -> None:
    """Leave word why there is no result; of several ranks the last one's stays, and all say the same."""
    _write_json(folder / ERROR_FILE, {"format": FORMAT, "error": type(error).__name__, "message": str(error)})


def read_error(folder: Path) -> FaninError | None:
    """The error that a job left, rebuilt; None if it left none."""
    if not (folder / ERROR_FILE).exists():
        return None
    row = _read_json(folder / ERROR_FILE)
    row.only({"format", "error", "message"})
    return error_named(row.text("error"), row.text("message"))


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write_json(path: Path, row: Mapping[str, object]) -> None:
    write_file(path, json.dumps(row, indent=1, default=str).encode() + b"\n")


def _read_json(path: Path) -> "_Row":
    try:
        row = _Row(json.loads(path.read_bytes()), str(path))
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})") from exc
    if row.get("format") != FORMAT:
        raise InvalidInput(f"{path}: got format {row.get('format')!r}, expected {FORMAT}")
    return row


class _Row:
    """One JSON object and where it stands, read key by key with one clear error each."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(f"{where}: got {type(value).__name__}, expected an object")
        self._row: dict[str, object] = value
        self._where = where

    def only(self, keys: set[str]) -> None:
        got = set(self._row)
        if got != keys:
            raise InvalidInput(f"{self._where}: got unknown keys {sorted(got - keys)}, missing {sorted(keys - got)}")

    def get(self, key: str) -> object:
        return self._row.get(key)

    def text(self, key: str) -> str:
        return str(self._value(key, str))

    def integer(self, key: str) -> int:
        value = self._value(key, int)
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self._value(key, int, float)
        assert isinstance(value, int | float)
        return float(value)

    def flag(self, key: str) -> bool:
        return bool(self._value(key, bool))

    def child(self, key: str) -> "_Row":
        return _Row(self._row[key], f"{self._where}: {key}")

    def children(self, key: str) -> list["_Row"]:
        value = self._value(key, list)
        assert isinstance(value, list)
        return [_Row(row, f"{self._where}: {key}[{index}]") for index, row in enumerate(value)]

    def _value(self, key: str, *kinds: type) -> object:
        value = self._row[key]
        # A bool is an int to isinstance, but not to whoever wrote the file.
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidInput(f"{self._where}: {key}: got {value!r}, expected {expected}")
        return value

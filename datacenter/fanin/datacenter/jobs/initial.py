"""The values that a job starts from: a checkpoint, a file with weights, or a seed.

With several ranks the model has no values until ``build_engine`` has split it. The first rank then decides for all:

1. If there is a checkpoint to resume from, no other file is read.
2. If the job names a safetensors file or a folder with weights, each rank reads its slices of it.
3. Otherwise the first rank writes the seed file into the job's folder, and each rank reads its slices of this file. A
   job that restarts before its first checkpoint uses the file again.

An App's buffers, such as running statistics or tables, are not in these files. The first rank has called the App's
function with values, and sends the buffers to all.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.checkpoints.seeds import is_seed_file, write_seed_file
from fanin.datacenter.checkpoints.weights import import_weights
from fanin.datacenter.config.records import row_of
from fanin.datacenter.config.settings import FLAT, SAFETENSORS
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.folders import check_folder
from fanin.datacenter.files.jobfiles import DIGEST_CHARS, SEED_FILE, write_file
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.transforms.meta import drop_values
from fanin.datacenter.ranks.first import on_first_rank
from fanin.datacenter.training.model import JobModel
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos.errors import InvalidInput

SEED_FORMAT: Final = 1
CANONICAL: Final = ".bin"
InitialParameters = Mapping[str, Float32s] | Float32s
"""Parameters of a caller: arrays by name, or one flat array in the order of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """The source of a job's initial parameters.

    Attributes:
        path: A file, or the index of several; None if the engine has the values, or loads them from a checkpoint.
        aside: Patterns for names of further tensors in the file, which are ignored.
        cast: Whether to convert other floating-point dtypes.
    """

    path: Path | None = None
    aside: tuple[str, ...] = ()
    cast: bool = False

    def load(self, engine: Engine) -> None:
        """Load this rank's slices. A collective. Raises InvalidInput if the file does not fit the model."""
        if self.path is not None:
            import_weights(engine, self.path, self.aside, cast=self.cast)


def write_initial(config: TrainConfig, values: InitialParameters, folder: Path) -> TrainConfig:
    """Write a caller's parameters into the job's folder, and return the job that starts from this file.

    Its name has its digest, so several machines write the same file.

    Raises:
        InvalidInput: The values are no float32 arrays, the job has other initial parameters, or the folder cannot be
            written.
    """
    if config.model.initial is not None:
        raise InvalidInput(
            f"initial: got parameters, and [model] initial {config.model.initial}, expected one of them; leave one out",
            code="FN-1224",
        )
    data, suffix = _file_of(values)
    check_folder(folder, f"datacenter job: got folder {folder}", create=True)
    path = folder / f"initial-{hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]}{suffix}"
    write_file(path, data)
    return replace(config, model=replace(config.model, initial=path))


def _file_of(values: InitialParameters) -> tuple[bytes, str]:
    """Return the content and the suffix of a file with a caller's parameters. Raises InvalidInput."""
    arrays = {name: np.asarray(each) for name, each in values.items()} if isinstance(values, Mapping) else {}
    flat = np.empty(0, np.float32) if isinstance(values, Mapping) else np.asarray(values)
    for name, array in {**arrays, "the array": flat}.items():
        if array.dtype != np.float32:
            raise InvalidInput(
                f"initial: got {name} of {array.dtype}, expected float32 arrays; convert it", code="FN-1310"
            )
    if not isinstance(values, Mapping):
        if flat.ndim != 1:
            raise InvalidInput(
                f"initial: got an array {list(flat.shape)}, expected a flat one, or arrays by name", code="FN-1310"
            )
        buffer = BytesIO()
        np.save(buffer, flat, allow_pickle=False)
        return buffer.getvalue(), FLAT
    try:
        table = TensorTable.of({name: array.shape for name, array in arrays.items()})
    except (TypeError, ValueError) as exc:
        raise InvalidInput(f"initial: {exc}", code="FN-1310") from exc
    return encode_parameters(table, table.flatten(arrays)), CANONICAL


def initial_values(config: TrainConfig, job: JobModel, num_ranks: int, folder: Path | None) -> InitialValues:
    """Return the source of a job's initial parameters, and write the seed file if the job needs it. A collective.

    Afterwards no rank of several has the values of the job's module. Every rank has the first rank's buffers of an App.

    Args:
        config: The job.
        job: Its model, before an engine is built from it.
        num_ranks: Number of ranks.
        folder: The job's folder.

    Raises:
        InvalidInput: There is no folder for the seed file, or it has a file of another job.
        StorageFull: The seed file could not be written.
    """
    spread, module = num_ranks > 1, job.model.module

    def decide(alive: Callable[[], None]) -> tuple[InitialValues, dict[str, Tensor]]:
        values = _values(config, job, alive, _seed_file(folder) if spread else None)
        return values, dict(module.named_buffers()) if spread and job.app is not None else {}

    values, buffers = on_first_rank(decide)
    if spread:
        drop_values(module)
        if job.app is not None:
            drop_values(job.app.module)
        _load_buffers(module, buffers)
    return values


def _seed_file(folder: Path | None) -> Path:
    if folder is None:
        raise InvalidInput(
            "datacenter job: got several ranks and no folder, expected one that all of them share, because the first "
            "rank writes the initial parameters into it; pass the job's folder",
            code="FN-1320",
        )
    return folder / SEED_FILE


def _values(config: TrainConfig, job: JobModel, alive: Callable[[], None], seed_file: Path | None) -> InitialValues:
    """Return the source of the values. Write the seed file if it is the source and does not exist."""
    checkpoints, initial = config.checkpoints, config.model.initial
    if any(each is not None and (each / MARKER).exists() for each in (checkpoints.folder, checkpoints.resume)):
        return InitialValues()
    if initial is not None and initial.suffix == SAFETENSORS:
        return InitialValues(path=initial, cast=config.parallel.precision == "double")
    if job.files.weights is not None:
        return InitialValues(path=job.files.weights, aside=job.files.aside, cast=True)
    if seed_file is None:
        return InitialValues()
    digest = seed_digest(config, job)
    if not is_seed_file(seed_file, digest):
        write_seed_file(seed_file, job.start, digest, alive)
    return InitialValues(path=seed_file)


def seed_digest(config: TrainConfig, job: JobModel) -> str:
    """Return the digest of everything that decides a job's initial parameters, except for code outside of an App."""
    settings, exported = replace(config.model, layout=None), job.files.exported
    initial = settings.initial
    row = {
        "format": SEED_FORMAT,
        "model": row_of(settings),
        "seed": config.seed,
        "double": config.parallel.precision == "double",
        "torch": torch.__version__,
        "app": _file_digest(_source_of(settings.app)) if settings.app else "",
        "initial": "" if initial is None else _file_digest(initial),
        "pretrained": "" if exported is None else hashlib.sha256(exported).hexdigest(),
    }
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _source_of(reference: str) -> Path:
    """Return the file of an App that is loaded."""
    source = reference.rpartition(":")[0]
    return Path(source if source.endswith(".py") else str(sys.modules[source].__file__))


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})", code="FN-1313") from exc


@torch.no_grad()
def _load_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the first rank's buffers. Raises InvalidInput if this rank has others."""
    own = dict(module.named_buffers())
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            shape = list(own[name].shape) if name in own else "none"
            raise InvalidInput(
                f"App: got the buffer {name} {list(value.shape)} on the first rank and {shape} on this one, expected "
                "the same; the App's function must build the same module on every rank",
                code="FN-1307",
            )
        own[name].copy_(value)

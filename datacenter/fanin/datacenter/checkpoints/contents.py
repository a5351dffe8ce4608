"""Contents of one checkpoint: its index, the checks of its tensors, and the errors of writing it.

``checkpoint`` decides when these functions run, and shares their results among the ranks.
"""

import pickle
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fanin.datacenter.checkpoints.named_state import MODEL, OPTIMIZER, entries
from fanin.datacenter.checkpoints.progress import describe_latest
from fanin.datacenter.parallel.engine import Engine
from fanin.edge.tensors import count_differences
from fanin.protos.errors import Corrupted, Diverged, InvalidInput, StorageFull
from fanin.protos.texts import counted

INDEX_FILE: Final = ".metadata"
"""DCP's index, which the first rank writes."""
TensorShapes = dict[str, torch.Size | None]
"""Global shape of each tensor, by its name in a checkpoint; None for a value that is not a tensor."""


def prepare_folder(path: Path) -> OSError | None:
    """Create a checkpoint's folder, without the files of an interrupted save; return the error if that fails."""
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    except OSError as exc:
        return exc
    return None


def storage_error(path: Path, failure: BaseException) -> StorageFull:
    """Return the error of a checkpoint that could not be written."""
    remaining = describe_latest(path.parent)
    error = StorageFull(
        f"{path}: the checkpoint could not be written ({failure_cause(failure)}); {remaining}", code="FN-1332"
    )
    error.__cause__ = failure
    return error


@torch.no_grad()
def check_finite(path: Path, engine: Engine) -> Diverged | None:
    """Return an error if a trained value of this rank is not finite, since the job must not resume from such values.

    Frozen parameters and buffers are not checked: they may hold infinities on purpose, such as those of a mask.
    """
    trained = (
        entry
        for part in engine.parts.values()
        for name, value in part.named_parameters()
        if value.requires_grad
        for entry in entries(engine, name, value)
    )
    local = ((name, value.to_local() if isinstance(value, DTensor) else value) for name, value in trained)
    finite = [(name, value.isfinite().all()) for name, value in local]
    broken = next((name for name, each in finite if not each), None)
    if broken is None:
        return None
    return Diverged(
        f"{path}: got {broken} with values that are not finite, expected finite ones; nothing is saved, and "
        f"{describe_latest(path.parent)}; run the job again with a lower learning rate or a clip_norm",
        code="FN-1335",
    )


def read_index(path: Path) -> TensorShapes:
    """Return the names and shapes in a checkpoint. Raises Corrupted. Compare the index's digest before you call it."""
    return {
        name: entry.size if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in _read_entries(path).items()
    }


def read_floats(path: Path) -> dict[str, torch.Size]:
    """Return the names and shapes of the floating-point tensors in a checkpoint, as ``read_index`` does."""
    return {
        name: entry.size
        for name, entry in _read_entries(path).items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype.is_floating_point
    }


def _read_entries(path: Path) -> Mapping[str, object]:
    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError) as exc:
        raise Corrupted(f"{path}: its index cannot be read ({type(exc).__name__}: {exc})", code="FN-1336") from exc


def check_shapes(path: Path, stored: TensorShapes, expected: TensorShapes, frozen: Collection[str]) -> None:
    """Raise InvalidInput unless a checkpoint has exactly the expected tensors. The error names the key that changed.

    DCP ignores additional tensors, and reports missing ones only on the ranks that need them.

    Args:
        path: The checkpoint.
        stored: Its tensors.
        expected: The tensors of the job.
        frozen: The names of the parameters that the job does not train.
    """
    missing, unknown = set(expected) - set(stored), set(stored) - set(expected)
    wrong = {name for name in set(stored) & set(expected) if stored[name] != expected[name]}
    differing = missing | unknown | wrong
    if not differing:
        return
    new_start = "start a new job from its weights ([model] initial)"
    trained = {name.rpartition(".")[0].removeprefix(f"{OPTIMIZER}.") for name in differing}
    if any(name.startswith(f"{MODEL}.") for name in differing):
        text = (
            f"got {counted(len(stored), 'tensor')}: {count_differences(unknown, wrong, missing)}, such as "
            f"{min(differing)}; expected a checkpoint of the same model; name another folder in [checkpoints], or "
            "correct the model"
        )
    elif trained <= set(frozen):
        text = (
            f"[training] freeze: got patterns that exclude {counted(len(trained), 'parameter')}, such as "
            f"{min(trained)}, which the job of this checkpoint trained; expected its patterns; remove them, or "
            f"{new_start}"
        )
    else:
        keys = sorted({name.rpartition(".")[2] for name in unknown} or {"none"})
        text = (
            f"[training] optimizer, momentum: got settings of another optimizer state than that of {min(trained)} "
            f"({', '.join(keys)}), expected those of the job of this checkpoint; restore them, or {new_start}"
        )
    raise InvalidInput(f"{path}: {text}", code="FN-1340")


def failure_cause(error: BaseException) -> str:
    """Return an error's message; of a DCP error the first rank's message, without DCP's traceback."""
    if isinstance(error, CheckpointException):
        return next((f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()), "no reason given")
    return str(error)

"""The trained values that a job has left, by name: from a checkpoint, from a folder or from a file.

| path | values |
|---|---|
| folder of checkpoints | those of the checkpoint that LATEST names |
| one checkpoint | its own |
| folder of ``fanin train --state`` or ``fanin fetch`` | ``parameters.bin``, ``parameters`` |
| folder of weights | ``model.safetensors``, or the files of its index |
| file | canonical bytes, an .npz archive, a .safetensors file or an index |

A checkpoint also has buffers and parameters that did not train. They have no state of the optimizer.
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from fanin.datacenter.checkpoints.contents import INDEX_FILE, failure_cause, read_floats
from fanin.datacenter.checkpoints.integrity import faults_of
from fanin.datacenter.checkpoints.named_state import MODEL, OPTIMIZER
from fanin.datacenter.checkpoints.progress import (
    FOLDER_NAME,
    MARKER,
    checkpoint_steps,
    folder_name,
    marked_step,
    read_digests,
)
from fanin.datacenter.checkpoints.weights import INDEX_SUFFIX, SUFFIX, read_weights
from fanin.datacenter.files.jobfiles import PARAMETERS_FILE
from fanin.edge.parameter_files import read_parameters
from fanin.edge.tensors import Float32s
from fanin.protos.errors import Corrupted, InvalidInput

FILES: Final = (PARAMETERS_FILE, "parameters", f"model{SUFFIX}", f"model{SUFFIX}.index{INDEX_SUFFIX}")
"""Files of a folder that is no checkpoint, in the order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedValues:
    """Trained values, by name.

    Attributes:
        source: The checkpoint or the file.
        tensors: The values. Running statistics are among them, except in a .safetensors file.
        aside: Names of values that belong to the module but may not train: buffers, and frozen parameters.
    """

    source: Path
    tensors: Mapping[str, Float32s]
    aside: frozenset[str] = frozenset()

    def of_model(self, names: Collection[str]) -> dict[str, Float32s]:
        """Return the values that a model with these names must have, without other buffers and frozen parameters."""
        return {name: each for name, each in self.tensors.items() if name in names or name not in self.aside}


def read_trained(path: Path) -> TrainedValues:
    """Return the values that a job has left.

    Raises:
        InvalidInput: There are no such values, or a file has other content.
        Corrupted: The checkpoint is incomplete or damaged.
    """
    if not path.is_dir():
        return _of_file(path)
    if FOLDER_NAME.match(path.resolve().name):
        return _of_checkpoint(path)
    step = marked_step(path)
    if step is not None:
        return _of_checkpoint(path / folder_name(step))
    if steps := checkpoint_steps(path):
        raise Corrupted(
            f"{path}: got checkpoints without {MARKER}, which names the newest complete one; name one of them, such "
            f"as {path / folder_name(steps[-1])}",
            code="FN-1337",
        )
    for name in FILES:
        if (path / name).is_file():
            return _of_file(path / name)
    raise InvalidInput(
        f"{path}: got a folder without parameters, expected checkpoints or one of {', '.join(FILES)}", code="FN-1347"
    )


def _of_checkpoint(path: Path) -> TrainedValues:
    digests = {INDEX_FILE: "a digest", **read_digests(path)}
    # The index is a pickle, so the digests are compared first.
    if faults := faults_of(path, digests, digests):
        raise Corrupted(
            f"{'; '.join(faults)}; name an older checkpoint of the job, or its parameters.bin", code="FN-1336"
        )
    floats = read_floats(path)
    state: dict[str, object] = {
        name: torch.empty(size) for name, size in floats.items() if name.startswith(f"{MODEL}.")
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
            load(state, checkpoint_id=path, no_dist=True)
    except CheckpointException as exc:
        raise Corrupted(f"{path}: cannot be read ({failure_cause(exc)})", code="FN-1336") from exc
    optimized = {
        name.rpartition(".")[0].removeprefix(f"{OPTIMIZER}.") for name in floats if name.startswith(f"{OPTIMIZER}.")
    }
    tensors = {name.removeprefix(f"{MODEL}."): value for name, value in state.items() if isinstance(value, Tensor)}
    return TrainedValues(
        source=path,
        tensors={name: value.numpy() for name, value in tensors.items()},
        # An optimizer without state, such as plain SGD, does not show what trained.
        aside=frozenset(tensors.keys() - optimized if optimized else ()),
    )


def _of_file(path: Path) -> TrainedValues:
    if path.suffix in (SUFFIX, INDEX_SUFFIX):
        weights = read_weights(path)
        return TrainedValues(source=path, tensors={name: np.asarray(each.float()) for name, each in weights.items()})
    table, flat = read_parameters(path)
    return TrainedValues(source=path, tensors=table.views(flat))

"""Named tensors of an engine on one rank, in the form of a checkpoint.

On any mesh, the names are those of one process. A tied weight is stored once, under the original's name.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.transforms.slices import is_misaligned

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"


def state_to_save(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of this rank's share of the state, without the copies of tied weights."""
    copied = None if engine.rank_model.tie is None else engine.rank_model.tie.copied
    for part in engine.parts.values():
        for name, value in _values(part).items():
            if value is not copied:
                yield from entries(engine, name, value)


def state_to_load(engine: Engine, stored: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors to load into, by name.

    Args:
        engine: The engine.
        stored: The names in the checkpoint. It may have no state of the optimizers. A parameter that has never had a
            gradient has no state.
    """
    kept = {name.rpartition(".")[0] for name in stored if name.startswith(f"{OPTIMIZER}.")}
    tie, resumes = engine.rank_model.tie, bool(kept)
    if resumes:
        for part, optimizer in _trained(engine):
            # Allocates the state if no step has done so yet. Its values are about to be overwritten.
            get_optimizer_state_dict(part, optimizer)
            for name, value in _values(part).items():
                stored_name = tie.original_name if tie is not None and value is tie.copied else name
                if f"{OPTIMIZER}.{stored_name}" not in kept:
                    optimizer.state.pop(value, None)
    state = dict(state_to_save(engine))
    if tie is not None and tie.copied is not None and tie.original is None:
        state |= entries(engine, tie.original_name, tie.copied)
    return {name: value for name, value in state.items() if resumes or not name.startswith(f"{OPTIMIZER}.")}


def frozen_names(engine: Engine) -> list[str]:
    """Return the names of the parameters of this rank that do not train."""
    return [
        name for part in engine.parts.values() for name, value in part.named_parameters() if not value.requires_grad
    ]


def copy_ties(engine: Engine) -> None:
    """Copy the original of a tied weight to its copy, if this rank has both."""
    tie = engine.rank_model.tie
    if tie is None or tie.copied is None or tie.original is None:
        return
    ends = [dict(entries(engine, tie.original_name, value)) for value in (tie.original, tie.copied)]
    with torch.no_grad():
        for name, value in ends[1].items():
            value.copy_(ends[0][name])


def entries(engine: Engine, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a parameter or buffer and of its optimizer state."""
    yield f"{MODEL}.{name}", value.detach()
    for optimizer in engine.optimizers:
        for key, entry in optimizer.state.get(value, {}).items():
            if isinstance(entry, Tensor):
                yield f"{OPTIMIZER}.{name}.{key}", entry


def misaligned(state: Mapping[str, Tensor]) -> Iterator[tuple[str, DTensor]]:
    """Yield (name, tensor) of the tensors that torch would slice at the wrong bounds."""
    for name, value in state.items():
        if isinstance(value, DTensor) and is_misaligned(value):
            yield name, value


def _values(part: nn.Module) -> dict[str, Tensor]:
    """Return a part's parameters, each once, and its persistent buffers."""
    persistent = part.state_dict().keys()
    buffers = {name: value for name, value in part.named_buffers() if name in persistent}
    return {**dict(part.named_parameters()), **buffers}


def _trained(engine: Engine) -> Iterator[tuple[nn.Module, Optimizer]]:
    for part in engine.parts.values():
        mine = {id(value) for value in part.parameters()}
        for optimizer in engine.optimizers:
            if any(id(value) in mine for group in optimizer.param_groups for value in group["params"]):
                yield part, optimizer

"""The tensors of an engine on one rank, by the names that they have in a checkpoint.

The names are those of one process, whatever the mesh. A weight that is tied is there once, under the original's name.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fanin.datacenter.checkpoints.slices import is_crooked
from fanin.datacenter.parallel.engine import Engine

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"


def saved(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """What this rank has of the state, by the names of one process: a tied weight's copy is left out."""
    copied = None if engine.rank_model.tie is None else engine.rank_model.tie.copied
    for part in engine.parts.values():
        for name, value in _values(part).items():
            if value is not copied:
                yield from entries(engine, name, value)


def loaded(engine: Engine, *, resumes: bool) -> dict[str, Tensor]:
    """The tensors to load into, by the names in a checkpoint. ``resumes``: the optimizers' state is in it."""
    if resumes:
        for part, optimizer in _trained(engine):
            # Makes the state where no step has made it yet; what is in it is about to be overwritten.
            get_optimizer_state_dict(part, optimizer)
    tie, found = engine.rank_model.tie, dict(saved(engine))
    if tie is not None and tie.copied is not None and tie.original is None:
        found |= entries(engine, tie.original_name, tie.copied)
    return {name: value for name, value in found.items() if resumes or not name.startswith(f"{OPTIMIZER}.")}


def copy_ties(engine: Engine) -> None:
    """Where a rank has both ends of a tied weight, give the copy what the original has been given."""
    tie = engine.rank_model.tie
    if tie is None or tie.copied is None or tie.original is None:
        return
    ends = [dict(entries(engine, tie.original_name, value)) for value in (tie.original, tie.copied)]
    with torch.no_grad():
        for name, value in ends[1].items():
            value.copy_(ends[0][name])


def entries(engine: Engine, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter or buffer and its optimizer's state, by their names in a checkpoint."""
    yield f"{MODEL}.{name}", value.detach()
    for optimizer in engine.optimizers:
        for key, kept in optimizer.state.get(value, {}).items():
            if isinstance(kept, Tensor):
                yield f"{OPTIMIZER}.{name}.{key}", kept


def crooked(state: Mapping[str, Tensor]) -> Iterator[tuple[str, DTensor]]:
    for name, value in state.items():
        if isinstance(value, DTensor) and is_crooked(value):
            yield name, value


def _values(part: nn.Module) -> dict[str, Tensor]:
    """A part's parameters, each once, and the buffers that are kept."""
    kept = part.state_dict().keys()
    buffers = {name: value for name, value in part.named_buffers() if name in kept}
    return {**dict(part.named_parameters()), **buffers}


def _trained(engine: Engine) -> Iterator[tuple[nn.Module, Optimizer]]:
    for part in engine.parts.values():
        mine = {id(value) for value in part.parameters()}
        for optimizer in engine.optimizers:
            if any(id(value) in mine for group in optimizer.param_groups for value in group["params"]):
                yield part, optimizer

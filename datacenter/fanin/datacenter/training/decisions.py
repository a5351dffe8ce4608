"""One verdict for all ranks: whether a training continues after a step.

Each rank has its own observers, and so its own verdict. A rank that ended alone would leave the others waiting in a
collective.
"""

import torch
import torch.distributed as dist

from fanin.datacenter.observers.observer import SEVERITY, Failure, Verdict


def agree(verdict: Verdict | None) -> Verdict | None:
    """Return the strongest verdict of all ranks, and of equal ones that of the first rank. A collective.

    A failure names its rank.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size == 1:
        return verdict
    if isinstance(verdict, Failure):
        verdict = Failure(reason=f"rank {rank}: {verdict.reason}")
    severity = 0 if verdict is None else 1 + SEVERITY.index(type(verdict))
    # One number: a higher severity is larger, and then a lower rank is.
    strongest = torch.tensor(severity * size + size - 1 - rank)
    dist.all_reduce(strongest, dist.ReduceOp.MAX)
    severity, place = divmod(int(strongest), size)
    if not severity:
        return None
    reasons: list[str] = [""] * size
    dist.all_gather_object(reasons, "" if verdict is None else verdict.reason)
    return SEVERITY[severity - 1](reason=reasons[size - 1 - place])

"""How long ranks of a pipeline wait, and how many pieces they keep: the laws of each schedule.

In units of what one rank does for one stage and microbatch, forward and backward; there are ``m * v`` of them for each
rank of p, with v stages each. A forward is taken as a third, gradients of inputs and of weights as a third each. The
laws of GPipe and 1F1B are those of Huang et al. 2019 (arXiv 1811.06965, section 2.3) and Narayanan et al. 2021 (arXiv
2104.04473, section 2.2); those that split the backward pass are of torch's own tables, which differ from the papers'
(Qi et al. 2023, arXiv 2401.10241): a third of a unit for each rank is left.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fanin.datacenter.parallel.pipelines.schedules import Pipeline

THIRD: Final = 1 / 3


def _folded_wait(pipeline: Pipeline) -> float:
    full = pipeline.microbatches >= 2 * pipeline.num_ranks
    return (1 if full else 2) * THIRD


WAITS: Final[Mapping[str, Callable[[Pipeline], float]]] = MappingProxyType(
    {
        "GPipe": lambda pipeline: 1.0,
        "1F1B": lambda pipeline: 1.0,
        "Interleaved1F1B": lambda pipeline: 1.0,
        "LoopedBFS": lambda pipeline: 1.0,
        "InterleavedZeroBubble": lambda pipeline: THIRD,
        "ZBV": _folded_wait,
    }
)
"""Units of waiting for each rank but one."""


def bubble_units(pipeline: Pipeline) -> float:
    """Units that each rank waits in a step: with one stage a rank p - 1, the time of so many microbatches."""
    return (pipeline.num_ranks - 1) * WAITS[pipeline.schedule](pipeline)


def bubble_share(pipeline: Pipeline) -> float:
    """The share of a step in which a rank waits, 0.0 to 1.0: (p - 1) / (m + p - 1) for GPipe and 1F1B."""
    waiting = bubble_units(pipeline)
    return waiting / (waiting + pipeline.microbatches * pipeline.stages_per_rank)


def live_pieces(pipeline: Pipeline, rank: int) -> int:
    """Of how many stages and microbatches a rank keeps activations at once, at most."""
    ranks, stages, all_pieces = (
        pipeline.num_ranks,
        pipeline.stages_per_rank,
        pipeline.microbatches * pipeline.stages_per_rank,
    )
    match pipeline.schedule:
        case "1F1B":
            most = ranks - rank
        case "Interleaved1F1B":
            most = (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        case "InterleavedZeroBubble" | "ZBV":
            most = stages * ranks
        case _:
            most = all_pieces
    return min(most, all_pieces)

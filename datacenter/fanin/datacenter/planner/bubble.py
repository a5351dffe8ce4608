"""The idle time and the activations in flight of each pipeline schedule.

Times are in *units*: the time of one microbatch in one stage, forward and backward. With m microbatches and v stages on
each of p ranks, a rank computes ``m * v`` units in a step. The forward pass, the gradients of inputs and the gradients
of weights are a third of a unit each.

The formulas of schedules that split the backward pass come from torch's own schedule tables. These differ from the
paper: they leave a third of a unit idle for each rank.

Reference:
    GPipe: Huang et al. 2019, arXiv 1811.06965, section 2.3.
    1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fanin.datacenter.parallel.pipelines.schedules import Pipeline

THIRD: Final = 1 / 3


def _folded_idle_units(pipeline: Pipeline) -> float:
    full = pipeline.microbatches >= 2 * pipeline.num_ranks
    return (1 if full else 2) * THIRD


IDLE_UNITS: Final[Mapping[str, Callable[[Pipeline], float]]] = MappingProxyType(
    {
        "GPipe": lambda pipeline: 1.0,
        "1F1B": lambda pipeline: 1.0,
        "Interleaved1F1B": lambda pipeline: 1.0,
        "LoopedBFS": lambda pipeline: 1.0,
        "InterleavedZeroBubble": lambda pipeline: THIRD,
        "ZBV": _folded_idle_units,
    }
)
"""Idle units of a rank in a step, for each further rank of the pipeline."""


def bubble_units(pipeline: Pipeline) -> float:
    """Return the idle units of a rank in a step: p - 1 for GPipe and 1F1B."""
    return (pipeline.num_ranks - 1) * IDLE_UNITS[pipeline.schedule](pipeline)


def bubble_share(pipeline: Pipeline) -> float:
    """Return the idle share of a step, 0.0 to 1.0: (p - 1) / (m + p - 1) for GPipe and 1F1B."""
    idle = bubble_units(pipeline)
    return idle / (idle + pipeline.microbatches * pipeline.stages_per_rank)


def max_in_flight(pipeline: Pipeline, rank: int) -> int:
    """Return the largest number of (stage, microbatch) pairs whose activations a rank keeps at once."""
    ranks, stages = pipeline.num_ranks, pipeline.stages_per_rank
    num_pairs = pipeline.microbatches * stages
    match pipeline.schedule:
        case "1F1B":
            most = ranks - rank
        case "Interleaved1F1B":
            most = (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        case "InterleavedZeroBubble" | "ZBV":
            most = stages * ranks
        case _:
            most = num_pairs
    return min(most, num_pairs)

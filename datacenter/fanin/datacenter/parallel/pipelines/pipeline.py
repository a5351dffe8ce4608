"""Cuts a model into the stages of a pipeline, by the names of its modules.

A stage is the whole model with what belongs to other stages left out: names stay as they are, whatever the cut, so
that checkpoints, plans and patterns know of no stages. What is left out hands on the tensor that it is given.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

from torch import Tensor, nn

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.protos.errors import InvalidInput

NOTHING: Final[Mapping[int, object]] = MappingProxyType({})


class Skip(nn.Module):
    """Stands where another stage has a module."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """``x`` itself, whatever else the module takes."""
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a model: its number and its part, whose parameters are the model's own."""

    index: int
    part: nn.Module


def cut(num_layers: int, num_stages: int, times: Sequence[float] = ()) -> tuple[range, ...]:
    """Which layers each stage has: consecutive, at least one each, the slowest stage as fast as can be.

    ``times`` are those of the inputs, each layer and the outputs; without them only layers count, each the same.
    Of several best cuts the one that gives earlier stages more is taken.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"got {num_stages} stages for {num_layers} layers, expected 1 to {num_layers}")
    costs = list(times) or [0.0, *([1.0] * num_layers), 0.0]
    if len(costs) != num_layers + 2:
        raise ValueError(f"got {len(costs)} times for {num_layers} layers, expected {num_layers + 2}")
    layers = costs[1:-1]
    layers[0] += costs[0]
    layers[-1] += costs[-1]
    total = [0.0, *accumulate(layers)]
    # best[s][n]: the slowest of s stages over the first n layers, and where the last of them begins.
    best = [[(total[end], 0) for end in range(num_layers + 1)]]
    for stage in range(1, num_stages):
        row = [(float("inf"), 0)] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            row[end] = min(
                ((max(best[-1][start][0], total[end] - total[start]), start) for start in range(stage, end)),
                key=lambda found: (found[0], -found[1]),
            )
        best.append(row)
    bounds = [num_layers]
    for row in reversed(best):
        bounds.append(row[bounds[-1]][1])
    bounds.reverse()
    return tuple(range(start, end) for start, end in pairwise(bounds))


def stage_times(num_layers: int, num_stages: int, times: Sequence[float]) -> tuple[float, ...]:
    """The time of each stage of the cut by ``times``, the inputs' and outputs' included."""
    shares = cut(num_layers, num_stages, times)
    ends = {0: times[0], num_stages - 1: times[-1]} if num_stages > 1 else {0: times[0] + times[-1]}
    return tuple(sum(times[1 + layer] for layer in share) + ends.get(index, 0.0) for index, share in enumerate(shares))


def owners(
    module: nn.Module, layout: Layout, num_stages: int, times: Sequence[float] = (), *, every_name: bool = False
) -> dict[str, int]:
    """The name of each parameter, in the model's order, and its stage. Raises InvalidInput if a cut would leave two.

    ``every_name``: a parameter that is shared has all of its names, else the first alone.
    """
    shares = cut(layout.sizes.num_layers, num_stages, times)
    found: dict[str, int] = {}
    for name, _ in module.named_parameters(remove_duplicate=not every_name):
        if any(_within(name, part) for part in layout.inputs):
            found[name] = 0
        elif any(_within(name, part) for part in layout.outputs):
            found[name] = num_stages - 1
        elif _within(name, layout.layers):
            layer = int(name[len(layout.layers) + 1 :].partition(".")[0])
            found[name] = next(index for index, share in enumerate(shares) if layer in share)
        elif num_stages == 1:
            found[name] = 0
        else:
            known = ", ".join((*layout.inputs, layout.layers, *layout.outputs))
            raise InvalidInput(
                f"pipeline: parameter {name} is in none of {known}; name its module in the layout, or take pp=1"
            )
    return found


def _within(name: str, part: str) -> bool:
    return name.startswith(f"{part}.")


def split(module: nn.Module, layout: Layout, pipeline: Pipeline, rank: int, times: Sequence[float]) -> list[Stage]:
    """The stages of a rank; their parameters are the module's, but for a tied copy, which gets its own."""
    shares = cut(layout.sizes.num_layers, pipeline.num_stages, times)
    stages = []
    for index in pipeline.stages_of(rank):
        left_out = [
            *(name for name in layout.inputs if index > 0),
            *(f"{layout.layers}.{layer}" for layer in range(layout.sizes.num_layers) if layer not in shares[index]),
            *(name for name in layout.outputs if index < pipeline.num_stages - 1),
        ]
        stages.append(Stage(index=index, part=_without(module, left_out, layout)))
    return stages


def hand_on(part: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """A forward hook: what a stage hands on, as a tensor of its own.

    Where backward is split, torch 2.13 detaches it in place, which it refuses for a view of another tensor.
    """
    return output.clone() if output._is_view() else output


def skeleton(module: nn.Module, instead: Mapping[str, nn.Module], kept: Mapping[int, object] = NOTHING) -> nn.Module:
    """A copy of the module with others in the place of some parts, by name. No value is held twice.

    ``kept``: copies that were made already, by the ids of what they are of.
    """
    # What deepcopy finds in its memo it takes as copied already.
    memo: dict[int, object] = {id(value): value for value in (*module.parameters(), *module.buffers())}
    memo |= kept
    memo |= {id(module.get_submodule(name)): part for name, part in instead.items()}
    return copy.deepcopy(module, memo)


def _without(module: nn.Module, left_out: Sequence[str], layout: Layout) -> nn.Module:
    """A copy of the module without some parts."""
    copied: dict[int, object] = {}
    if layout.tied is not None:
        shared = module.get_parameter(layout.tied[1])
        if any(_within(layout.tied[1], name) for name in left_out):
            copied[id(shared)] = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    return skeleton(module, {name: Skip() for name in left_out}, copied)

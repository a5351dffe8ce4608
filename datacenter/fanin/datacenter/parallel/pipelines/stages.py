"""Cuts a model into the stages of a pipeline, by the names of its modules.

A stage is a copy of the complete model in which the modules of other stages are replaced by ``Skip``, which returns its
input. Parameter names are therefore the same for every cut, and checkpoints, splitting plans and freeze patterns do not
depend on the stages.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.datacenter.parallel.draws.sites import ModelDraws
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.protos.errors import InvalidInput, UnsupportedModel

NO_COPIES: Final[Mapping[int, object]] = MappingProxyType({})


class Skip(nn.Module):
    """A placeholder for a module that belongs to another stage."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return ``x`` unchanged and ignore all other arguments."""
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """One stage of a model: its index and its module, which holds the model's own parameters."""

    index: int
    part: nn.Module


def cut(num_layers: int, num_stages: int, times: Sequence[float] = ()) -> tuple[range, ...]:
    """Return the layers of each stage so that the slowest stage is as fast as possible.

    Stages are consecutive and have at least one layer each. Among several optimal cuts, the function chooses the one
    with more layers in earlier stages.

    Args:
        num_layers: layers of the model.
        num_stages: stages of the pipeline.
        times: times of the inputs, each layer and the outputs, ``num_layers + 2`` numbers in any unit. Without them
            every layer costs the same, and the inputs and outputs cost nothing.

    Raises:
        ValueError: there are more stages than layers, or the wrong number of times.
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
    # best[s][n]: time of the slowest of s + 1 stages over the first n layers, and the first layer of the last stage.
    best = [[(total[end], 0) for end in range(num_layers + 1)]]
    for stage in range(1, num_stages):
        row = [(float("inf"), 0)] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            row[end] = min(
                ((max(best[-1][start][0], total[end] - total[start]), start) for start in range(stage, end)),
                key=lambda candidate: (candidate[0], -candidate[1]),
            )
        best.append(row)
    bounds = [num_layers]
    for row in reversed(best):
        bounds.append(row[bounds[-1]][1])
    bounds.reverse()
    return tuple(range(start, end) for start, end in pairwise(bounds))


def stage_times(num_layers: int, num_stages: int, times: Sequence[float]) -> tuple[float, ...]:
    """Return the time of each stage of the cut by ``times``, inputs and outputs included."""
    shares = cut(num_layers, num_stages, times)
    ends = {0: times[0], num_stages - 1: times[-1]} if num_stages > 1 else {0: times[0] + times[-1]}
    return tuple(sum(times[1 + layer] for layer in share) + ends.get(index, 0.0) for index, share in enumerate(shares))


def stage_of_parameters(
    module: nn.Module, layout: Layout, num_stages: int, times: Sequence[float] = (), *, every_name: bool = False
) -> dict[str, int]:
    """Return the stage of each parameter by name, in the order of the model.

    Args:
        module: the complete model.
        layout: the names of its modules.
        num_stages: stages of the pipeline.
        times: times to cut by, as in ``cut``.
        every_name: list a shared parameter under all of its names. Otherwise only the first name is listed.

    Raises:
        InvalidInput: the layout does not cover a parameter, and there is more than one stage.
    """
    shares = cut(layout.sizes.num_layers, num_stages, times)
    stages: dict[str, int] = {}
    for name, _ in module.named_parameters(remove_duplicate=not every_name):
        stage = _stage_of(name, layout, shares)
        if stage is None:
            raise InvalidInput(
                f"pipeline: parameter {name} is in none of {_parts(layout)}; name its module in the layout, or use "
                "pp=1",
                code="FN-1279",
            )
        stages[name] = stage
    return stages


def check_draws(draws: ModelDraws, layout: Layout, num_stages: int, times: Sequence[float]) -> None:
    """Raise InvalidInput if a module draws random numbers in several stages of a pipeline, or outside of them.

    Outside of them it may draw numbers of the step, such as those of LayerDrop: each stage draws the same ones.
    """
    shares = cut(layout.sizes.num_layers, num_stages, times)
    for name, site in draws.modules() if num_stages > 1 else ():
        stages = {_stage_of(alias, layout, shares) for alias in site.names}
        if None in stages and any(draw.dim is not None for draw in site.train):
            raise InvalidInput(
                f"pipeline: {name or 'the forward of the model'} draws random numbers and is in none of "
                f"{_parts(layout)}, so each stage would repeat it; draw in one of these modules, or use pp=1",
                code="FN-1280",
            )
        if len(stages) > 1:
            raise InvalidInput(
                f"pipeline: {' and '.join(site.names)} are one module that draws random numbers in several stages, "
                "expected one stage; create a module for each layer, or use pp=1",
                code="FN-1280",
            )


def check_skips(draws: ModelDraws, module: nn.Module, layout: Layout, num_stages: int, times: Sequence[float]) -> None:
    """Raise UnsupportedModel if a step may skip all that the first stage of a pipeline trains.

    torch's schedules run backward through each stage, and fail if its outputs need no gradient.
    """
    trained = (value.requires_grad for name in layout.inputs for value in module.get_submodule(name).parameters())
    if num_stages == 1 or any(trained):
        return
    shares = cut(layout.sizes.num_layers, num_stages, times)
    for name, site in draws.modules():
        if site.may_skip and {_stage_of(alias, layout, shares) for alias in site.names} & {None, 0}:
            raise UnsupportedModel(
                f"pipeline: {name or 'the forward of the model'} draws one random number for all examples and may skip "
                f"a layer by it (LayerDrop), got no parameter that is trained before {layout.layers}, expected one: a "
                "first stage whose layers are all skipped has no gradient; name a trained module in inputs of the "
                "layout, or use pp=1",
                code="FN-1280",
            )


def _parts(layout: Layout) -> str:
    return ", ".join((*layout.inputs, layout.layers, *layout.outputs))


def _stage_of(name: str, layout: Layout, shares: Sequence[range]) -> int | None:
    """Return the stage of a parameter or a module; None if the layout does not cover it and there are several."""
    if any(_within(f"{name}.", part) for part in layout.inputs):
        return 0
    if any(_within(f"{name}.", part) for part in layout.outputs):
        return len(shares) - 1
    if _within(name, layout.layers):
        layer = int(name[len(layout.layers) + 1 :].partition(".")[0])
        return next(index for index, share in enumerate(shares) if layer in share)
    return 0 if len(shares) == 1 else None


def _within(name: str, part: str) -> bool:
    return name.startswith(f"{part}.")


def split(
    module: nn.Module, layout: Layout, pipeline: Pipeline, rank: int, times: Sequence[float]
) -> list[StageModule]:
    """Return the stages of a rank.

    They share their parameters with ``module``. The exception is a tied copy whose original is in another stage: it
    becomes a separate parameter.
    """
    shares = cut(layout.sizes.num_layers, pipeline.num_stages, times)
    stages = []
    for index in pipeline.stages_of(rank):
        left_out = [
            *(name for name in layout.inputs if index > 0),
            *(f"{layout.layers}.{layer}" for layer in range(layout.sizes.num_layers) if layer not in shares[index]),
            *(name for name in layout.outputs if index < pipeline.num_stages - 1),
        ]
        stages.append(StageModule(index=index, part=_without(module, left_out, layout)))
    return stages


def chain_error(module: nn.Module, layout: Layout, inputs: Tensor) -> float:
    """Return the largest difference between the outputs of two consecutive stages and of the complete module.

    Args:
        module: the complete model, with values. It runs in evaluation mode.
        layout: the names of its modules, of at least two layers.
        inputs: inputs of a few samples (n, ...).
    """
    pipeline = Pipeline(schedule="GPipe", num_ranks=2, stages_per_rank=1, microbatches=1)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        value = inputs
        with torch.no_grad():
            for rank in range(2):
                for stage in split(module, layout, pipeline, rank, ()):
                    value = stage.part(value)
            return float((value - module(inputs)).abs().max())
    finally:
        for part, mode in modes.items():
            part.training = mode


def sendable_output(part: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Forward hook: return the output of a stage with its values in order, in memory of its own.

    torch 2.13 sends and receives contiguous tensors only; the output of a recurrent layer, such as an LSTM of
    ``batch_first``, is not. If a schedule splits the backward pass, it also detaches this output in place, which fails
    for a view.
    """
    return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()


def sendable_gradient(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Forward pre-hook: make the gradient of a stage's input contiguous, because it is sent, too."""
    if inputs[0].requires_grad:
        inputs[0].register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # torch's


def skeleton(
    module: nn.Module, substitutes: Mapping[str, nn.Module], copies: Mapping[int, object] = NO_COPIES
) -> nn.Module:
    """Return a copy of a module in which some submodules are replaced. Parameters and buffers are shared, not copied.

    Args:
        module: the module to copy.
        substitutes: the replacements, by the names of the submodules.
        copies: copies that exist already, by the ids of their originals.
    """
    # deepcopy treats every object in its memo as already copied.
    memo: dict[int, object] = {id(value): value for value in (*module.parameters(), *module.buffers())}
    memo |= copies
    memo |= {id(module.get_submodule(name)): part for name, part in substitutes.items()}
    return copy.deepcopy(module, memo)


def _without(module: nn.Module, left_out: Sequence[str], layout: Layout) -> nn.Module:
    """Return a copy of the module in which the submodules ``left_out`` are skipped."""
    copies: dict[int, object] = {}
    if layout.tied is not None:
        shared = module.get_parameter(layout.tied[1])
        if any(_within(layout.tied[1], name) for name in left_out):
            copies[id(shared)] = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    return skeleton(module, {name: Skip() for name in left_out}, copies)

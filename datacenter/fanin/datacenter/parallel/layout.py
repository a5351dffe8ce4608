"""Describes a model to the parallel rooms by the names of its modules. The model itself needs no change.

A Layout names the modules before and after the list of equal layers; a pipeline may be cut between these. It also maps
patterns of module names to the ways in which tensor parallelism splits a module. This module needs no torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    # It needs torch, and this module does not.
    from torch import nn

Style = Literal["shared", "column", "row", "kv", "vocabulary", "places", "logits", "whole"]
"""How a module is split over ``tp``:

shared      not split; its input is gathered once for all modules in it
column      a linear layer split by outputs; its output is this rank's part
row         a linear layer split by inputs; its output is summed over the ranks
kv          as ``column``; with fewer heads than ranks, each rank uses the head that it needs
vocabulary  an embedding split by rows; its output is summed over the ranks
places      a table of positions, not split; with a split sequence each rank uses the rows of its own part
logits      a linear layer split by outputs. If it is the last module, the loss of tokens is computed on the parts;
            otherwise they are gathered
whole       not split; the default for modules with parameters that match no pattern
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes that a mesh must divide.

    They are checked before a process starts. The pipeline, the style ``kv`` and the planner use them, too.

    Attributes:
        num_layers: length of the list of layers. A pipeline has at most as many stages.
        num_heads: attention heads; tp must divide them. 0 if no module has heads.
        num_kv_heads: key and value heads; tp must divide them, or with the style ``kv`` may be a multiple of them. 0 if
            no module has heads.
        feed_forward: width of the feed-forward layers; tp must divide it. 0 without such layers.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of a model's modules, and their distribution over ranks.

    A module that a pipeline stage does not have returns its input there.

    Attributes:
        sizes: the sizes that a mesh must divide.
        inputs: modules before the layers. They belong to the first stage of a pipeline.
        layers: the list of layers.
        outputs: modules after the layers. They belong to the last stage.
        plan: patterns of module names (``*`` is any text without a dot), each with the module's style of tensor
            parallelism.
        tied: (name of the copy, name of the original) of a parameter with two names.
        sequence: the part of the model in which sequence parallelism may split the T positions of the activations (B,
            T, width). ``model``: the complete model. ``layers``: from the first to the last layer of a stage, because
            the modules around them read the number of positions from their input. Empty: no part.
        unfit: the axes that the model does not support, each with the reason.
        gathers_logits: whether the ranks of tp gather the logits of the last module. ``build`` sets it: only some
            losses work on split logits.
    """

    sizes: ModelSizes
    inputs: tuple[str, ...]
    layers: str
    outputs: tuple[str, ...]
    plan: Mapping[str, Style]
    tied: tuple[str, str] | None = None
    sequence: Literal["", "layers", "model"] = ""
    unfit: Mapping[Literal["pp", "tp"], str] = field(default_factory=dict)
    gathers_logits: bool = True


def styles_remedy(*, sequence: bool) -> str:
    """Return the remedy for a plan with which the ranks of tp compute another model.

    Args:
        sequence: whether sequence parallelism is on.
    """
    remedy = "correct the styles in plan, and let the forward take the number of heads from its tensors"
    if not sequence:
        return remedy
    return (
        f"{remedy}; with sequence_parallel a rank has only some positions: give the style shared to a module around "
        "each column or kv module and around all that reads other positions, or set sequence_parallel = false"
    )


def patterns_of(name: str, plan: Mapping[str, Style]) -> list[str]:
    """Return the patterns of a plan that match a module's name. ``*`` matches within one component between dots."""
    components = name.split(".")
    return [pattern for pattern in plan if _matches(pattern.split("."), components)]


def _matches(patterns: list[str], components: list[str]) -> bool:
    return len(patterns) == len(components) and all(map(fnmatchcase, components, patterns))


def check_layout(layout: Layout, module: "nn.Module") -> None:
    """Check that a Layout describes a module: every name and pattern, the number of layers, and the tie.

    Raises:
        InvalidInput: a name or a pattern matches no module, two patterns match one module, or a style is unknown. Or
            the number of layers differs, or the tied names are not of one parameter.
    """
    names = {name for name, _ in module.named_modules(remove_duplicate=False)}
    for part in (*layout.inputs, layout.layers, *layout.outputs):
        if part and part not in names:
            raise InvalidInput(
                f"layout: got {part!r}, which is no module of the model, expected names of its modules; the outermost "
                f"are {', '.join(sorted(name for name in names if name and '.' not in name))}",
                code="FN-1284",
            )
    num_layers = len(list(module.get_submodule(layout.layers).children())) if layout.layers else 1
    if layout.sizes.num_layers != num_layers and not layout.layers:
        raise InvalidInput(
            f"layout: got layers '' and num_layers {layout.sizes.num_layers}; name the list of layers, or set "
            "num_layers = 1",
            code="FN-1287",
        )
    if layout.sizes.num_layers != num_layers:
        raise InvalidInput(
            f"layout: got num_layers {layout.sizes.num_layers}, expected {num_layers}, the number of modules in "
            f"{layout.layers}; correct the sizes of the layout or the build of the model",
            code="FN-1287",
        )
    if layout.tied is not None:
        values = dict(module.named_parameters(remove_duplicate=False))
        copied, original = layout.tied
        if copied not in values or values[copied] is not values.get(original):
            raise InvalidInput(
                f"layout: got tied {copied}, {original}, expected two names of one parameter: the copy and the "
                "original",
                code="FN-1285",
            )
    _check_plan(layout.plan, names - {""})


def _check_plan(plan: Mapping[str, Style], names: Collection[str]) -> None:
    """Raise InvalidInput unless each pattern is of a module, no two are of one, and all styles are known."""
    patterns_by_name = {name: patterns_of(name, plan) for name in names}
    matching = {pattern for patterns in patterns_by_name.values() for pattern in patterns}
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise InvalidInput(
                f"layout: got the style {style!r} for the pattern {pattern!r} of the plan, expected one of "
                f"{', '.join(get_args(Style))}",
                code="FN-1286",
            )
        if pattern not in matching:
            raise InvalidInput(
                f"layout: the pattern {pattern!r} of the plan matches no module, expected at least one; correct or "
                "remove it ('*' matches within one component between dots)",
                code="FN-1284",
            )
    for name, patterns in sorted(patterns_by_name.items()):
        if len(patterns) > 1:
            raise InvalidInput(
                f"layout: the patterns {' and '.join(map(repr, patterns))} of the plan match the module {name}, "
                "expected one; make them more exact",
                code="FN-1284",
            )

"""What the parallel rooms must know of a model, by the names of its modules; the model itself knows none of it.

A Layout says which modules stand before and after the list of equal layers (that is where a pipeline may cut),
and how tensor parallelism splits each: by patterns over module names, so that a model from elsewhere needs no change.
Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    # Their modules need torch, and what decides on numbers alone does not.
    from fanin.datacenter.models.decoder import DecoderConfig
    from fanin.datacenter.models.encoder import EncoderConfig

Style = Literal["shared", "column", "row", "kv", "vocabulary", "places", "logits", "whole"]
"""How a module is split over ``tp``:

shared      no parameters of its own to split: its input becomes one whole tensor, once, for all within
column      a linear layer by its outputs; what it gives is this rank's part
row         a linear layer by its inputs; what it gives is summed over the ranks
kv          as ``column``; where there are fewer heads than ranks, each rank takes the head that it needs
vocabulary  an embedding by its rows; what it gives is summed over the ranks
places      as ``whole``, of a table of places: where the sequence is split, each rank takes those of its part
logits      a linear layer by its outputs, which are then put together
whole       every rank has all of it; so is every module with parameters that no pattern names
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The numbers that a mesh has to fit."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of a model's modules.

    ``inputs`` stand before the list ``layers`` and belong to the first stage of a pipeline, ``outputs`` after it and
    to the last; a module left out of a stage hands on what it is given. ``plan``: pattern over module names (``*``
    is any text without a dot) to how tensor parallelism splits it. ``tied``: the names of (a copy, its original).
    ``sequence``: where ranks may share out the T places of what layers hand on, (B, T, width), because a module that
    every rank has whole works on each place by itself: nowhere, in the whole ``model``, or from a stage's first layer
    to its last (``layers``), where what is around them reads the number of places off what it is given. ``unfit``: the
    axes that the model cannot be spread over, each with what stands in the way.
    """

    sizes: ModelSizes
    inputs: tuple[str, ...]
    layers: str
    outputs: tuple[str, ...]
    plan: Mapping[str, Style]
    tied: tuple[str, str] | None = None
    sequence: Literal["", "layers", "model"] = ""
    unfit: Mapping[Literal["pp", "tp"], str] = field(default_factory=dict)


DECODER_PLAN: Final[Mapping[str, Style]] = MappingProxyType(
    {
        "embed": "vocabulary",
        "layers.*.attention": "shared",
        "layers.*.attention.query": "column",
        "layers.*.attention.key": "kv",
        "layers.*.attention.value": "kv",
        "layers.*.attention.out": "row",
        "layers.*.feed_forward": "shared",
        "layers.*.feed_forward.gate": "column",
        "layers.*.feed_forward.up": "column",
        "layers.*.feed_forward.down": "row",
        "head": "logits",
    }
)


ENCODER_PLAN: Final[Mapping[str, Style]] = MappingProxyType(
    {
        "embed.tokens": "vocabulary",
        "embed.positions": "places",
        "layers.*.attention": "shared",
        "layers.*.attention.query": "column",
        "layers.*.attention.key": "column",
        "layers.*.attention.value": "column",
        "layers.*.attention.out": "row",
        "layers.*.feed_forward": "shared",
        "layers.*.feed_forward.up": "column",
        "layers.*.feed_forward.down": "row",
        "head": "logits",
    }
)


def encoder_layout(config: "EncoderConfig") -> Layout:
    """The Layout of ``models.encoder.Encoder``."""
    return Layout(
        sizes=ModelSizes(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            feed_forward=config.feed_forward,
        ),
        inputs=("embed",),
        layers="layers",
        outputs=("transform", "head"),
        plan=ENCODER_PLAN,
        tied=("head.weight", "embed.tokens.weight") if config.tied else None,
        sequence="model",
    )


def decoder_layout(config: "DecoderConfig") -> Layout:
    """The Layout of ``models.decoder.Decoder``."""
    return Layout(
        sizes=ModelSizes(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            feed_forward=config.feed_forward,
        ),
        inputs=("embed",),
        layers="layers",
        outputs=("norm", "head"),
        plan=DECODER_PLAN,
        tied=("head.weight", "embed.weight") if config.tied else None,
        sequence="model",
    )

"""What the planner knows of a model: its numbers, and the shape of each parameter with how ``tp`` splits it.

Read off any module that a Layout describes, on torch's meta device, so that a model of any size costs nothing here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style, decoder_layout
from fanin.datacenter.parallel.tensor import matching
from fanin.datacenter.watch.flops import Work
from fanin.protos.errors import InvalidInput

SPLIT_DIM: Final[Mapping[Style, int]] = MappingProxyType({"column": 0, "kv": 0, "vocabulary": 0, "logits": 0, "row": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter; ``style``: as the Layout's plan has its module."""

    name: str
    shape: tuple[int, ...]
    style: Style

    @property
    def num_values(self) -> int:
        """Values of the whole parameter."""
        return prod(self.shape)

    def local_shape(self, tp: int, num_kv_heads: int) -> tuple[int, ...]:
        """What the first of ``tp`` ranks has of it; it has most where a split is uneven."""
        dim = SPLIT_DIM.get(self.style)
        if dim is None or len(self.shape) <= dim or self.is_shared(tp, num_kv_heads):
            return self.shape
        return tuple(ceil(size / tp) if index == dim else size for index, size in enumerate(self.shape))

    def is_shared(self, tp: int, num_kv_heads: int) -> bool:
        """Whether it is kept whole because there are fewer key and value heads than ranks."""
        return self.style == "kv" and num_kv_heads % tp != 0

    def is_partial(self, tp: int, num_kv_heads: int, *, split: bool) -> bool:
        """Whether its gradient is a sum over ``tp`` still to be made; ``split``: the sequence is shared out."""
        return self.is_shared(tp, num_kv_heads) or (split and self.style in {"whole", "places"})

    def sharded(self, tp: int, num_kv_heads: int, num_shards: int) -> int:
        """Values of the first rank's share, the parameter being cut along its first dimension into ``num_shards``."""
        rows, *rest = self.local_shape(tp, num_kv_heads) or (1,)
        return ceil(rows / num_shards) * prod(rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """A model of equal layers: sizes, and the parameters before the layers, of each of them, and after them.

    A tied table stands among ``inputs`` alone. Two are equal if they are one object: the planner's caches ask for that
    many thousand times.
    """

    name: str
    layout: Layout
    width: int
    head_width: int
    vocabulary: int
    inputs: tuple[Weight, ...]
    layer: tuple[Weight, ...]
    outputs: tuple[Weight, ...]

    @property
    def sizes(self) -> ModelSizes:
        """The numbers that a mesh has to fit."""
        return self.layout.sizes

    @property
    def tied(self) -> bool:
        """Whether the table of tokens also scores them."""
        return self.layout.tied is not None

    @property
    def kv_width(self) -> int:
        """Values of all keys of one token."""
        return self.sizes.num_kv_heads * self.head_width

    @property
    def num_values(self) -> int:
        """Parameters of the whole model, a tied table once."""
        return _values(self.inputs) + self.sizes.num_layers * _values(self.layer) + _values(self.outputs)

    @property
    def work(self) -> Work:
        """What counts as work of one token."""
        layers = self.sizes.num_layers * _values(self.layer, matrices=True)
        ends = self.inputs if self.tied else self.outputs
        return Work(
            matmul_values=layers + _values(ends, matrices=True),
            num_layers=self.sizes.num_layers,
            attention_width=2 * self.sizes.num_heads * self.head_width,
        )


def facts_of(name: str, module: nn.Module, layout: Layout) -> ModelFacts:
    """The facts of a module. Raises InvalidInput if the Layout names no table of tokens or no key projection."""
    weights = [
        Weight(name=key, shape=tuple(value.shape), style=_style(key, layout))
        for key, value in module.named_parameters()
    ]
    first = f"{layout.layers}.0."
    tables = [weight for weight in weights if weight.style == "vocabulary"]
    keys = [weight for weight in weights if weight.style == "kv" and weight.name.startswith(first)]
    if not tables or not keys:
        raise InvalidInput(f"planner: the layout of {name} names no 'vocabulary' or no 'kv' module, expected both")
    return ModelFacts(
        name=name,
        layout=layout,
        width=tables[0].shape[1],
        head_width=keys[0].shape[0] // layout.sizes.num_kv_heads,
        vocabulary=tables[0].shape[0],
        inputs=tuple(weight for weight in weights if _within(weight.name, layout.inputs)),
        layer=tuple(weight for weight in weights if weight.name.startswith(first)),
        outputs=tuple(weight for weight in weights if _within(weight.name, layout.outputs)),
    )


def decoder_facts(name: str, config: DecoderConfig) -> ModelFacts:
    """The facts of our own decoder."""
    with torch.device("meta"):
        module = Decoder(config)
    return facts_of(name, module, decoder_layout(config))


def _style(name: str, layout: Layout) -> Style:
    return matching(name.rpartition(".")[0], layout.plan) or "whole"


def _within(name: str, parts: Iterable[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def _values(weights: Iterable[Weight], *, matrices: bool = False) -> int:
    return sum(weight.num_values for weight in weights if len(weight.shape) > 1 or not matrices)

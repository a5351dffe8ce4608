"""The sizes of a model: its layers, and the shape of each parameter with its tensor-parallel style.

They are derived from any module that a Layout describes. The module is on torch's meta device, so a model of any size
uses no memory here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType
from typing import Final

from torch import nn

from fanin.datacenter.families.family import FamilyModel
from fanin.datacenter.families.known import FAMILIES, family_model
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.parallel.transforms.tensor import style_of_module
from fanin.datacenter.watch.flops import Work
from fanin.protos.errors import InvalidInput

SPLIT_DIM: Final[Mapping[Style, int]] = MappingProxyType({"column": 0, "kv": 0, "vocabulary": 0, "logits": 0, "row": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter.

    Attributes:
        name: its name in the model.
        shape: its shape in the complete model.
        style: how tensor parallelism splits its module.
    """

    name: str
    shape: tuple[int, ...]
    style: Style

    @property
    def num_values(self) -> int:
        """Number of values of the full parameter."""
        return prod(self.shape)

    def local_shape(self, tp: int, num_kv_heads: int) -> tuple[int, ...]:
        """Return the shape on the first of ``tp`` ranks, which has the largest part of an uneven split."""
        dim = SPLIT_DIM.get(self.style)
        if dim is None or len(self.shape) <= dim or self.is_shared(tp, num_kv_heads):
            return self.shape
        return tuple(ceil(size / tp) if index == dim else size for index, size in enumerate(self.shape))

    def is_shared(self, tp: int, num_kv_heads: int) -> bool:
        """Return whether it is replicated on every rank because there are fewer key and value heads than ranks."""
        return self.style == "kv" and num_kv_heads % tp != 0

    def is_partial(self, tp: int, num_kv_heads: int, *, split: bool) -> bool:
        """Return whether its gradient is a partial sum over ``tp``. ``split``: sequence parallelism is used."""
        return self.is_shared(tp, num_kv_heads) or (split and self.style in {"whole", "places"})

    def sharded(self, tp: int, num_kv_heads: int, num_shards: int) -> int:
        """Return the number of values on the first rank after FSDP2 cuts dimension 0 into ``num_shards`` shards."""
        rows, *rest = self.local_shape(tp, num_kv_heads) or (1,)
        return ceil(rows / num_shards) * prod(rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """The sizes and parameters of a model with equal layers.

    Two instances are equal only if they are the same object, because the planner's caches compare them many thousand
    times.

    Attributes:
        name: the name in reports and errors.
        layout: the module names and the splitting plan.
        width: values of an activation between layers.
        head_width: values of one attention head.
        vocabulary: number of tokens.
        inputs: parameters before the layers. A tied table is listed only here.
        layer: parameters of one layer.
        outputs: parameters after the layers.
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
        """The sizes that a mesh must divide."""
        return self.layout.sizes

    @property
    def tied(self) -> bool:
        """Whether the embedding table is also the output matrix."""
        return self.layout.tied is not None

    @property
    def kv_width(self) -> int:
        """Number of values of all keys of one token."""
        return self.sizes.num_kv_heads * self.head_width

    @property
    def num_values(self) -> int:
        """Number of parameters of the complete model. A tied table counts once."""
        return _values(self.inputs) + self.sizes.num_layers * _values(self.layer) + _values(self.outputs)

    @property
    def work(self) -> Work:
        """The FLOPs of one token, as ``watch.flops`` counts them."""
        layers = self.sizes.num_layers * _values(self.layer, matrices=True)
        ends = self.inputs if self.tied else self.outputs
        return Work(
            matmul_values=layers + _values(ends, matrices=True),
            num_layers=self.sizes.num_layers,
            attention_width=2 * self.sizes.num_heads * self.head_width,
        )


def facts_of(name: str, module: nn.Module, layout: Layout) -> ModelFacts:
    """Return the facts of a module.

    Args:
        name: the name in reports and errors.
        module: the model, best on the meta device.
        layout: its module names and splitting plan.

    Raises:
        InvalidInput: the layout names no embedding table (``vocabulary``) or no key projection (``kv``).
    """
    weights = [
        Weight(name=key, shape=tuple(value.shape), style=_style(key, layout))
        for key, value in module.named_parameters()
    ]
    first = f"{layout.layers}.0."
    tables = [weight for weight in weights if weight.style == "vocabulary"]
    keys = [weight for weight in weights if weight.style == "kv" and weight.name.startswith(first)]
    if not tables or not keys:
        raise InvalidInput(
            f"planner: got a layout of {name} without a module of the style 'vocabulary' or 'kv', expected both; add "
            "them to the plan of the layout",
            code="FN-1378",
        )
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


def planned_facts(name: str, model: FamilyModel) -> ModelFacts:
    """Return the facts of a model of a family.

    Raises:
        InvalidInput: the planner has no formulas for the family, or its layout names too little.
    """
    if not model.family.planned:
        planned = ", ".join(each for each, family in FAMILIES.items() if family.planned)
        raise InvalidInput(
            f"planner: got the family {model.name!r}, expected one whose layers the planner's formulas describe: "
            f"{planned}",
            code="FN-1378",
        )
    return facts_of(name, model.skeleton(), model.layout)


def decoder_facts(name: str, config: DecoderConfig) -> ModelFacts:
    """Return the facts of ``models.decoder.Decoder``."""
    return planned_facts(name, family_model("decoder", config))


def _style(name: str, layout: Layout) -> Style:
    return style_of_module(name.rpartition(".")[0], layout.plan) or "whole"


def _within(name: str, parts: Iterable[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def _values(weights: Iterable[Weight], *, matrices: bool = False) -> int:
    return sum(weight.num_values for weight in weights if len(weight.shape) > 1 or not matrices)

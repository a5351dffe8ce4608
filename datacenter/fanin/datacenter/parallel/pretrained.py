"""Models of the ``transformers`` library, by what they say of themselves: no code of theirs is known here.

A model of the Llama family carries a plan for tensor parallelism, keyed by module names, and a config with its sizes.
The module itself is left as it is, but that it keeps no cache and gives its logits alone. So each stage of a pipeline
runs the forward of the whole: it may do nothing to the tensor that its parts hand on, which is tried and not believed.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.datacenter.parallel.pipeline import Skip, skeleton
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    # What puts models on ranks takes seconds to import, and who asks for a layout alone needs none of it.
    from fanin.datacenter.parallel.build import Model

STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "logits", "embedding_rowwise": "vocabulary"}
)
FAILED: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a forward may raise whose parts hand on something else than it expects of them."""
PROBE: Final = 3.0
"""How large the values are that are handed on: a soft cap leaves small ones nearly as they are."""


class Config(Protocol):
    """What is read of a model's config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    use_cache: bool
    base_model_tp_plan: Mapping[str, str] | None


class Output(Protocol):
    """What such a model gives."""

    logits: Tensor


def pretrained_model(module: nn.Module, objective: Objective = TOKENS) -> "Model":
    """A causal language model of ``transformers``, ready to be spread. Raises UnsupportedModel."""
    from fanin.datacenter.parallel.build import Model

    layout = pretrained_layout(module)
    cast(Config, module.config).use_cache = False

    def logits(module: nn.Module, inputs: object, output: Output) -> Tensor:
        return output.logits

    module.register_forward_hook(logits)
    return Model(module=module, layout=layout, objective=objective)


def pretrained_layout(module: nn.Module) -> Layout:
    """What a model says of itself, in our words. On the meta device its forward cannot be tried, which leaves out pp.

    Raises UnsupportedModel.
    """
    kind = type(module).__name__
    config = cast(Config, getattr(module, "config", None))
    plan = getattr(config, "base_model_tp_plan", None)
    prefix = getattr(module, "base_model_prefix", "")
    names = {name for name, _ in module.named_modules()}
    needed = {f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm", "lm_head"}
    if not plan or not needed <= names:
        raise UnsupportedModel(
            f"{kind}: got {'a' if plan else 'no'} plan for tensor parallelism and no {sorted(needed - names)}, "
            "expected a causal language model of the Llama family; give the layout of this one"
        )
    words = {f"{prefix}.{name}": word for name, word in plan.items()} | {"lm_head": "colwise_gather_output"}
    unknown = {name: word for name, word in words.items() if word not in STYLES}
    if unknown:
        raise UnsupportedModel(
            f"{kind}: got {unknown} in its plan, expected {', '.join(STYLES)} for each; give a layout"
        )
    # What holds a layer's first matrices is given its input once, for all of them.
    holders = {name.rpartition(".")[0] for name, word in words.items() if word == "colwise"}
    shared: dict[str, Style] = dict.fromkeys(sorted(holders), "shared")
    layout = Layout(
        sizes=ModelSizes(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            feed_forward=config.intermediate_size,
        ),
        inputs=(f"{prefix}.embed_tokens",),
        layers=f"{prefix}.layers",
        outputs=(f"{prefix}.norm", "lm_head"),
        plan={f"{prefix}.embed_tokens": "vocabulary", **shared, **{name: STYLES[word] for name, word in words.items()}},
        tied=("lm_head.weight", f"{prefix}.embed_tokens.weight") if config.tie_word_embeddings else None,
        # Its positions and its mask are as long as what the model's table, or another stage, gives.
        sequence="layers",
    )
    return replace(layout, unfit=_unfit(module, layout))


def _unfit(module: nn.Module, layout: Layout) -> dict[Literal["pp", "tp"], str]:
    """The axes that a model cannot be spread over, each with the reason."""
    kind, found = type(module).__name__, dict[Literal["pp", "tp"], str]()
    if not _only_hands_on(module, layout):
        found["pp"] = (
            f"{kind}, whose forward changes what its embedding, its layers and its head hand each other, which every "
            "stage would do again; expected pp 1, or a model whose forward hands one tensor on and changes nothing"
        )
    named = {name for name, style in layout.plan.items() if style != "shared"}
    for name, each in module.get_submodule(layout.layers).named_modules():
        # A layer's number is no part of the names in a plan.
        pattern = f"{layout.layers}.*.{name.partition('.')[2]}"
        if pattern not in named and any(value.ndim > 1 for value in each.parameters(recurse=False)):
            found["tp"] = (
                f"{kind}, whose plan does not say how {layout.layers}.{name} is split, a {type(each).__name__}; "
                "expected tp 1, or a model whose plan names each matrix of a layer, which mixtures of experts do not"
            )
            break
    return found


def _only_hands_on(module: nn.Module, layout: Layout) -> bool:
    """Whether the forward gives the very values that it is given where all its parts hand on what they are given.

    Tried in float32 whatever the model's type: what half of it rounds away would pass for nothing.
    """
    layers = (f"{layout.layers}.{index}" for index in range(layout.sizes.num_layers))
    left_out = (*layout.inputs, *layers, *layout.outputs)
    part = skeleton(module, {name: Skip() for name in left_out}).train()
    config, generator = cast(Config, part.config), torch.Generator().manual_seed(0)
    config.use_cache = False
    try:
        shape = (1, 3, config.hidden_size)
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * PROBE
        values = values.to(next(module.parameters()).device)
        with torch.no_grad(), torch.random.fork_rng([]):
            return torch.equal(cast(Output, part(values)).logits, values)
    except FAILED:
        return False

"""Models of the ``transformers`` library, by what they say of themselves: no code of theirs is known here.

A model of the Llama family carries a plan for tensor parallelism, keyed by module names, and a config with its sizes.
The module itself is left as it is, but that it keeps no cache and gives its logits alone.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast

from torch import Tensor, nn

from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    # What puts models on ranks takes seconds to import, and who asks for a layout alone needs none of it.
    from fanin.datacenter.parallel.build import Model

STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "logits", "embedding_rowwise": "vocabulary"}
)


class Config(Protocol):
    """What is read of a model's config."""

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
    """What a model says of itself, in our words. Raises UnsupportedModel."""
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
    return Layout(
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

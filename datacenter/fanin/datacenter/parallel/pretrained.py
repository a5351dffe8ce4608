"""Models of the ``transformers`` library, described by their configs and plans: no code of theirs is known here.

Data parallelism needs nothing of a model. FSDP2 shards its longest list of layers one layer at a time. A model of the
Llama family also has a plan for tensor parallelism, keyed by module names, and a config with its sizes. The module
itself is unchanged, except that it keeps no cache and returns its logits alone. So each stage of a pipeline runs the
forward of the whole model: it must not change the tensor that its parts hand on, which is tried here. What a model
lacks for ``tp`` or ``pp`` is in its Layout (``unfit``).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.datacenter.parallel.pipelines.pipeline import Skip, skeleton
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    # What puts models on ranks takes seconds to import, and who asks for a layout alone needs none of it.
    from fanin.datacenter.parallel.build import Model

STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "logits", "embedding_rowwise": "vocabulary"}
)
NAMED_SIZES: Final[Mapping[str, str]] = MappingProxyType(
    {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "feed_forward": "intermediate_size"}
)
"""A layer's sizes, by their names in a config."""
NO_PLAN: Final = "which brings no plan for tensor parallelism (base_model_tp_plan)"
WITHOUT: Final = "take pp 1 and tp 1, and spread it with dp_shard or dp_replicate"
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
    """A language model of ``transformers``, ready to be spread. Raises UnsupportedModel."""
    from fanin.datacenter.parallel.build import Model

    layout = pretrained_layout(module)
    cast(Config, module.config).use_cache = False

    def logits(module: nn.Module, inputs: object, output: Output) -> Tensor:
        return output.logits

    module.register_forward_hook(logits)
    return Model(module=module, layout=layout, objective=objective)


def pretrained_layout(module: nn.Module) -> Layout:
    """The Layout of a language model of ``transformers``. On the meta device its forward cannot be tried: it has no pp.

    Raises UnsupportedModel if the module is none.
    """
    kind, config = type(module).__name__, cast(Config, getattr(module, "config", None))
    prefix = getattr(module, "base_model_prefix", None)
    if prefix is None or config is None:
        raise UnsupportedModel(
            f"{kind}: got a module without config and base_model_prefix, expected a language model of transformers; "
            "put any other module into a Model with a Layout of its own"
        )
    names = {name for name, _ in module.named_modules()}
    missing = sorted({f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm", "lm_head"} - names)
    if missing:
        fault = f"{kind}, which has no module {', '.join(missing)}, as models of the Llama family have; {WITHOUT}"
        layers = _layer_list(module)
        num_layers = len(list(module.get_submodule(layers).children())) if layers else 1
        sizes = ModelSizes(num_layers=num_layers, num_heads=0, num_kv_heads=0, feed_forward=0)
        return Layout(
            sizes=sizes,
            inputs=(),
            layers=layers,
            outputs=(),
            plan={},
            unfit={"pp": fault, "tp": _planned(kind, config, fault)},
        )
    layout = Layout(
        sizes=_sizes(config),
        inputs=(f"{prefix}.embed_tokens",),
        layers=f"{prefix}.layers",
        outputs=(f"{prefix}.norm", "lm_head"),
        plan={},
        tied=("lm_head.weight", f"{prefix}.embed_tokens.weight") if config.tie_word_embeddings else None,
        # Its positions and its mask are as long as what the model's table, or another stage, gives.
        sequence="layers",
    )
    unfit = dict[Literal["pp", "tp"], str]()
    if not _only_hands_on(module, layout):
        unfit["pp"] = (
            f"{kind}, whose forward changes what its embedding, its layers and its head hand each other, which every "
            "stage would do again; expected pp 1, or a model whose forward hands one tensor on and changes nothing"
        )
    plan = _plan(prefix, config)
    fault = _plan_fault(module, layout, plan)
    if fault:
        unfit["tp"] = fault
        return replace(layout, unfit=unfit)
    # What holds a layer's first matrices is given its input once, for all of them.
    holders = {name.rpartition(".")[0] for name, word in plan.items() if word == "colwise"}
    shared: dict[str, Style] = dict.fromkeys(sorted(holders), "shared")
    styles: dict[str, Style] = {name: STYLES[word] for name, word in plan.items()}
    return replace(layout, plan={f"{prefix}.embed_tokens": "vocabulary", **shared, **styles}, unfit=unfit)


def _sizes(config: Config) -> ModelSizes:
    """The sizes that a mesh must fit; 0 where the config has none, which ``_plan_fault`` reports."""
    return ModelSizes(
        num_layers=config.num_hidden_layers,
        **{size: getattr(config, name, None) or 0 for size, name in NAMED_SIZES.items()},
    )


def _plan(prefix: str, config: Config) -> dict[str, str]:
    """The model's own plan by whole module names; empty if it has none."""
    plan = getattr(config, "base_model_tp_plan", None)
    named = {f"{prefix}.{name}": word for name, word in (plan or {}).items()}
    return named | {"lm_head": "colwise_gather_output"} if plan else {}


def _planned(kind: str, config: Config, fault: str) -> str:
    """What a model of another family lacks for tp: its plan first."""
    return fault if getattr(config, "base_model_tp_plan", None) else f"{kind}, {NO_PLAN}; {WITHOUT}"


def _plan_fault(module: nn.Module, layout: Layout, plan: Mapping[str, str]) -> str:
    """Why ``tp`` cannot split the model by its plan; empty if it can."""
    kind = type(module).__name__
    if not plan:
        return f"{kind}, {NO_PLAN}; {WITHOUT}"
    unknown = ", ".join(f"{name} {word!r}" for name, word in plan.items() if word not in STYLES)
    if unknown:
        return f"{kind}, whose plan splits {unknown}, and tp knows {', '.join(STYLES)}; {WITHOUT}"
    lacking = [name for name in NAMED_SIZES.values() if not getattr(module.config, name, None)]
    if lacking:
        return f"{kind}, whose config has no {', '.join(lacking)}, by which tp divides a layer; {WITHOUT}"
    for name, each in module.get_submodule(layout.layers).named_modules():
        # A layer's number is no part of the names in a plan.
        pattern = f"{layout.layers}.*.{name.partition('.')[2]}"
        if pattern not in plan and any(value.ndim > 1 for value in each.parameters(recurse=False)):
            return (
                f"{kind}, whose plan does not say how {layout.layers}.{name} is split, a {type(each).__name__}; "
                "expected tp 1, or a model whose plan names each matrix of a layer, which mixtures of experts do not"
            )
    return ""


def _layer_list(module: nn.Module) -> str:
    """The name of the list of layers with most parameters, the outermost of equal ones; empty if there is none.

    FSDP2 fetches each of them by itself, so none may share a parameter with the rest of the model.
    """
    lists = {name: each for name, each in module.named_modules() if isinstance(each, nn.ModuleList) and len(each)}
    found = max(lists, key=lambda name: sum(value.numel() for value in lists[name].parameters()), default="")
    owners = dict[int, set[str]]()
    for name, value in module.named_parameters(remove_duplicate=False):
        rest = name.removeprefix(f"{found}.")
        owners.setdefault(id(value), set()).add(rest.partition(".")[0] if rest != name else "")
    return "" if any(len(each) > 1 for each in owners.values()) else found


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

"""Derives the Layout of a language model of the ``transformers`` library from its config and its tensor-parallel plan.

No code here is specific to a model:

- Data parallelism works for every model. FSDP2 shards the longest list of layers one layer at a time.
- Tensor parallelism uses the plan of the model, keyed by module names, and the sizes in its config. Models of the Llama
  family have both.
- Each stage of a pipeline runs the forward function of the complete model. That function must pass one tensor from
  module to module without changing it, which is tested here.

If a model does not support ``tp`` or ``pp``, the reason is in its Layout (``unfit``). The module itself changes in two
ways: it keeps no cache and returns only its logits.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style, patterns_of
from fanin.datacenter.parallel.objective import TOKENS, Objective
from fanin.datacenter.parallel.pipelines.stages import Skip, skeleton
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    # parallel.build takes seconds to import, and a layout alone does not need it.
    from fanin.datacenter.parallel.build import TrainableModel

STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "logits", "embedding_rowwise": "vocabulary"}
)
NAMED_SIZES: Final[Mapping[str, str]] = MappingProxyType(
    {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "feed_forward": "intermediate_size"}
)
"""The sizes of a layer, and their names in a config."""
NO_PLAN: Final = "which has no plan for tensor parallelism (base_model_tp_plan)"
WITHOUT: Final = "use pp 1 and tp 1, and spread it with dp_shard or dp_replicate"
FAILED: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that a forward function may raise if its modules return their inputs."""
PROBE: Final = 3.0
"""Scale of the test values. A soft cap would leave smaller values almost unchanged."""


class PretrainedConfig(Protocol):
    """The fields of a config that are read here."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    use_cache: bool
    base_model_tp_plan: Mapping[str, str] | None


class LogitsOutput(Protocol):
    """The output of a language model."""

    logits: Tensor


def pretrained_model(module: nn.Module, objective: Objective = TOKENS) -> "TrainableModel":
    """Prepare a language model of ``transformers`` for ``build_engine``.

    Args:
        module: the model. It is changed to return only its logits, and to keep no cache.
        objective: the loss and its count.

    Raises:
        UnsupportedModel: ``module`` is not a language model of ``transformers``.
    """
    from fanin.datacenter.parallel.build import TrainableModel

    layout = pretrained_layout(module)
    return TrainableModel(module=logits_only(module), layout=layout, objective=objective)


def logits_only(module: nn.Module) -> nn.Module:
    """Change a model of ``transformers`` to return only its logits, and to keep no cache. Return the same module."""
    cast(PretrainedConfig, module.config).use_cache = False

    def logits(module: nn.Module, inputs: object, output: LogitsOutput) -> Tensor:
        return output.logits

    module.register_forward_hook(logits)
    return module


def pretrained_layout(module: nn.Module) -> Layout:
    """Return the Layout of a language model of ``transformers``.

    If its buffers are on the meta device, the forward function cannot be tested, so the Layout does not support pp.

    Raises:
        UnsupportedModel: ``module`` is not a language model of ``transformers``.
    """
    kind, config = type(module).__name__, cast(PretrainedConfig, getattr(module, "config", None))
    prefix = getattr(module, "base_model_prefix", None)
    if prefix is None or config is None:
        raise UnsupportedModel(
            f"{kind}: got a module without config and base_model_prefix, expected a language model of transformers; "
            "put any other module into a TrainableModel with its own Layout",
            code="FN-1217",
        )
    names = {name for name, _ in module.named_modules()}
    missing = sorted({f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm", "lm_head"} - names)
    if missing:
        fault = f"{kind}, which has no module {', '.join(missing)}, as models of the Llama family have; {WITHOUT}"
        return _undivided_layout(module, {"pp": fault, "tp": _tp_fault(kind, config, fault)})
    layout = Layout(
        sizes=_sizes(config),
        inputs=(f"{prefix}.embed_tokens",),
        layers=f"{prefix}.layers",
        outputs=(f"{prefix}.norm", "lm_head"),
        plan={},
        tied=("lm_head.weight", f"{prefix}.embed_tokens.weight") if config.tie_word_embeddings else None,
        # Positions and mask have the length of the embedding's output, or of the tensor from the previous stage.
        sequence="layers",
    )
    unfit = dict[Literal["pp", "tp"], str]()
    if not _passes_one_tensor(module, layout):
        unfit["pp"] = (
            f"{kind}, whose forward changes the tensor between its embedding, its layers and its head, which every "
            "stage would repeat; expected pp 1, or a model whose forward passes one tensor on without changing it"
        )
    plan = _plan(prefix, config)
    fault = _plan_fault(module, layout, plan)
    if fault:
        unfit["tp"] = fault
        return replace(layout, unfit=unfit)
    return replace(layout, plan=_styles(prefix, plan, names), unfit=unfit)


def _undivided_layout(module: nn.Module, unfit: Mapping[Literal["pp", "tp"], str]) -> Layout:
    """Return the Layout of a model that neither pp nor tp can divide."""
    layers = _layer_list(module)
    num_layers = len(list(module.get_submodule(layers).children())) if layers else 1
    sizes = ModelSizes(num_layers=num_layers, num_heads=0, num_kv_heads=0, feed_forward=0)
    return Layout(sizes=sizes, inputs=(), layers=layers, outputs=(), plan={}, unfit=unfit)


def _styles(prefix: str, plan: Mapping[str, str], names: Collection[str]) -> dict[str, Style]:
    """Return the library's plan in the styles of a Layout, for the modules that this model has."""
    # The parent of a layer's first matrices gathers their input once for all of them.
    parents = {name.rpartition(".")[0] for name, word in plan.items() if word == "colwise"}
    styles: dict[str, Style] = {
        f"{prefix}.embed_tokens": "vocabulary",
        **dict.fromkeys(sorted(parents), "shared"),
        **{name: STYLES[word] for name, word in plan.items()},
    }
    # The library's plan may name modules that only some models of a kind have.
    used = {pattern for name in names for pattern in patterns_of(name, styles)}
    return {name: style for name, style in styles.items() if name in used}


def _sizes(config: PretrainedConfig) -> ModelSizes:
    """Return the sizes that a mesh must fit. A size that the config lacks is 0; ``_plan_fault`` reports it."""
    return ModelSizes(
        num_layers=config.num_hidden_layers,
        **{size: getattr(config, name, None) or 0 for size, name in NAMED_SIZES.items()},
    )


def _plan(prefix: str, config: PretrainedConfig) -> dict[str, str]:
    """Return the model's own tensor-parallel plan by full module names, or an empty one."""
    plan = getattr(config, "base_model_tp_plan", None)
    named = {f"{prefix}.{name}": word for name, word in (plan or {}).items()}
    return named | {"lm_head": "colwise_gather_output"} if plan else {}


def _tp_fault(kind: str, config: PretrainedConfig, fault: str) -> str:
    """Return why a model of another family does not support tp. A missing plan is the first reason."""
    return fault if getattr(config, "base_model_tp_plan", None) else f"{kind}, {NO_PLAN}; {WITHOUT}"


def _plan_fault(module: nn.Module, layout: Layout, plan: Mapping[str, str]) -> str:
    """Return why ``tp`` cannot split the model by its plan, or an empty string if it can."""
    kind = type(module).__name__
    if not plan:
        return f"{kind}, {NO_PLAN}; {WITHOUT}"
    unknown = ", ".join(f"{name} {word!r}" for name, word in plan.items() if word not in STYLES)
    if unknown:
        return f"{kind}, whose plan splits {unknown}, and tp supports {', '.join(STYLES)}; {WITHOUT}"
    lacking = [name for name in NAMED_SIZES.values() if not getattr(module.config, name, None)]
    if lacking:
        return f"{kind}, whose config has no {', '.join(lacking)}, by which tp divides a layer; {WITHOUT}"
    for name, each in module.get_submodule(layout.layers).named_modules():
        # The names in a plan contain no layer numbers.
        pattern = f"{layout.layers}.*.{name.partition('.')[2]}"
        if pattern not in plan and any(value.ndim > 1 for value in each.parameters(recurse=False)):
            return (
                f"{kind}, whose plan does not say how {layout.layers}.{name} is split, a {type(each).__name__}; "
                "expected tp 1, or a model whose plan names each matrix of a layer, which mixtures of experts do not"
            )
    return ""


def _layer_list(module: nn.Module) -> str:
    """Return the name of the ModuleList with the most parameters, the outermost of equal ones, or an empty string.

    FSDP2 gathers each layer separately. If a layer shares a parameter with other parts of the model, the result is
    empty.
    """
    lists = {name: each for name, each in module.named_modules() if isinstance(each, nn.ModuleList) and len(each)}
    largest = max(lists, key=lambda name: sum(value.numel() for value in lists[name].parameters()), default="")
    owners = dict[int, set[str]]()
    for name, value in module.named_parameters(remove_duplicate=False):
        rest = name.removeprefix(f"{largest}.")
        owners.setdefault(id(value), set()).add(rest.partition(".")[0] if rest != name else "")
    return "" if any(len(each) > 1 for each in owners.values()) else largest


def _passes_one_tensor(module: nn.Module, layout: Layout) -> bool:
    """Test whether the forward function returns its input unchanged if all of its modules return theirs.

    The test uses float32 for every model: in half precision a small change could be rounded away.
    """
    layers = (f"{layout.layers}.{index}" for index in range(layout.sizes.num_layers))
    left_out = (*layout.inputs, *layers, *layout.outputs)
    part = skeleton(module, {name: Skip() for name in left_out}).train()
    config, generator = cast(PretrainedConfig, part.config), torch.Generator().manual_seed(0)
    config.use_cache = False
    try:
        shape = (1, 3, config.hidden_size)
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * PROBE
        # The modules that are left have buffers, and no parameters.
        values = values.to(next(module.buffers(), values).device)
        with torch.no_grad(), torch.random.fork_rng([]):
            return torch.equal(cast(LogitsOutput, part(values)).logits, values)
    except FAILED:
        return False

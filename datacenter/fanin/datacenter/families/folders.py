"""The family ``pretrained``: a causal or masked language model of ``transformers`` from a folder.

Every function reads the folder. Only ``build`` and ``files`` are called after the job has started.
"""

from typing import Final

from torch import nn

from fanin.datacenter.families.family import Family, ModelFiles, TokenModel, matmul_values
from fanin.datacenter.models.pretrained import (
    PretrainedSettings,
    exported_of,
    is_masked,
    positions_of,
    pretrained_module,
    pretrained_skeleton,
    vocabulary_of,
    weights_of,
)
from fanin.datacenter.models.pretrained_folder import weights_in
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.transformers_layout import logits_only, pretrained_layout
from fanin.datacenter.watch.flops import Work

NO_PARAMETERS: Final = (
    "*.rotary_emb.inv_freq",
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.attention.bias",
    "*.attention.masked_bias",
    "*.position_ids",
)
"""Buffers that older versions of transformers stored with the weights of Llama, GPT-2, GPT-NeoX and BERT. Newer
versions compute them."""
EXPERTS: Final = "experts"
"""Part of the names of a mixture's parameters. A token is multiplied with some of them only."""


def build(settings: PretrainedSettings, seed: int) -> nn.Module:
    """Return the module, which returns only its logits. Its parameters may still be in ``files``."""
    return logits_only(pretrained_module(settings, seed))


def layout(settings: PretrainedSettings) -> Layout:
    """Return the Layout that the model's config and forward function allow."""
    return pretrained_layout(pretrained_skeleton(settings))


def tokens(settings: PretrainedSettings) -> TokenModel:
    """Return the tokens of the model. A masked model with weights was trained with its own mask token."""
    module = pretrained_skeleton(settings)
    masked = is_masked(module)
    return TokenModel(
        vocabulary=vocabulary_of(module),
        positions=positions_of(module),
        masked=masked,
        own_mask=masked and weights_in(settings.folder) is not None,
    )


def work(settings: PretrainedSettings) -> Work | None:
    """Return the FLOPs of a token, or None for mixtures of experts and for configs without the usual sizes."""
    module = pretrained_skeleton(settings)
    config = module.config
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    if any(EXPERTS in name for name, _ in module.named_parameters()):
        return None
    num_layers, num_heads, width = (int(size) for size in sizes if size is not None)
    head_width = getattr(config, "head_dim", None) or width // num_heads
    return Work(matmul_values=matmul_values(module), num_layers=num_layers, attention_width=2 * num_heads * head_width)


def files(settings: PretrainedSettings, module: nn.Module) -> ModelFiles:
    """Return the weights that each rank reads for itself, and the config for the final weights."""
    names = {name for name, _ in module.named_parameters()}
    copies = (name for name, _ in module.named_parameters(remove_duplicate=False) if name not in names)
    return ModelFiles(
        weights=weights_of(settings, module), aside=(*NO_PARAMETERS, *copies), exported=exported_of(settings)
    )


PRETRAINED: Final = Family(config=PretrainedSettings, build=build, layout=layout, tokens=tokens, work=work, files=files)

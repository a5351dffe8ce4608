"""The family ``decoder``: ``models.decoder``, with presets of published sizes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fanin.datacenter.families.family import Family, TokenModel
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.watch.flops import Work

PRESETS: Final[Mapping[str, DecoderConfig]] = MappingProxyType(
    {
        "tiny": DecoderConfig(),
        "8m": DecoderConfig(
            vocabulary=8192, width=256, num_layers=6, num_heads=8, num_kv_heads=4, feed_forward=704, tied=True
        ),
        "125m": DecoderConfig(
            vocabulary=32_000, width=768, num_layers=12, num_heads=12, num_kv_heads=12, feed_forward=2048
        ),
        "350m": DecoderConfig(
            vocabulary=32_000, width=1024, num_layers=24, num_heads=16, num_kv_heads=16, feed_forward=2816
        ),
        "1.5b": DecoderConfig(
            vocabulary=32_000, width=2048, num_layers=28, num_heads=16, num_kv_heads=16, feed_forward=5504
        ),
        "8b": DecoderConfig(
            vocabulary=128_256,
            width=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            feed_forward=14_336,
            rotary_base=500_000.0,
        ),
        "70b": DecoderConfig(
            vocabulary=128_256,
            width=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            feed_forward=28_672,
            rotary_base=500_000.0,
        ),
    }
)
"""Configs by name. ``8b`` and ``70b`` have the sizes of Llama 3 (arXiv 2407.21783, table 3)."""


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


def decoder_layout(config: DecoderConfig) -> Layout:
    """Return the Layout of a decoder."""
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


def decoder_tokens(config: DecoderConfig) -> TokenModel:
    """Return the tokens of a decoder. Rotary positions allow any length."""
    return TokenModel(vocabulary=config.vocabulary)


def decoder_work(config: DecoderConfig) -> Work:
    """Return the FLOPs of a token: 4 matrices of attention, 3 of SwiGLU, and the head."""
    attention = 2 * config.width * (config.width + config.num_kv_heads * config.head_width)
    layer = attention + 3 * config.width * config.feed_forward
    return Work(
        matmul_values=config.num_layers * layer + config.width * config.vocabulary,
        num_layers=config.num_layers,
        attention_width=2 * config.width,
    )


DECODER: Final = Family(
    config=DecoderConfig,
    build=Decoder,
    layout=decoder_layout,
    tokens=decoder_tokens,
    work=decoder_work,
    presets=PRESETS,
    planned=True,
)

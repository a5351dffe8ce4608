"""The family ``encoder``: ``models.encoder``, which predicts masked tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fanin.datacenter.families.family import Family, TokenModel
from fanin.datacenter.models.encoder import Encoder, EncoderConfig
from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.datacenter.watch.flops import Work

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


def encoder_layout(config: EncoderConfig) -> Layout:
    """Return the Layout of an encoder."""
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


def encoder_tokens(config: EncoderConfig) -> TokenModel:
    """Return the tokens of an encoder. Its positions are a table."""
    return TokenModel(vocabulary=config.vocabulary, positions=config.context, masked=True)


def encoder_work(config: EncoderConfig) -> Work:
    """Return the FLOPs of a token: 4 matrices of attention, 2 of the feed-forward layer, the transform and the head."""
    layer = 4 * config.width**2 + 2 * config.width * config.feed_forward
    return Work(
        matmul_values=config.num_layers * layer + config.width * (config.width + config.vocabulary),
        num_layers=config.num_layers,
        attention_width=2 * config.width,
    )


ENCODER: Final = Family(
    config=EncoderConfig, build=Encoder, layout=encoder_layout, tokens=encoder_tokens, work=encoder_work
)

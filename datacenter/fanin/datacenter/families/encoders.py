"""The family ``encoder``: ``models.encoder``, which predicts masked tokens."""

from typing import Final

from fanin.datacenter.families.family import Family, TokenModel
from fanin.datacenter.models.encoder import Encoder, EncoderConfig
from fanin.datacenter.parallel.layout import encoder_layout
from fanin.datacenter.watch.flops import Work


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

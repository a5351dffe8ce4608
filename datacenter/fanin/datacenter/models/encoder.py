"""An encoder-only transformer of the BERT family (Devlin et al. 2018, arXiv 1810.04805, section 3).

It has learned positions, bidirectional attention, a norm after each part, and a head that predicts masked tokens. Like
``models.decoder`` it does not depend on ranks. A layer maps one tensor to one tensor, and the padding mask is an
argument of every layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fanin.datacenter.models.seeding import seeded
from fanin.protos.errors import InvalidInput

INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The sizes of an encoder. ``context`` is the longest sequence in tokens; ``tied`` is as in the decoder."""

    vocabulary: int = 256
    context: int = 64
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    feed_forward: int = 256
    norm_epsilon: float = 1e-12
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "num_layers", "num_heads", "feed_forward"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"encoder: got {name} {getattr(self, name)}, expected at least 1", code="FN-1214")
        if self.width % self.num_heads:
            raise InvalidInput(
                f"encoder: got width {self.width} and {self.num_heads} heads, expected a width that is a multiple of "
                "num_heads; change one of them",
                code="FN-1214",
            )


class Embeddings(nn.Module):
    """The sum of the token and position embeddings, normed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to (B, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream: Tensor = self.norm(self.tokens(tokens) + self.positions(positions))
        return stream


class Attention(nn.Module):
    """Bidirectional attention."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape. ``mask`` (B, 1, 1, T) is True at visible tokens; None: all."""
        query, key, value = (
            project(x).reshape(*x.shape[:2], -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        output: Tensor = self.down(gelu(self.up(x)))
        return output


class Layer(nn.Module):
    """Attention and feed-forward, each added to the stream and followed by a norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        x = self.attention_norm(x + self.attention(x, mask))
        output: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return output


class Encoder(nn.Module):
    """Maps tokens (B, T), T at most ``context``, to logits (B, T, vocabulary) of the token at each position."""

    def __init__(self, config: EncoderConfig, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = Embeddings(config)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
            self.transform = nn.Sequential(
                nn.Linear(config.width, config.width), nn.GELU(), nn.LayerNorm(config.width, eps=config.norm_epsilon)
            )
            self.head = nn.Linear(config.width, config.vocabulary)
            for name, value in self.named_parameters():
                if value.ndim > 1:
                    nn.init.normal_(value, std=INITIAL_STD)
                elif name.endswith("bias"):
                    nn.init.zeros_(value)
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits (B, T, vocabulary); ``attention_mask`` (B, T) is 0 at padding."""
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        stream: Tensor = self.embed(tokens)
        for layer in self.layers:
            stream = layer(stream, mask)
        logits: Tensor = self.head(self.transform(stream))
        return logits

"""A decoder-only transformer of the Llama family (Touvron et al. 2023, arXiv 2302.13971, section 2.2).

RMSNorm before each part (Zhang and Sennrich 2019, arXiv 1910.07467), rotary positions (Su et al. 2021, arXiv
2104.09864), SwiGLU (Shazeer 2020, arXiv 2002.05202) and grouped-query attention (Ainslie et al. 2023, arXiv
2305.13245).
The model does not depend on ranks, and each of its parts can run alone. Attention uses the number of heads in the
output of its projections. A layer maps one tensor to one tensor. Rotations are computed in each layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from fanin.datacenter.models.seeding import seeded
from fanin.protos.errors import InvalidInput

INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder. ``tied``: the embedding table is also the output matrix."""

    vocabulary: int = 256
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    feed_forward: int = 192
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "num_layers", "num_heads", "num_kv_heads", "feed_forward"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"decoder: got {name} {getattr(self, name)}, expected at least 1", code="FN-1214")
        if self.width % (2 * self.num_heads):
            raise InvalidInput(
                f"decoder: got width {self.width} and {self.num_heads} heads, expected a width that is a multiple of "
                f"2 x num_heads = {2 * self.num_heads}; change one of them",
                code="FN-1214",
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"decoder: got {self.num_heads} heads and {self.num_kv_heads} kv heads, expected num_heads to be a "
                "multiple of num_kv_heads; change one of them",
                code="FN-1214",
            )

    @property
    def head_width(self) -> int:
        """Values of a query, key or value of one head."""
        return self.width // self.num_heads


class Attention(nn.Module):
    """Causal attention; each key and value head serves a group of query heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.rotary_base = config.rotary_base
        kv_width = config.num_kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        cos, sin = rotations(query, self.rotary_base)
        grouped = query.shape[1] != key.shape[1]
        attended = scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=grouped
        )
        mixed: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """Map (B, T, heads * head width) to (B, heads, T, head width)."""
        return x.reshape(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


def rotations(x: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the angles for ``x`` (..., T, head width), each (T, head width / 2), at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Only the compiler needs the operator. A graph format has no form of it, so an export traces the plain one.
    compute = _rotations if torch.compiler.is_dynamo_compiling() else _plain_rotations
    return compute(x.shape[-2], x.shape[-1] // 2, base, dtype, x.device)


def _plain_rotations(
    length: int, half: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    rates = base ** (torch.arange(half, dtype=dtype, device=device) / -half)
    angles = torch.outer(torch.arange(length, dtype=dtype, device=device), rates)
    return angles.cos(), angles.sin()


@torch.library.custom_op("fanin::rotations", mutates_args=())
def _rotations(length: int, half: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``rotations`` as an operator that the compiler does not open.

    Otherwise it would compute the cosine and the sine anew for every element of every query and key. On an H200, that
    took a fifth of the step of a decoder of 1.5 B parameters.
    """
    return _plain_rotations(length, half, base, dtype, device)


@_rotations.register_fake
def _(length: int, half: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (length, half)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` with its two halves rotated, in the dtype of ``x``."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        output: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """Attention and feed-forward, each applied to the normed stream and added to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class Decoder(nn.Module):
    """A language model: maps tokens (B, T) of any length to logits (B, T, vocabulary) of each next token."""

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(config.vocabulary, config.width)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
            self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            self._initialize(config)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary)."""
        stream: Tensor = self.embed(tokens)
        for layer in self.layers:
            stream = layer(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    def _initialize(self, config: DecoderConfig) -> None:
        # GPT-2's rule: the output of each layer is scaled by the number of layers, so the stream keeps its scale.
        added_std = INITIAL_STD / (2 * config.num_layers) ** 0.5
        for name, value in self.named_parameters():
            if value.ndim > 1:
                nn.init.normal_(value, std=added_std if name.endswith(("out.weight", "down.weight")) else INITIAL_STD)

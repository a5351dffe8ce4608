"""A decoder-only transformer that predicts the next token.

It has learned positions, causal attention, and blocks with the norm first. RMSNorm and SiLU are the choices of newer
decoders.

Reference:
    Vaswani et al. 2017, arXiv 1706.03762, section 3.2, for attention.
    Radford et al. 2019 and Xiong et al. 2020, arXiv 2002.04745, for the norm first.
    Zhang and Sennrich 2019, arXiv 1910.07467, for RMSNorm.
    Elfwing et al. 2017, arXiv 1702.03118, for SiLU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fanin.datacenter.models.seeding import seeded

NORMS: Final[Mapping[str, Callable[[int], nn.Module]]] = MappingProxyType({"layer": nn.LayerNorm, "rms": nn.RMSNorm})
ACTIVATIONS: Final[Mapping[str, Callable[[], nn.Module]]] = MappingProxyType({"gelu": nn.GELU, "silu": nn.SiLU})
INITIAL_STD: Final = 0.02
"""Standard deviation of the embeddings, as in GPT-2. torch's 1.0 would dominate the output of the first blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder. ``context`` is the longest sequence in tokens."""

    vocabulary: int = 256
    context: int = 64
    width: int = 64
    num_heads: int = 4
    num_blocks: int = 2
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "silu"] = "gelu"

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"decoder: got width {self.width} and {self.num_heads} heads, expected a multiple")


class Attention(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        num, length, width = x.shape
        heads = self.qkv(x).reshape(num, length, 3, self.num_heads, width // self.num_heads)
        # Each (B, heads, T, width / heads).
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(dim=2))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(attended.transpose(1, 2).reshape(num, length, width))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer perceptron, each applied to the normed stream and added to it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = NORMS[shape.norm](shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = NORMS[shape.norm](shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            ACTIVATIONS[shape.activation](),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class DecoderTransformer(nn.Module):
    """Maps tokens ``x`` (B, T) int32, T at most ``shape.context``, to logits (B, T, vocabulary) of each next token."""

    def __init__(self, seed: int = 0, shape: DecoderShape | None = None) -> None:
        super().__init__()
        shape = shape or DecoderShape()
        with seeded(seed):
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
            for table in (self.tokens, self.positions):
                nn.init.normal_(table.weight, std=INITIAL_STD)
            self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.num_blocks)))
            self.norm = NORMS[shape.norm](shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary)."""
        stream = self.tokens(x) + self.positions.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits

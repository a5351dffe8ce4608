"""Masked-token samples: the training data of an encoder (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

15 % of the positions of a window are prediction targets. The model reads the mask token at 80 % of these targets, a
random token at 10 % and the original token at 10 %. All other positions have the target NO_TOKEN.

Invariant: the targets and the tokens at them are a function of the seed, the epoch and the position in the text alone.
Every mesh, and every resumed job, therefore has the same samples.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.datacenter.data.samples import Tokens
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Float64s, Int64s
from fanin.protos.errors import InvalidInput

TARGET_SHARE: Final = 0.15
"""Share of the positions that are prediction targets."""
MASKED, REPLACED = 0.8, 0.1
"""Shares of the targets that are replaced by the mask and by a random token. The others keep the original token."""
UINT64_BITS, FLOAT64_BITS = 64, 53


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """A text cut into windows of ``length`` tokens, some of them hidden.

    The windows follow each other without overlap, except that the last one starts early enough to be full. Each window
    has at least one target: if no position falls below the target share, the one with the lowest draw is the target.

    Attributes:
        tokens: The text, as token ids.
        length: Tokens in a window.
        num_tokens: Size of the text's vocabulary; its ids are 0 to ``num_tokens - 1``.
        seed: Seed of the job.
        stream: Number that separates the draws of the training set from those of the held-out set.
        epoch: Epoch whose positions are hidden.
        per_token: Whether ``count`` counts targets; otherwise it counts windows.
        mask: Id of the mask token; by default ``num_tokens``, the next free id.
    """

    tokens: Tokens
    length: int
    num_tokens: int
    seed: int
    stream: int = 0
    epoch: int = 0
    per_token: bool = True
    mask: int | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) < self.length:
            raise InvalidInput(
                f"tokens: got {len(self.tokens)}, expected at least {self.length}, one window; use more data, or a "
                "shorter sequence",
                code="FN-1236",
            )

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.length)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """Return (tokens with some hidden, original tokens at the targets and NO_TOKEN elsewhere), each (n, length)."""
        starts = np.minimum(indices * self.length, len(self.tokens) - self.length)
        tokens = self.tokens[starts[:, None] + np.arange(self.length)].astype(np.int64)
        target_draw, kind_draw, token_draw = self._draw(indices)
        is_target = _targets(target_draw)
        random_tokens = (token_draw * self.num_tokens).astype(np.int64)
        mask = self.num_tokens if self.mask is None else self.mask
        unmasked = np.where(kind_draw < MASKED + REPLACED, random_tokens, tokens)
        shown = np.where(kind_draw < MASKED, mask, unmasked)
        inputs, targets = np.where(is_target, shown, tokens), np.where(is_target, tokens, NO_TOKEN)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def count(self, indices: Int64s) -> int:
        """Return the number of targets in these windows, or of windows if ``per_token`` is False."""
        return int(_targets(self._draw(indices)[0]).sum()) if self.per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Return the number of tokens read. The model processes every token, hidden or not."""
        return len(indices) * self.length

    def of_epoch(self, epoch: int) -> "MaskedSamples":
        """Return the same windows with the hidden positions of another epoch."""
        return replace(self, epoch=epoch)

    def _draw(self, indices: Int64s) -> tuple[Float64s, Float64s, Float64s]:
        """Return three random numbers in [0, 1) for each position, each array (n, length)."""
        keys = np.random.SeedSequence([self.seed, self.stream, self.epoch]).generate_state(3, np.uint64)
        positions = (indices[:, None] * self.length + np.arange(self.length)).astype(np.uint64)
        target_draw, kind_draw, token_draw = (_uniform(key, positions) for key in keys)
        return target_draw, kind_draw, token_draw


def _targets(draw: Float64s) -> npt.NDArray[np.bool_]:
    """Return which positions (n, length) are targets: those below the share, and the lowest draw of each window."""
    lowest: Float64s = draw.min(axis=1, keepdims=True)
    return np.less(draw, np.maximum(TARGET_SHARE, np.nextafter(lowest, 1.0)))


def _uniform(key: np.uint64, positions: npt.NDArray[np.uint64]) -> Float64s:
    """Return the numbers at these positions of a key's SplitMix64 sequence, with random access.

    Reference:
        Steele, Lea and Flood 2014 (doi 10.1145/2660193.2660195), with its mix64variant13.
    """
    mixed = key + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(UINT64_BITS - FLOAT64_BITS)).astype(np.float64) * 2.0**-FLOAT64_BITS

"""Masked tokens: what an encoder learns from a text (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

Of the places of a window 15 % are asked for. Of those, 80 % read as the mask, 10 % as some token of the text, and 10 %
as what they are; every other place is not asked for. Which, and how, is a function of the seed, the epoch and the place
in the text, and of nothing else: any mesh, and a job that goes on, has the same ones.
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

ASKED: Final = 0.15
MASKED, REPLACED = 0.8, 0.1
"""Of those that are asked for; the rest stay."""
UINT64_BITS, FLOAT64_BITS = 64, 53


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """A text as windows of ``length`` end to end, of which the last one begins earlier, so that it is whole.

    ``num_tokens``: the text's, from 0. ``mask``: the id of the mask, by default the next one. ``stream`` tells what is
    held out from what is trained on. A window of which chance asks nothing is asked for the place that came next to it.
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
            raise InvalidInput(f"text: got {len(self.tokens)} tokens, expected at least {self.length}, one window")

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.length)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """(tokens of which some are hidden, the hidden ones and NO_TOKEN elsewhere), each (n, length)."""
        starts = np.minimum(indices * self.length, len(self.tokens) - self.length)
        tokens = self.tokens[starts[:, None] + np.arange(self.length)].astype(np.int64)
        asked, way, other = self._draw(indices)
        hidden = _chosen(asked)
        others = (other * self.num_tokens).astype(np.int64)
        mask = self.num_tokens if self.mask is None else self.mask
        shown = np.where(way < MASKED, mask, np.where(way < MASKED + REPLACED, others, tokens))
        inputs, targets = np.where(hidden, shown, tokens), np.where(hidden, tokens, NO_TOKEN)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def count(self, indices: Int64s) -> int:
        """Windows, or the places asked for in them."""
        return int(_chosen(self._draw(indices)[0]).sum()) if self.per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Tokens read: all of them are work."""
        return len(indices) * self.length

    def of_epoch(self, epoch: int) -> "MaskedSamples":
        """With the places of another epoch hidden."""
        return replace(self, epoch=epoch)

    def _draw(self, indices: Int64s) -> tuple[Float64s, Float64s, Float64s]:
        """Three numbers from 0 to below 1 for each place (n, length)."""
        keys = np.random.SeedSequence([self.seed, self.stream, self.epoch]).generate_state(3, np.uint64)
        places = (indices[:, None] * self.length + np.arange(self.length)).astype(np.uint64)
        asked, way, other = (_uniform(key, places) for key in keys)
        return asked, way, other


def _chosen(asked: Float64s) -> npt.NDArray[np.bool_]:
    least: Float64s = asked.min(axis=1, keepdims=True)
    return np.less(asked, np.maximum(ASKED, np.nextafter(least, 1.0)))


def _uniform(key: np.uint64, places: npt.NDArray[np.uint64]) -> Float64s:
    """The numbers at these places of the sequence that SplitMix64 makes of a key: any of them at once.

    Steele, Lea and Flood 2014 (doi 10.1145/2660193.2660195), with its mix64variant13.
    """
    mixed = key + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(UINT64_BITS - FLOAT64_BITS)).astype(np.float64) * 2.0**-FLOAT64_BITS

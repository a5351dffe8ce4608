"""Random values on any device: Philox4x32-10 in torch's integers.

An example's values take the words of the counters (block, number of the example, 0, 0), block = 0, 1, 2, ...: four
words a block. ``edge.runtimes.randomness`` defines the generator and the uniform values, and computes them with numpy.
A tested twin: the words and uniform values here are equal to those. Normal values differ in the last digits.

Products of two words fill the 64 bits of an integer. Their sign does not matter, because each half is masked.
"""

import math
from typing import Final

import torch
from torch import Tensor

from fanin.edge.runtimes.randomness import ROUNDS, WEYL, RandomKind

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
LOW: Final = 0xFFFFFFFF
CACHED: Final = 1 << 15
"""Counters that a CPU computes at a time: their words stay in its cache, which is twice as fast."""


def draw_rows(kind: RandomKind, key: int, examples: range, num: int, device: torch.device) -> Tensor:
    """Return ``num`` float32 values for each example, (examples, num).

    Args:
        kind: ``uniform`` in [0, 1), or ``normal`` with mean 0 and variance 1.
        key: 64 bits.
        examples: the global numbers of the examples.
        num: values of an example.
        device: where the values are computed.
    """
    words = philox_rows(key, examples, num, device)
    if kind == "uniform":
        return (words >> 8).to(torch.float32) * 2.0**-24
    normal: Tensor = torch.special.ndtri((words.double() + 0.5) * 2.0**-32)
    return normal.float()


def philox_rows(key: int, examples: range, num: int, device: torch.device) -> Tensor:
    """Return the first ``num`` words of each example's stream, (examples, num) int64 below 2**32."""
    num_blocks = math.ceil(num / 4)
    total = len(examples) * num_blocks
    size = CACHED if device.type == "cpu" else max(1, total)
    parts = []
    for start in range(0, total, size):
        index = torch.arange(start, min(start + size, total), device=device)
        parts.append(_philox(index % num_blocks, index // num_blocks + examples.start, key))
    words = torch.cat(parts) if parts else torch.zeros((0, 4), dtype=torch.int64, device=device)
    return words.reshape(len(examples), num_blocks * 4)[:, :num]


def _philox(first: Tensor, second: Tensor, key: int) -> Tensor:
    """Return the words (n, 4) of the counters (first, second, 0, 0), each (n,)."""
    third, fourth = torch.zeros_like(first), torch.zeros_like(first)
    keys = [key & LOW, key >> 32]
    for _ in range(ROUNDS):
        left, right = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first = (right >> 32).bitwise_xor_(second).bitwise_xor_(keys[0]).bitwise_and_(LOW)
        third = (left >> 32).bitwise_xor_(fourth).bitwise_xor_(keys[1]).bitwise_and_(LOW)
        second, fourth = right.bitwise_and_(LOW), left.bitwise_and_(LOW)
        keys = [(word + step) & LOW for word, step in zip(keys, WEYL, strict=True)]
    return torch.stack((first, second, third, fourth), dim=-1)

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
    first = torch.arange(num_blocks, device=device).expand(len(examples), num_blocks)
    second = torch.arange(examples.start, examples.stop, device=device)[:, None]
    third = fourth = torch.zeros((), dtype=torch.int64, device=device)
    keys = [key & LOW, key >> 32]
    for _ in range(ROUNDS):
        left, right = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second = ((right >> 32) ^ second ^ keys[0]) & LOW, right & LOW
        third, fourth = ((left >> 32) ^ fourth ^ keys[1]) & LOW, left & LOW
        keys = [(word + step) & LOW for word, step in zip(keys, WEYL, strict=True)]
    words = torch.stack(torch.broadcast_tensors(first, second, third, fourth), dim=-1)  # type: ignore[no-untyped-call]
    return words.flatten(1)[:, :num]

"""What a job trains on, in an order that knows no ranks.

A global batch is decided by (seed, epoch) and the samples already taken of it, so any mesh sees the same batches, and
a job that goes on at another degree of data parallelism goes on with the next sample. A rank loads its own part alone.
A batch that cannot be divided is filled up with samples that say nothing: integers of NO_TOKEN, floats that are NaN.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.clients.data.examples import Examples, Int64s
from fanin.datacenter.parallel.batch import Batch
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

Tokens = npt.NDArray[np.integer]
MIN_WINDOWS: Final = 1


class Samples(Protocol):
    """Samples by their number. ``count`` is what the loss of some of them is divided by, ``units`` what speed is told
    in: tokens where there are some, else samples. ``of_epoch``: as they are in an epoch, where that makes a difference.
    """

    def __len__(self) -> int: ...

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]: ...

    def count(self, indices: Int64s) -> int: ...

    def units(self, indices: Int64s) -> int: ...

    def of_epoch(self, epoch: int) -> "Samples": ...


class ExampleSamples:
    """Examples; floats come in ``dtype``. ``per_token``: a loss is divided by tokens, else by samples."""

    def __init__(self, examples: Examples, *, per_token: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self._examples = examples
        self._per_token = per_token
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._examples)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of these; labels are int64, on which torch's own losses insist."""
        x, y = torch.from_numpy(self._examples.x[indices]), torch.from_numpy(self._examples.y[indices])
        inputs = x.to(self._dtype) if x.is_floating_point() else x
        return inputs, y.to(self._dtype) if y.is_floating_point() else y.long()

    def count(self, indices: Int64s) -> int:
        """Samples, or the tokens asked for in them."""
        return self.units(indices) if self._per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Tokens asked for, or samples."""
        is_tokens = self._examples.y.ndim > 1 and self._examples.y.dtype == np.int32
        return int((self._examples.y[indices] != NO_TOKEN).sum()) if is_tokens else len(indices)

    def of_epoch(self, epoch: int) -> "ExampleSamples":
        """The same in each."""
        return self


class WindowSamples:
    """A text as windows end to end: ``length`` tokens and the tokens after them; the last is filled with NO_TOKEN."""

    def __init__(self, tokens: Tokens, length: int, *, per_token: bool = True) -> None:
        if len(tokens) < MIN_WINDOWS * length + 1:
            raise InvalidInput(f"text: got {len(tokens)} tokens, expected at least {length + 1}, one window")
        self._tokens = tokens
        self._length = length
        self._per_token = per_token

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._length)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """(tokens, next tokens), each (n, length)."""
        places = indices[:, None] * self._length + np.arange(self._length)
        last = len(self._tokens) - 1
        inputs = self._tokens[np.minimum(places, last)]
        targets = np.where(places < last, self._tokens[np.minimum(places + 1, last)].astype(np.int64), NO_TOKEN)
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets)

    def count(self, indices: Int64s) -> int:
        """Windows, or the tokens asked for in them."""
        return self.units(indices) if self._per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Tokens asked for."""
        return int(np.minimum(self._length, len(self._tokens) - 1 - indices * self._length).sum())

    def of_epoch(self, epoch: int) -> "WindowSamples":
        """The same in each."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a job is: samples ``taken`` of an ``epoch``. It says nothing of ranks or batches."""

    epoch: int = 0
    taken: int = 0


class Order:
    """The order in which ``num`` samples are taken, another one in each epoch."""

    def __init__(self, num: int, seed: int) -> None:
        self._num = num
        self._permutation = lru_cache(maxsize=1)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(num))

    def next_batch(self, cursor: Cursor, size: int) -> tuple[Int64s, Cursor]:
        """(the samples, the cursor after them); an epoch's last batch may be short. Raises InvalidInput."""
        if cursor.taken >= self._num:
            raise InvalidInput(
                f"samples: got {self._num}, of which {cursor.taken} were taken in epoch {cursor.epoch}, expected more: "
                "these are not what the job began with; go on with those, or begin anew"
            )
        stop = min(cursor.taken + size, self._num)
        after = Cursor(epoch=cursor.epoch, taken=stop) if stop < self._num else Cursor(epoch=cursor.epoch + 1)
        return self._permutation(cursor.epoch)[cursor.taken : stop], after


def part_of(samples: Samples, indices: Int64s, share: tuple[int, int], multiple: int) -> Batch:
    """The part ``share`` (which, of how many) of some samples, filled up to a ``multiple`` of samples."""
    which, parts = share
    size = -(-len(indices) // multiple) * multiple
    filled = np.concatenate([indices, np.repeat(indices[:1], size - len(indices))])
    mine = slice(size // parts * which, size // parts * (which + 1))
    inputs, targets = samples.take(filled[mine])
    nothing = np.arange(size)[mine] >= len(indices)
    if nothing.any():
        targets[torch.from_numpy(nothing)] = float("nan") if targets.is_floating_point() else NO_TOKEN
    return Batch(inputs=inputs, targets=targets)

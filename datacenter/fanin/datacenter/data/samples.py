"""Samples of a datacenter job and their order, which does not depend on the number of ranks.

A global batch is a function of (seed, epoch) and of the number of samples already taken in the epoch. Every mesh
therefore has the same batches. A job that resumes with another degree of data parallelism continues with the next
sample. Each rank loads only its own share of a batch.

A batch that does not divide evenly is padded with samples that carry no target (``objective.mark_padding``).
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.clients.data.examples import Examples
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.objective import mark_padding
from fanin.edge.runtimes.graphs import NO_TOKEN, X
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

Tokens = npt.NDArray[np.integer]
MIN_WINDOWS: Final = 1
NUM_DIGESTED: Final = 64
"""Samples that a digest reads: few enough for a file on a network, and enough to notice another order."""


class Samples(Protocol):
    """Samples that are addressed by their number, from 0."""

    def __len__(self) -> int: ...

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of these samples."""

    def count(self, indices: Int64s) -> int:
        """Return the divisor of the summed loss of these samples: tokens or samples."""

    def units(self, indices: Int64s) -> int:
        """Return the amount of work in these samples, for throughput: tokens if there are any, otherwise samples."""

    def of_epoch(self, epoch: int) -> "Samples":
        """Return the samples of an epoch. Most kinds are the same in every epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplit:
    """Samples to train on, and held-out samples to evaluate on."""

    train: Samples
    held_out: Samples


class ExampleSamples:
    """Samples from arrays of examples.

    Args:
        examples: The arrays, the only input ``x`` (n, ...) and y (n, ...).
        per_token: Whether the loss is divided by tokens; otherwise it is divided by samples.
        dtype: The dtype of floating-point inputs and targets.
    """

    def __init__(self, examples: Examples, *, per_token: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self._examples = examples
        self._per_token = per_token
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._examples)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of these samples. Labels are int64, which torch's loss functions require."""
        x, y = torch.from_numpy(self._examples.inputs[X][indices]), torch.from_numpy(self._examples.y[indices])
        inputs = x.to(self._dtype) if x.is_floating_point() else x
        return inputs, y.to(self._dtype) if y.is_floating_point() else y.long()

    def count(self, indices: Int64s) -> int:
        """Return the number of samples, or of their target tokens if ``per_token`` is set."""
        return self.units(indices) if self._per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Return the number of target tokens, or of samples if the targets are not token sequences."""
        is_tokens = self._examples.y.ndim > 1 and self._examples.y.dtype == np.int32
        return int((self._examples.y[indices] != NO_TOKEN).sum()) if is_tokens else len(indices)

    def of_epoch(self, epoch: int) -> "ExampleSamples":
        """Return these samples, which are the same in every epoch."""
        return self


class WindowSamples:
    """A text cut into consecutive windows, with the next tokens as targets.

    Each window has ``length`` tokens and the ``length`` tokens that follow each of them. The targets of the last window
    are padded with NO_TOKEN.
    """

    def __init__(self, tokens: Tokens, length: int, *, per_token: bool = True) -> None:
        if len(tokens) < MIN_WINDOWS * length + 1:
            raise InvalidInput(
                f"tokens: got {len(tokens)}, expected at least {length + 1}, one window of {length} and the token "
                "after it; use more data, or a shorter sequence",
                code="FN-1236",
            )
        self._tokens = tokens
        self._length = length
        self._per_token = per_token

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._length)

    def take(self, indices: Int64s) -> tuple[Tensor, Tensor]:
        """Return (tokens, next tokens), each (n, length)."""
        positions = indices[:, None] * self._length + np.arange(self._length)
        last = len(self._tokens) - 1
        inputs = self._tokens[np.minimum(positions, last)]
        next_tokens = self._tokens[np.minimum(positions + 1, last)].astype(np.int64)
        targets = np.where(positions < last, next_tokens, NO_TOKEN)
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets)

    def count(self, indices: Int64s) -> int:
        """Return the number of target tokens, or of windows if ``per_token`` is False."""
        return self.units(indices) if self._per_token else len(indices)

    def units(self, indices: Int64s) -> int:
        """Return the number of target tokens."""
        return int(np.minimum(self._length, len(self._tokens) - 1 - indices * self._length).sum())

    def of_epoch(self, epoch: int) -> "WindowSamples":
        """Return these samples, which are the same in every epoch."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position of a job in its data: samples ``taken`` in an ``epoch``. It depends on neither ranks nor batch size."""

    epoch: int = 0
    taken: int = 0


class SampleOrder:
    """The order in which ``num`` samples are taken: a new permutation in each epoch."""

    def __init__(self, num: int, seed: int) -> None:
        self._num = num
        self._permutation = lru_cache(maxsize=1)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(num))

    def next_batch(self, cursor: Cursor, size: int) -> tuple[Int64s, Cursor]:
        """Return the next samples and the cursor after them.

        The last batch of an epoch may have fewer than ``size`` samples.

        Raises:
            InvalidInput: The cursor is past the end of the epoch.
        """
        if cursor.taken >= self._num:
            raise InvalidInput(
                f"samples: got {self._num}, of which {cursor.taken} were taken in epoch {cursor.epoch}, expected more: "
                "the job began with other data; resume with that data, or start a new job",
                code="FN-1342",
            )
        stop = min(cursor.taken + size, self._num)
        after = Cursor(epoch=cursor.epoch, taken=stop) if stop < self._num else Cursor(epoch=cursor.epoch + 1)
        return self._permutation(cursor.epoch)[cursor.taken : stop], after


def samples_digest(samples: Samples) -> int:
    """Return a digest of the number of samples and of some of them, evenly spaced, as ``take`` returns them.

    Other data and another order of the same data have another digest, unless all samples that are read are the same.

    Returns:
        A number of 48 bits, which JSON stores exactly.
    """
    first = samples.of_epoch(0)
    indices = np.unique(np.linspace(0, len(first) - 1, NUM_DIGESTED).astype(np.int64))
    digest = sha256(str(len(first)).encode())
    for values in first.take(indices):
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")


def batch_share(samples: Samples, indices: Int64s, share: tuple[int, int], multiple: int) -> Batch:
    """Return one rank's share of a global batch.

    Args:
        samples: Where the samples come from.
        indices: Numbers of the samples in the global batch.
        share: (index of the share, number of shares).
        multiple: The global batch is padded to a multiple of this many samples.
    """
    which, num_shares = share
    size = -(-len(indices) // multiple) * multiple
    padded = np.concatenate([indices, np.repeat(indices[:1], size - len(indices))])
    mine = slice(size // num_shares * which, size // num_shares * (which + 1))
    inputs, targets = samples.take(padded[mine])
    is_padding = np.arange(size)[mine] >= len(indices)
    if is_padding.any():
        mark_padding(targets, torch.from_numpy(is_padding))
    return Batch(inputs=inputs, targets=targets)

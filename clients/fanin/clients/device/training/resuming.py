"""When a device saves the state of its training, and how a training that was cut off resumes from it.

A training is a pure function of what it starts from. After step k of a pass its state is: the parameters, the
optimizer's state, the number k, the number of the pass and the result of the pass before (``passes``), and the sum of
the losses. The order of the batches and all random inputs follow from (seed, partition, Round) and from k, so no
position of a generator is stored. The counts of the evaluation before the training are stored too, so that it is not
repeated. A resumed training therefore returns the same bits as one without a pause.

What it starts from must be the same: the parameters, SCAFFOLD's control, the examples, the settings and the runtime. A
digest of all of them is stored with the state, and a state with another one is not used.

The state is saved at the end of an epoch, and within a long one. Each time the trainer measures how long that took. It
saves again only when that time is a small share of the time since, so a slow disk costs little.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np

from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.models import SavedTraining
from fanin.edge.runtimes.base import StepSettings, TrainState
from fanin.edge.tensors import Array, Float32s
from fanin.protos import messages as m
from fanin.protos.release import __version__

LOG = logging.getLogger("fanin.clients")
DEFAULT_SAVE_S: Final = 10.0
"""Seconds of training that a loss of power may cost, or up to six times as many within a long epoch. A training that
takes less is repeated from its beginning."""
WITHIN_EPOCH: Final = 6.0
"""Multiple of ``save_s`` after which the state is saved within an epoch: its end is often near, and a cheaper place."""
MAX_SHARE: Final = 0.02
"""Largest share of the time that saving may take. With 0.02, a state that took 1 s to save is saved after 50 s."""


NO_STATE: Final = TrainState(parameters=np.empty(0, np.float32), optimizer=np.empty(0, np.float32))
"""Stands for a state that is not held: a step reuses the memory of a state once its caller holds it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTraining:
    """A training after some of its steps.

    Attributes:
        state: The state after the last step, within the pass.
        loss_sum: Sum of the losses over all samples of the pass so far.
        counts: The counts of the evaluation before the first step.
        ranges: The ranges of the Version's activations.
        num_passes: Passes that have ended.
        own: The device's copy of all parameters under Ditto, once its pass has ended (num_values,); else empty.
    """

    state: TrainState
    loss_sum: float
    counts: Mapping[str, int]
    ranges: m.RangeCounts
    num_passes: int = 0
    own: Float32s = field(default_factory=lambda: NO_STATE.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """How often the state of a training is saved.

    Attributes:
        save_s: Seconds of training after which the next end of an epoch saves the state; infinity for never.
        max_share: Largest share of the time that saving may take.
        now: A monotonic clock, in seconds.
    """

    save_s: float = DEFAULT_SAVE_S
    max_share: float = MAX_SHARE
    now: Callable[[], float] = time.monotonic

    def is_due(self, elapsed_s: float, last_cost_s: float, *, ends_epoch: bool) -> bool:
        """Return whether to save now.

        Args:
            elapsed_s: Seconds since the state was saved last, or since the training began.
            last_cost_s: Seconds that this took.
            ends_epoch: Whether an epoch has just ended.
        """
        least_s = self.save_s if ends_epoch else WITHIN_EPOCH * self.save_s
        return elapsed_s >= least_s and last_cost_s <= self.max_share * elapsed_s


DEFAULT_POLICY: Final = SavePolicy()


class Saver:
    """Saves the state of one training, and reads the state of an earlier process.

    Args:
        saved: The place of the state; None for a training that is not saved.
        digest: Computes the digest of everything that the training starts from.
        policy: How often to save.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self, saved: SavedTraining | None, digest: Callable[[], str], policy: SavePolicy, now: Callable[[], float]
    ) -> None:
        self._saved = saved if policy.save_s < math.inf else None
        self._digest = digest
        self._known_digest = ""
        self._policy = policy
        self._now = now
        self._last_s, self._cost_s = now(), 0.0

    def read(self, num_parameters: int, num_states: int) -> PartialTraining | None:
        """Return the saved state of this training; None to begin anew.

        Args:
            num_parameters: Values of the parameters.
            num_states: Values of the optimizer's state.
        """
        data = None if self._saved is None else self._saved.read()
        if data is None:
            return None
        partial = decode_partial(data, self._value_of_digest(), num_parameters, num_states)
        if partial is None:
            LOG.warning("the saved training is of other examples, settings or another runtime; it begins anew")
        self._last_s = self._now()
        return partial

    def is_due(self, *, ends_epoch: bool) -> bool:
        """Return whether to save the state now."""
        return self._saved is not None and self._policy.is_due(
            self._now() - self._last_s, self._cost_s, ends_epoch=ends_epoch
        )

    def save(self, partial: PartialTraining) -> None:
        """Save the state."""
        if self._saved is None:
            return
        started_s = self._now()
        self._saved.write(encode_partial(partial, self._value_of_digest()))
        self._last_s = self._now()
        self._cost_s = self._last_s - started_s

    def _value_of_digest(self) -> str:
        # It reads all examples, so a short training never computes it.
        self._known_digest = self._known_digest or self._digest()
        return self._known_digest


def encode_partial(partial: PartialTraining, digest: str) -> tuple[bytes | memoryview, ...]:
    """Return the bytes of a state: a line of JSON, then parameters, optimizer state and copy as float32."""
    state = partial.state
    row = {
        "digest": digest,
        "num_passes": partial.num_passes,
        "num_own": partial.own.size,
        "num_steps": state.num_steps,
        "loss_sum": partial.loss_sum.hex(),
        "counts": {name: int(count) for name, count in partial.counts.items()},
        "cells": partial.ranges.cells,
        "range_counts": partial.ranges.counts,
    }
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    arrays = (np.ascontiguousarray(values, "<f4") for values in (state.parameters, state.optimizer, partial.own))
    return (line, *(array.data.cast("B") for array in arrays if array.size))


def decode_partial(data: memoryview, digest: str, num_parameters: int, num_states: int) -> PartialTraining | None:
    """Return the state in bytes of ``encode_partial``; None for one of another training, or of another form."""
    line, _, values = bytes(data).partition(b"\n")
    try:
        row = json.loads(line)
        num_own, end = int(row["num_own"]), num_parameters + num_states
        if row["digest"] != digest or num_own not in (0, num_parameters) or len(values) != 4 * (end + num_own):
            return None
        arrays = np.frombuffer(values, "<f4").astype(np.float32, copy=False)
        return PartialTraining(
            state=TrainState(
                parameters=arrays[:num_parameters],
                optimizer=arrays[num_parameters:end],
                num_steps=int(row["num_steps"]),
            ),
            loss_sum=float.fromhex(row["loss_sum"]),
            counts={str(name): int(count) for name, count in row["counts"].items()},
            ranges=m.RangeCounts(cells=tuple(row["cells"]), counts=tuple(row["range_counts"])),
            num_passes=int(row["num_passes"]),
            own=arrays[end:],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def digest_of(
    examples: MemoryStore, settings: StepSettings, training: m.Training, runtime: str, own: Float32s | None
) -> str:
    """Return the digest of everything that a training starts from.

    Args:
        examples: The examples, as the model reads them.
        settings: The settings of the first step, with the initial parameters as ``anchor``.
        training: The settings of the Assignment.
        runtime: The library and its version: another one computes other bits.
        own: The parameters that the first pass starts from.
    """
    rows = {each.name: getattr(training, each.name) for each in fields(training)}
    rows |= {"optimizer": dict(training.optimizer), "random_key": settings.random_key, "runtime": runtime}
    rows |= {"fanin": __version__, "partition": examples.partition}
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode())
    for name, part in examples.parts.items():
        for key, array in sorted((*part.inputs.items(), ("y", part.y))):
            _add(digest, f"{name}.{key}", array)
    for name, values in (("anchor", settings.anchor), ("control", settings.control), ("own", own)):
        if values is not None:
            _add(digest, name, values)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, array: Array) -> None:
    digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).data.cast("B"))

"""A rank's part of a global batch: the unit that the engine trains and evaluates on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A rank's part of a global batch.

    Attributes:
        inputs: the model's first argument, (samples, ...).
        targets: the objective's targets, (samples, ...).
        extra: further arguments of the model by name, each (samples, ...).
    """

    inputs: Tensor
    targets: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def chunks(self, num: int) -> "Iterator[Batch]":
        """Split the batch into ``num`` equal chunks.

        Raises:
            ValueError: ``num`` does not divide the number of samples.
        """
        if len(self.inputs) % num:
            raise ValueError(f"got a part of {len(self.inputs)} samples for {num} chunks, expected a multiple")
        extra = {name: value.chunk(num) for name, value in self.extra.items()}
        for index, (inputs, targets) in enumerate(zip(self.inputs.chunk(num), self.targets.chunk(num), strict=True)):
            yield Batch(inputs=inputs, targets=targets, extra={name: chunks[index] for name, chunks in extra.items()})

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        inputs, targets = (value.to(device, non_blocking=True) for value in (self.inputs, self.targets))
        return Batch(inputs=inputs, targets=targets, extra=extra)

"""A data set of a coordinator on the virtual clock, whose measurements a test chooses."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from fanin.protos.messages import BundleRef, Version
from fanin.protos.plans import Plan
from fanin.server.runs.data import NoData
from fanin.server.storage.records import MeasuredRanges

NAME = "digits"
SHA256 = "ab" * 32
MEASURE_S = 1.0


def ranges(low: float, high: float) -> MeasuredRanges:
    """Return the ranges of one activation."""
    values = np.array([low, high], "<f4").tobytes()
    return MeasuredRanges(data=NAME, data_sha256=SHA256, num_examples=3, runtime="fake 1", values=values)


@dataclass
class FakeData(NoData):
    """A data set on which each measurement takes a second and returns ``result``.

    Attributes:
        result: Returns the ranges.
        versions: The numbers of the Versions that were measured.
    """

    result: Callable[[Version], MeasuredRanges]
    versions: list[int] = field(default_factory=list)

    @property
    def names(self) -> Collection[str]:
        return (NAME,)

    async def measure(self, plan: Plan, bundle: BundleRef, version: Version) -> MeasuredRanges:
        self.versions.append(version.number)
        await asyncio.sleep(MEASURE_S)
        return self.result(version)

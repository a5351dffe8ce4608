"""The neighbors of each device: a k-regular Harary graph on a random circle, or the complete graph.

The circle follows from the digest of the roster, so a restarted coordinator and each device compute the same one.
Device i gets a word of 8 bytes of a keystream, and the devices are sorted by (word, index). Neighbors are the k / 2
next devices on the circle in each direction.

Reference:
    Bell et al. 2020, section 3: a Harary graph whose vertices are permuted at random.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanin.edge.masking.agreement import GRAPH_LABEL, digest
from fanin.edge.masking.keystream import keystream

WORD_BYTES = 8
Indexes = npt.NDArray[np.int64]
"""Indexes of devices, or places on the circle (num_devices,)."""


@dataclass(frozen=True, slots=True)
class HararyGraph:
    """The graph of an attempt.

    Attributes:
        num_devices: n.
        degree: k; n - 1 for the complete graph.
        order: Devices in the order of the circle; empty in a complete graph.
        places: Place of each device on the circle; empty in a complete graph.
    """

    num_devices: int
    degree: int
    order: Indexes = field(repr=False)
    places: Indexes = field(repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether all devices are neighbors."""
        return self.degree >= self.num_devices - 1

    def neighbors(self, index: int) -> tuple[int, ...]:
        """Return the neighbors of a device, in rising order."""
        if self.is_complete:
            return (*range(index), *range(index + 1, self.num_devices))
        steps = np.arange(1, self.degree // 2 + 1)
        place = self.places[index]
        around = np.concatenate((place - steps, place + steps)) % self.num_devices
        return tuple(np.sort(self.order[around]).tolist())

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the devices that hold shares of a device, in rising order."""
        return tuple(range(self.num_devices)) if self.is_complete else self.neighbors(index)


def graph_of(num_devices: int, degree: int, roster_digest: bytes) -> HararyGraph:
    """Return the graph of a roster."""
    if degree >= num_devices - 1:
        nothing: Indexes = np.empty(0, np.int64)
        return HararyGraph(num_devices, num_devices - 1, nothing, nothing)
    words = np.frombuffer(keystream(digest(GRAPH_LABEL, roster_digest), 0, num_devices * WORD_BYTES), "<u8")
    order = np.argsort(words, kind="stable").astype(np.int64)
    places = np.empty(num_devices, np.int64)
    places[order] = np.arange(num_devices)
    return HararyGraph(num_devices, degree, order, places)

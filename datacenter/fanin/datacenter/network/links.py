"""Links between ranks: their latency, their bandwidth, and the links within a node.

The time of a message is ``latency + bytes / bandwidth``. The time of a collective is the sum over the steps of a ring.
Bandwidths come from data sheets, for one direction and one accelerator. Latencies are round numbers. Replace them by
measured ones if they matter.

Reference:
    Hockney's model for the time of a message.
    Thakur et al. 2005, section 4, for the time of a collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from types import MappingProxyType
from typing import Final

from fanin.datacenter.network.counters import ALL_REDUCE, SEND, Amount
from fanin.datacenter.ranks.mesh import AXES, PIPELINE
from fanin.protos.errors import InvalidInput

OWN_LATENCY_S: Final = 10e-6
"""Latency in seconds of a link that is specified only by its bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ranks.

    Attributes:
        name: the name in ``LINKS``, or the bandwidth as text.
        latency_s: seconds until a message arrives, without its bytes.
        bytes_per_second: bandwidth of one direction.
        source: where the numbers come from.
    """

    name: str
    latency_s: float
    bytes_per_second: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < inf or not 0 <= self.latency_s < inf:
            raise InvalidInput(
                f"link {self.name}: got {self.bytes_per_second} bytes a second and a latency of {self.latency_s} s, "
                "expected a positive number and 0 or more",
                code="FN-1371",
            )

    def seconds(self, kind: str, amount: Amount, num_ranks: int) -> float:
        """Return the seconds of consecutive calls of one collective.

        Args:
            kind: the kind of collective, as in ``network.counters``.
            amount: number of calls, and their payload together.
            num_ranks: ranks of the collective.
        """
        hops = 1 if kind == SEND else (num_ranks - 1) * (2 if kind == ALL_REDUCE else 1)
        return amount.num_calls * hops * self.latency_s + amount.wire_bytes(kind, num_ranks) / self.bytes_per_second


def _link(name: str, gigabytes_per_second: float, latency_s: float, source: str) -> Link:
    return Link(name=name, latency_s=latency_s, bytes_per_second=gigabytes_per_second * 1e9, source=source)


LINKS: Final[Mapping[str, Link]] = MappingProxyType(
    {
        each.name: each
        for each in (
            _link("nvlink3", 300, 5e-6, "NVIDIA A100: 600 GB/s both ways"),
            _link("nvlink4", 450, 5e-6, "NVIDIA H100 and H200: 900 GB/s both ways"),
            _link("nvlink5", 900, 5e-6, "NVIDIA B200: 1800 GB/s both ways"),
            _link("pcie4", 32, 10e-6, "16 lanes of PCI Express 4.0"),
            _link("pcie5", 64, 10e-6, "16 lanes of PCI Express 5.0"),
            _link("ib-hdr", 25, 10e-6, "200 Gbit/s, a port for each accelerator"),
            _link("ib-ndr", 50, 10e-6, "400 Gbit/s, a port for each accelerator"),
            _link("ethernet-100", 12.5, 30e-6, "100 Gbit/s"),
            _link("ethernet-10", 1.25, 50e-6, "10 Gbit/s"),
            _link("loopback", 1.0, 2e-3, "gloo between processes of one machine: its latency rules"),
        )
    }
)


def link_of(text: str) -> Link:
    """Return a link by its name in ``LINKS``, or by gigabytes a second.

    Raises:
        InvalidInput: the text is neither.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        speed = float(text)
    except ValueError:
        raise InvalidInput(
            f"link: got {text!r}, expected gigabytes a second or one of {', '.join(LINKS)}", code="FN-1371"
        ) from None
    return _link(f"{text} GB/s", speed, OWN_LATENCY_S, "as given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The links of a cluster.

    Attributes:
        inside: the link between ranks of one node.
        between: the link between ranks of different nodes, one port for each rank.
        ranks_per_node: ranks of a node.
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise InvalidInput(f"topology: got {self.ranks_per_node} ranks a node, expected at least 1", code="FN-1371")

    def link(self, axis: str, sizes: Mapping[str, int]) -> Link:
        """Return the link that connects the ranks along an axis. Ranks on the last axes are closest to each other.

        A collective between nodes uses the ports of all its ranks on a node, because NCCL builds one ring through each.
        Its bandwidth is the sum of these ports, but at most that of the link inside. A pipeline's message uses only its
        sender's port.

        Args:
            axis: an axis of the mesh.
            sizes: ranks along each axis.
        """
        inner = prod(sizes[each] for each in AXES[AXES.index(axis) + 1 :])
        if inner * sizes[axis] <= self.ranks_per_node:
            return self.inside
        num_ports = 1 if axis == PIPELINE else min(sizes[axis], max(1, self.ranks_per_node // inner))
        speed = min(self.inside.bytes_per_second, num_ports * self.between.bytes_per_second)
        if speed <= self.between.bytes_per_second:
            return self.between
        return replace(self.between, bytes_per_second=speed)

"""What ranks are connected by: a latency and a bandwidth for each way, and which ranks stand in one node.

The time of a message is ``latency + bytes / bandwidth`` (Hockney's model), that of a collective the sum over the steps
of a ring (Thakur et al. 2005, section 4). Bandwidths are those of data sheets, of one direction and one accelerator;
latencies are round numbers, to be replaced by measured ones where they matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from types import MappingProxyType
from typing import Final

from fanin.datacenter.network.counters import ALL_REDUCE, SEND, Amount
from fanin.datacenter.parallel.mesh import AXES, PIPELINE
from fanin.protos.errors import InvalidInput

OWN_LATENCY_S: Final = 10e-6
"""Of a link that is given by its bandwidth alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way from rank to rank."""

    name: str
    latency_s: float
    bytes_per_second: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < inf or not 0 <= self.latency_s < inf:
            raise InvalidInput(
                f"link {self.name}: got {self.bytes_per_second} bytes a second and a latency of {self.latency_s} s, "
                "expected a positive number and 0 or more"
            )

    def seconds(self, kind: str, amount: Amount, num_ranks: int) -> float:
        """How long calls of one kind among ``num_ranks`` take, one after the other."""
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
    """A link by its name, or by gigabytes a second. Raises InvalidInput."""
    if text in LINKS:
        return LINKS[text]
    try:
        speed = float(text)
    except ValueError:
        raise InvalidInput(f"link: got {text!r}, expected gigabytes a second or one of {', '.join(LINKS)}") from None
    return _link(f"{text} GB/s", speed, OWN_LATENCY_S, "as given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """``inside`` connects the ranks of a node, ``between`` those of different ones."""

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise InvalidInput(f"topology: got {self.ranks_per_node} ranks a node, expected at least 1")

    def link(self, axis: str, sizes: Mapping[str, int]) -> Link:
        """What the ranks along an axis are connected by: neighbours on the last axes stand closest.

        A collective that leaves the node uses the ports of all of its ranks there: NCCL lays one ring through each. It
        is as fast as they are together, or as the link inside. A pipeline's message has its sender's port alone.
        """
        inner = prod(sizes[each] for each in AXES[AXES.index(axis) + 1 :])
        if inner * sizes[axis] <= self.ranks_per_node:
            return self.inside
        num_ports = 1 if axis == PIPELINE else min(sizes[axis], max(1, self.ranks_per_node // inner))
        speed = min(self.inside.bytes_per_second, num_ports * self.between.bytes_per_second)
        if speed <= self.between.bytes_per_second:
            return self.between
        return replace(self.between, bytes_per_second=speed)

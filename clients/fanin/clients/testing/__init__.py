"""Public fakes of devices, on a virtual clock.

``LoopbackTransport`` puts a device in front of anything that has the coordinator's methods (``Fleet``), without
a network; ``VirtualDevice`` drives the production session over it; ``run_virtual`` runs an event loop whose clock
jumps to the next timer, so a Round with a ten-minute deadline takes milliseconds. A ``Member`` is such a device with
``Habits``: slow, cut off, lying, gone and back, each drawn from a seed. ``fanin.simulation`` puts the production
coordinator behind them.

``SyntheticTrainer`` and ``synthetic_bundle`` stand in for a runtime and a model in tests of all but training.
"""

from fanin.clients.testing.clock import VirtualTimeLoop, run_virtual
from fanin.clients.testing.device import VirtualDevice
from fanin.clients.testing.habits import Habits, Lie
from fanin.clients.testing.line import Served, UnreliableLine
from fanin.clients.testing.loopback import Fleet, LoopbackTransport
from fanin.clients.testing.member import Member, Surroundings, take_part
from fanin.clients.testing.synthetic import SyntheticTrainer, synthetic_bundle

__all__ = [
    "Fleet",
    "Habits",
    "Lie",
    "LoopbackTransport",
    "Member",
    "Served",
    "Surroundings",
    "SyntheticTrainer",
    "UnreliableLine",
    "VirtualDevice",
    "VirtualTimeLoop",
    "run_virtual",
    "synthetic_bundle",
    "take_part",
]

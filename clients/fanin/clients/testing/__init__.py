"""Public fakes of devices, on a virtual clock.

Reading order:

- ``clock``: ``run_virtual``, an event loop whose clock jumps to the next timer, so a long deadline costs no time
- ``loopback``: ``Fleet``, the methods of a coordinator, and ``LoopbackTransport``, a device's calls without a network
- ``device``: ``VirtualDevice``, the production session over that transport
- ``habits``: ``Habits``, the fault model of a device, drawn from a seed
- ``availability``: the patterns of a device's presence, its battery, and rates that change over time
- ``observed``: the events of a device's part in a Round
- ``unreliable``, ``interruptible``: coordinators whose calls break
- ``member``: ``Member``, a device with habits that leaves and returns, and ``ActiveMember``, which has a connection
- ``memory``: the folder of a ``VirtualDevice``
- ``synthetic``: a trainer and a Bundle for tests of everything but training
- ``trainers``: ``check_trainer``, the contract of a Trainer

``fanin.simulation`` combines them with the production coordinator.
"""

from fanin.clients.testing.availability import Availability, Battery, DailyWindow, OnOff, Rate, Trace
from fanin.clients.testing.clock import VirtualTimeLoop, run_virtual
from fanin.clients.testing.device import VirtualDevice
from fanin.clients.testing.habits import Habits, Lie
from fanin.clients.testing.interruptible import InterruptibleFleet
from fanin.clients.testing.loopback import Fleet, LoopbackTransport
from fanin.clients.testing.member import ActiveMember, Member, Surroundings, take_part
from fanin.clients.testing.observed import DeviceEvent
from fanin.clients.testing.synthetic import SyntheticTrainer, synthetic_bundle
from fanin.clients.testing.trainers import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.testing.unreliable import UnreliableFleet

__all__ = [
    "ActiveMember",
    "Availability",
    "Battery",
    "Countdown",
    "DailyWindow",
    "DeviceEvent",
    "Fleet",
    "Habits",
    "InterruptibleFleet",
    "Lie",
    "LoopbackTransport",
    "Member",
    "OnOff",
    "Rate",
    "Surroundings",
    "SyntheticTrainer",
    "Trace",
    "UnreliableFleet",
    "VirtualDevice",
    "VirtualTimeLoop",
    "check_trainer",
    "example_assignment",
    "example_model",
    "run_virtual",
    "synthetic_bundle",
    "take_part",
]

"""Public fakes: a whole federation in one process, on a virtual clock.

``LoopbackTransport`` puts a device in front of anything that has the coordinator's methods, without a network;
``VirtualDevice`` drives the production session over it; ``run_virtual`` runs an event loop whose clock jumps to
the next timer, so a Round with a ten-minute deadline takes milliseconds. The coordinator behind it is the
production one, composed by the caller with inline lanes (``fanin.server.state.inline``).

``SyntheticTrainer`` and ``synthetic_bundle`` stand in for a runtime and a model in tests of all but training.
"""

from fanin.clients.testing.clock import VirtualTimeLoop, run_virtual
from fanin.clients.testing.device import VirtualDevice
from fanin.clients.testing.loopback import Fleet, LoopbackTransport
from fanin.clients.testing.synthetic import SyntheticTrainer, synthetic_bundle

__all__ = [
    "Fleet",
    "LoopbackTransport",
    "SyntheticTrainer",
    "VirtualDevice",
    "VirtualTimeLoop",
    "run_virtual",
    "synthetic_bundle",
]

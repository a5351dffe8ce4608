"""The device's client and the operator's client.

The names in ``__all__`` are public. Their modules are imported when a name is first used, so that importing this
package loads neither grpc nor a runtime.

Reading order:

- ``device/embed``: ``join``, a device inside an app; ``device/client``: ``Client``, its parts
- ``device/session/``: the state machine of a device; ``device/storage/``: its folder
- ``device/site/``: its state for its owner; ``doctor/``: the checks of ``fanin doctor``
- ``flower/``: Flower apps on a device
- ``data/``: examples, example stores and data sets
- ``transport``: the calls of a device over gRPC; ``operator``: the calls of an operator; ``transfers``: their
  progress; ``administrator``: tokens, devices and the audit log
- ``statistics/``: statistics Runs: their Plan, their start and their result
- ``versions``: Versions that an operator downloads
- ``machine``: battery and network of this machine
- ``route``: direct or through a proxy; ``probe``: why a connection failed; ``pins``: an authority by its fingerprint
- ``planfile``: a Plan as a TOML file
- ``textfiles``: tokens and other small files; ``arguments``: checks of the arguments of public calls
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin.clients.administrator import Administrator
    from fanin.clients.data.examples import Examples
    from fanin.clients.data.npz import open_npz
    from fanin.clients.data.stores import ExampleStore, MemoryStore, memory_store
    from fanin.clients.device.client import Client, ClientOptions, ClientParts
    from fanin.clients.device.conditions import Interrupted
    from fanin.clients.device.embed import DeviceSettings, join
    from fanin.clients.device.storage.seeds import app_seed
    from fanin.clients.device.training.trainer import RuntimeTrainer
    from fanin.clients.device.training.tuning import FineTuning
    from fanin.clients.device.updates import Change, Trainer
    from fanin.clients.flower.task import FlowerSettings
    from fanin.clients.operator import Operator

__all__ = [
    "Administrator",
    "Change",
    "Client",
    "ClientOptions",
    "ClientParts",
    "DeviceSettings",
    "ExampleStore",
    "Examples",
    "FineTuning",
    "FlowerSettings",
    "Interrupted",
    "MemoryStore",
    "Operator",
    "RuntimeTrainer",
    "Trainer",
    "app_seed",
    "join",
    "memory_store",
    "open_npz",
]
_MODULES = {
    "Administrator": "administrator",
    "Change": "device.updates",
    "Client": "device.client",
    "ClientOptions": "device.client",
    "ClientParts": "device.client",
    "DeviceSettings": "device.embed",
    "ExampleStore": "data.stores",
    "Examples": "data.examples",
    "FineTuning": "device.training.tuning",
    "FlowerSettings": "flower.task",
    "Interrupted": "device.conditions",
    "MemoryStore": "data.stores",
    "Operator": "operator",
    "RuntimeTrainer": "device.training.trainer",
    "Trainer": "device.updates",
    "app_seed": "device.storage.seeds",
    "join": "device.embed",
    "memory_store": "data.stores",
    "open_npz": "data.npz",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""A digits model that is trained from nothing, and the devices of a Run that trains it, on two runtimes."""

from contextlib import closing
from pathlib import Path
from random import Random

import torch
from torch import nn

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.export import App
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.simulation import Iid, load_data, partition
from support.models import PUBLISHER
from support.peers import Place

RUNTIMES = ("onnx", "onnx", "onnx", "litert", "litert", "litert")
DATA = load_data("digits")


def digits_app() -> App:
    """Return an App whose module is untrained."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    images = torch.from_numpy(DATA.train.inputs["x"][:64])
    return App(
        name="digits", module=nn.Sequential(nn.Flatten(), *layers), calibration=images, batch_size=16, num_classes=10
    )


def take_part(host: Place, folder: Path, device: int, num_rounds: int) -> Serving:
    """Run a device with a folder in ``folder`` until the Run has ended. Return its served model."""
    runtime, examples = open_runtime(RUNTIMES[device]), partition(DATA.train, len(RUNTIMES), Iid()).store(device, 0.2)
    with closing(Connection(host.address, host.ca)) as connection:
        cache = Cache(folder / f"device-{device}")
        serving = Serving(runtime, cache, (PUBLISHER.public,))
        parts = ClientParts(
            transport=GrpcTransport(connection, cache.key()),
            cache=cache,
            trainer=RuntimeTrainer(runtime, examples),
            trusted=(PUBLISHER.public,),
            rng=Random(device),
            serving=serving,
        )
        Client(parts, ClientOptions(token=host.device_token, max_updates=num_rounds)).run()
    return serving


def accuracy(logits: Float32s) -> float:
    """Return the accuracy on the test data."""
    return float((logits.argmax(axis=-1) == DATA.test.y).mean())

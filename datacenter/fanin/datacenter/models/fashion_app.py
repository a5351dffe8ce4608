"""The demo's App for Fashion-MNIST: a CNN of two convolutions, calibrated on the public images."""

from typing import Final

import torch
from torch import Tensor, nn

from fanin.clients.data.public import IMAGE_SIDE, NUM_CLASSES, split_fashion_mnist
from fanin.datacenter.models.digits_app import smoothed_cross_entropy
from fanin.edge.export import App
from fanin.edge.runtimes.graphs import X

BATCH_SIZE: Final = 16
NUM_CALIBRATION: Final = 256
HIDDEN: Final = 64


class FashionCnn(nn.Module):
    """Two strided convolutions and two linear layers: ``x`` (B, 1, 28, 28) to logits (B, 10)."""

    def __init__(self, seed: int = 0) -> None:
        """Initialize the parameters from ``seed`` alone. torch's own generator is not changed."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolutions = nn.Sequential(
                nn.Sequential(nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2), nn.ReLU()),
                nn.Sequential(nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1), nn.ReLU()),
            )
            self.flatten = nn.Flatten()
            self.hidden = nn.Sequential(nn.Linear(32 * (IMAGE_SIDE // 4) ** 2, HIDDEN), nn.ReLU())
            self.head = nn.Linear(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        logits: Tensor = self.head(self.hidden(self.flatten(self.convolutions(x))))
        return logits


def app(seed: int = 0) -> App:
    """Return the App. ``seed`` determines its initial parameters and the public images that calibrate it."""
    public = split_fashion_mnist(1, 1.0, seed).public
    return App(
        name="fashion-mnist",
        module=FashionCnn(seed),
        calibration=torch.from_numpy(public.inputs[X][:NUM_CALIBRATION]),
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        loss=smoothed_cross_entropy,
    )

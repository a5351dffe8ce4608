"""The demo's App: the digits' CNN, calibrated on the public images."""

from typing import Final

import torch

from fanin.clients.digits import split_digits
from fanin.datacenter.models.cnn import NUM_CLASSES, DigitsCnn
from fanin.edge.export.app import App

BATCH_SIZE: Final = 16


def app(seed: int = 0) -> App:
    """The App whose initial parameters and public images (its calibration data) are those of ``seed``."""
    # Which images are public depends on the seed alone, not on how the others are shared out.
    return App(
        name="digits",
        module=DigitsCnn(seed),
        calibration=torch.from_numpy(split_digits(1, 1.0, seed).public.x),
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
    )

"""The work that all systems do, for a script in the environment of one of them: the data, the module and the settings.

The module is needed in environments without fanin, so nothing here imports it.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One federation: ``users`` with ``samples`` examples each, of which ``cohort`` train in each round."""

    users: int
    samples: int
    cohort: int
    rounds: int
    batch_size: int
    learning_rate: float
    model: str
    device: str = "cpu"


def module(name: str) -> nn.Sequential:
    """Return the module, always with the same initial parameters."""
    torch.manual_seed(0)
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def arguments() -> tuple[Load, Path]:
    """Return the load and the folder of the data: ``SCRIPT FOLDER LOAD-AS-JSON``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("load")
    options = parser.parse_args()
    return Load(**json.loads(options.load)), options.folder


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return ``x`` (users, samples, 1, 28, 28) and ``y`` (users, samples), and ``test_x`` and ``test_y``."""
    with np.load(folder / "data.npz") as stored:
        return dict(stored)


def accuracy(net: nn.Module, data: dict[str, np.ndarray]) -> float:
    """Return the top-1 accuracy on the test images."""
    with torch.no_grad():
        predicted: Tensor = net.cpu()(torch.from_numpy(data["test_x"])).argmax(1)
    return float((predicted.numpy() == data["test_y"]).mean())


def report(seconds: list[float], reached: float) -> None:
    """Print the row: seconds of each round, without the first, which loads libraries; and the final accuracy."""
    sys.stdout.write(json.dumps({"seconds": seconds, "accuracy": reached}) + "\n")

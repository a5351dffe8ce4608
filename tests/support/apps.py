"""An App in a file, for commands that load it by its name."""

from pathlib import Path
from typing import Final

MODULE_APP: Final = """
import torch
from torch import nn

from fanin.edge.export import App
from fanin.simulation import load_data

torch.manual_seed(3)
images = torch.from_numpy(load_data("digits").train.inputs["x"][:64])
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
app = App(name="digits", module=net, calibration=images, batch_size=8, num_classes=10)
"""


def write_module_app(folder: Path) -> str:
    """Write the App of a linear model of the digits into a folder. Return its name for a command."""
    path = folder / "linear_app.py"
    path.write_text(MODULE_APP)
    return f"{path}:app"

"""An App: a torch module, real inputs to calibrate int8 with, a batch size, the number of classes.

The module is trained a little before it is exported, on 100 digits that are nobody's secret. That is not needed to
federate, but int8 needs it: the scales of the activations are calibrated at the export, and those of a network that
has learnt nothing do not fit it later.
"""

import torch
from torch import nn

from fanin.clients.data.digits import split_digits
from fanin.edge.export import App, cross_entropy


def app() -> App:
    """Made anew for each export."""
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    public = split_digits(num_devices=2, alpha=1.0, seed=1).public
    x, y = torch.from_numpy(public.inputs["x"]), torch.from_numpy(public.y)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(module(x), y).mean())
        optimizer.step()
    return App(name="digits", module=module, calibration=x, batch_size=16, num_classes=10)

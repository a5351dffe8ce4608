"""Twenty train steps of each case of ``support.layers``: as a train graph in each runtime, and in eager torch.

The graph is converted once for each graph format, and runs in all runtimes of that format.
"""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fanin.edge.bundles.formats import file_format
from fanin.edge.export.app.app import App
from fanin.edge.export.app.losses import cross_entropy, next_token
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.graphs import next_port
from fanin.edge.tensors import Float32s
from support.layers import BATCH_SIZE, CASES
from support.remote_runtime import runtime_of

NUM_STEPS: Final = 20
LEARNING_RATE: Final = 0.05
RUNTIMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"onnx": ("onnx",), "tflite": ("litert", "tflite")})
"""The runtimes of each graph format."""
Named = dict[str, Float32s]


class Course:
    """A case's module, its batches, and the parameters after eager torch's training."""

    def __init__(self, case: str) -> None:
        make, inputs = CASES[case]
        torch.manual_seed(1)
        self.module, self.xs = make(), inputs()
        with torch.no_grad():
            *shape, num_classes = copy.deepcopy(self.module)(self.xs[0]).shape
        num = len(self.xs) * int(np.prod(shape))
        self.ys = torch.arange(num).reshape(len(self.xs), *shape) * 7 % num_classes
        self.initial: Named = {name: value.detach().numpy() for name, value in self.module.named_parameters()}
        self.expected = _eager(copy.deepcopy(self.module), self.xs, self.ys)

    def errors(self, graph_format: str) -> dict[str, dict[str, float]]:
        """Return max |a - b| / max(1, |b|) of each parameter, in each runtime of the format."""
        app = App(
            name="layers",
            module=self.module,
            calibration=self.xs[0],
            batch_size=BATCH_SIZE,
            num_classes=int(self.ys.max()) + 1,
            loss=next_token if self.ys.dim() > 2 else cross_entropy,
        )
        row = FORMATS[graph_format]
        traced = trace_train(prepare(app), row.forms)
        data = row.encode("train", traced, "layers")
        signature = "train" if file_format(graph_format).has_signatures else ""
        errors = {}
        for runtime in RUNTIMES[graph_format]:
            actual = self._in_graph(traced, runtime, data, signature)
            errors[runtime] = {
                name: float((np.abs(actual[name] - value) / np.maximum(1.0, np.abs(value))).max())
                for name, value in self.expected.items()
            }
        return errors

    def _in_graph(self, traced: Traced, runtime: str, data: bytes, signature: str) -> Named:
        step = runtime_of(runtime).open_model(data, "layers", signature)
        feed = {name: value.numpy() for name, value in zip(traced.inputs, traced.examples, strict=True)}
        feed |= {"mask": np.ones(BATCH_SIZE, np.float32), "learning_rate": np.array(LEARNING_RATE, np.float32)}
        names = [name for name in traced.inputs if next_port(name) in traced.outputs]
        for index in range(NUM_STEPS):
            x, y = self.xs[index % len(self.xs)], self.ys[index % len(self.ys)]
            outputs = step(feed | {"x": x.numpy(), "y": y.to(torch.int32).numpy()})
            feed |= {name: outputs[next_port(name)] for name in names}
        return feed


def _eager(module: nn.Module, xs: Tensor, ys: Tensor) -> Named:
    """Run the steps in eager torch. Return the parameters and the running statistics."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for index in range(NUM_STEPS):
        x, y = xs[index % len(xs)], ys[index % len(ys)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    statistics = {
        f"{name}.{key}": getattr(norm, key)
        for name, norm in module.named_modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.training
        for key in ("running_mean", "running_var")
    }
    return {name: value.detach().numpy() for name, value in (dict(module.named_parameters()) | statistics).items()}

"""Every layer that must train, as an ONNX train step, against eager torch: autograd and ``torch.optim.SGD``."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from support.layers import BATCH_SIZE, CASES
from torch import Tensor, nn

from fanin.edge.export.app import App
from fanin.edge.export.losses import cross_entropy, next_token
from fanin.edge.export.onnx import to_onnx
from fanin.edge.export.prepare import prepare
from fanin.edge.export.trace import trace_train
from fanin.edge.runtimes.graphs import next_port

NUM_STEPS = 20
LEARNING_RATE = 0.05
TOLERANCE = 1e-5


def eager(module: nn.Module, xs: Tensor, ys: Tensor) -> dict[str, np.ndarray]:
    """Parameters after the steps."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for index in range(NUM_STEPS):
        x, y = xs[index % len(xs)], ys[index % len(ys)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def by_graph(module: nn.Module, xs: Tensor, ys: Tensor) -> dict[str, np.ndarray]:
    """The same from the train graph."""
    app = App(
        name="layers",
        module=module,
        calibration=xs[0],
        batch_size=BATCH_SIZE,
        num_classes=int(ys.max()) + 1,
        loss=next_token if ys.dim() > 2 else cross_entropy,
    )
    traced = trace_train(prepare(app), "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(to_onnx(traced, "layers").SerializeToString(), options)
    feed = {name: value.numpy() for name, value in zip(traced.inputs, traced.examples, strict=True)}
    feed |= {"mask": np.ones(BATCH_SIZE, np.float32), "learning_rate": np.array(LEARNING_RATE, np.float32)}
    names = [name for name in traced.inputs if next_port(name) in traced.outputs]
    for index in range(NUM_STEPS):
        feed |= {"x": xs[index % len(xs)].numpy(), "y": ys[index % len(ys)].to(torch.int32).numpy()}
        feed |= dict(zip(names, session.run([next_port(name) for name in names], feed), strict=True))
    return feed


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_end_where_eager_torch_ends(case: str) -> None:
    make, inputs = CASES[case]
    torch.manual_seed(1)
    module, xs = make(), inputs()
    with torch.no_grad():
        *shape, num_classes = module(xs[0]).shape
    ys = torch.arange(len(xs) * int(np.prod(shape))).reshape(len(xs), *shape) * 7 % num_classes
    expected, got = eager(module, xs, ys), by_graph(module, xs, ys)
    begun = dict(module.named_parameters())
    for name, value in expected.items():
        error = np.abs(got[name] - value) / np.maximum(1.0, np.abs(value))
        assert error.max() <= TOLERANCE, f"{name}: {error.max():.1e}"
    moved = [np.abs(value - begun[name].detach().numpy()).max() for name, value in expected.items()]
    assert np.median(moved) > 1e-3

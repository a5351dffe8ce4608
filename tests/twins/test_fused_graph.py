"""A train graph before and after fusion: the steps are the same, and the fused operators are as expected."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fanin.edge.export import Adam, App, Optimizer, Recipe, Sgd, next_token
from fanin.edge.export.formats.onnx.fuse import fuse
from fanin.edge.export.formats.onnx.writer import as_exported, to_onnx
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.graphs import next_port

NUM_STEPS = 5
TOLERANCE = 1e-5
SETTINGS = {"mask": np.array([1, 1, 0, 1], np.float32), "learning_rate": np.array(0.05, np.float32)}
RECIPES = {
    "momentum": Recipe(optimizer=Sgd()),
    "nesterov, decay, clip": Recipe(optimizer=Sgd(nesterov=True, weight_decay=0.01), clip_norm=0.5),
    "no momentum": Recipe(optimizer=Sgd(momentum=0.0)),
    "adam": Recipe(optimizer=Adam(decoupled=True, weight_decay=0.01)),
    "proximal, scaffold": Recipe(optimizer=Sgd(momentum=0.0), proximal=True, scaffold=True),
}


class Tokens(nn.Module):
    """The parts of a transformer, one of each: an embedding, a norm, a perceptron, attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 8), nn.Parameter(0.1 * torch.randn(6, 8))
        self.norm, self.wide, self.narrow, self.head = (
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 9, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, T, 9)."""
        hidden = self.tokens(x) + self.positions
        hidden = hidden + self.narrow(nn.functional.gelu(self.wide(self.norm(hidden))))
        attention = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        logits: Tensor = self.head(hidden + attention)
        return logits


def trace_step(recipe: Recipe) -> Traced:
    """Return the train step of the module."""
    torch.manual_seed(3)
    x = torch.randint(0, 9, (4, 6), dtype=torch.int32)
    app = App(
        name="tokens", module=Tokens(), calibration=x, batch_size=4, num_classes=9, loss=next_token, recipe=recipe
    )
    return trace_train(prepare(app), ONNX)


def run_steps(model: onnx.ModelProto, step: Traced) -> dict[str, np.ndarray]:
    """Run the steps. Return the state and the last loss."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feed = {name: value.numpy() for name, value in zip(step.inputs, step.examples, strict=True)} | SETTINGS
    names = [name for name in step.inputs if next_port(name) in step.outputs]
    loss = np.zeros(())
    for number in range(NUM_STEPS):
        if "step" in feed:
            feed["step"] = np.array(number + 1, np.float32)
        *states, loss = session.run([*(next_port(name) for name in names), "loss"], feed)
        feed |= dict(zip(names, states, strict=True))
    return {name: feed[name] for name in names} | {"loss": loss}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "momentum" else pytest.mark.nightly) for name in RECIPES]
)
def test_a_fused_graph_takes_the_same_steps(name: str) -> None:
    step = trace_step(RECIPES[name])
    plain_model = as_exported(step, "tokens")
    fused_model = fuse(plain_model)
    onnx.checker.check_model(fused_model, full_check=True)
    assert [port.name for port in fused_model.graph.input] == [port.name for port in plain_model.graph.input]
    assert [port.name for port in fused_model.graph.output] == [port.name for port in plain_model.graph.output]
    actual, expected = run_steps(fused_model, step), run_steps(plain_model, step)
    for key, value in expected.items():
        error = np.abs(actual[key] - value) / np.maximum(1.0, np.abs(value))
        assert error.max() <= TOLERANCE, f"{key}: {error.max():.1e}"
    kinds = Counter(node.op_type for node in fused_model.graph.node)
    assert kinds["HardSigmoid"] == kinds["ScatterElements"] == 1
    assert kinds["ReduceSum"] < Counter(node.op_type for node in plain_model.graph.node)["ReduceSum"]


@pytest.mark.nightly
def test_momentum_is_fused_into_the_products_of_gradients_without_another_use() -> None:
    def gemms(optimizer: Optimizer, clip_norm: float = 0.0) -> int:
        nodes = to_onnx(trace_step(Recipe(optimizer=optimizer, clip_norm=clip_norm)), "tokens").graph.node
        producers = {name: node for node in nodes for name in node.output}
        addends = [producers.get(node.input[2]) for node in nodes if node.op_type == "Gemm"]
        return sum(node is not None and "optimizer.momentum" in node.input for node in addends)

    # The products of the three linear layers.
    assert gemms(Sgd()) == 3
    assert gemms(Sgd(nesterov=True)) == gemms(Sgd(), clip_norm=1.0) == 0

"""Origins of graph nodes: forward and backward nodes are named after their module of the App."""

import gc

import onnx
import pytest
import torch
from conftest import BundleOf
from support.models import app_of
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.origins import origin_of, recorded_origins
from fanin.edge.export.module.prepare import prepare


class Gate(nn.Module):
    """A module with operations of its own before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x.sin())
        return inner.exp()


class Twice(nn.Module):
    """A module that runs another module twice, with a function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.gate(x)
        second: Tensor = self.gate(first.tanh())
        return second.sum()


def test_the_nodes_of_a_gradient_belong_to_the_module_of_their_forward() -> None:
    module = Twice()

    def gradient(x: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(module(x), x)
        return dx

    with recorded_origins(module):
        graph = make_fx(gradient)(torch.ones(1, 2, requires_grad=True)).graph
    origins: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            origins.setdefault(node.target.__name__, set()).add(origin_of(node))
    assert (origins["sin.default"], origins["cos.default"]) == ({"gate"}, {"gate"})
    assert origins["mm.default"] == {"gate.inner"}
    assert (origins["tanh.default"], origins["tanh_backward.default"], origins["sum.default"]) == ({""}, {""}, {""})
    # No hook remains: a later call of the module is not recorded.
    graph = make_fx(module)(torch.ones(1, 2)).graph
    assert {origin_of(node) for node in graph.nodes} == {""}


def test_a_forward_that_fails_leaves_no_scope_open() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2"), recorded_origins(module):
        make_fx(module)(torch.ones(1, 2))
    with recorded_origins(nn.Identity()):
        graph = make_fx(torch.sin)(torch.ones(1)).graph
    assert {origin_of(node) for node in graph.nodes} == {""}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_gradient_that_fails_leaves_no_scope_open() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2.0).asinh_().sum()

    module = nn.Sequential(Inverse())
    # The end of a scope that is forgotten raises while it is collected, which Python reports and ignores.
    with pytest.raises(NotImplementedError, match="asinh"), recorded_origins(module):
        make_fx(lambda x: torch.autograd.grad(module(x), x))(torch.ones(1, 2, requires_grad=True))
    gc.collect()


def test_a_train_step_knows_its_modules() -> None:
    graph = trace_train(prepare(app_of("cnn")), ONNX).program.graph
    origins = {origin_of(node) for node in graph.nodes if node.op == "call_function"}
    assert origins == {"", "body.0", "body.1", "body.2", "body.3", "body.4", "body.5", "body.6", "head"}


def test_the_nodes_of_a_file_have_the_names_of_their_modules(both_formats: BundleOf) -> None:
    bundle = both_formats("cnn")
    for signature in ("train", "evaluate", "infer"):
        nodes = onnx.load_from_string(bundle.graph(signature, "onnx")).graph.node
        assert [node.name.partition("/")[0] for node in nodes if node.op_type == "Relu"] == [
            "body.2",
            "body.4",
            "body.6",
        ]
        assert next(node.name for node in nodes if node.op_type == "Conv").startswith("body.0/")

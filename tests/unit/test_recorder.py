"""The recorder of operators: its graph computes what the function does, or it refuses the function."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fanin.edge.export.graph.decompositions.programs.recorder import Form, NotRecorded, Recorder

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


def _changed_chunk(x: Tensor) -> Tensor:
    first, second = (x * 2.0).chunk(2, dim=1)
    first.add_(second)
    return first * second


def _changed_view(x: Tensor) -> Tensor:
    y = (x * 2.0).T
    y.mul_(3.0).clamp_(max=4.0)
    return y + x.T


def _changed_row(x: Tensor) -> Tensor:
    y = x * 2.0
    y[0].add_(1.0)
    return y


def _changed_overlap(x: Tensor) -> Tensor:
    y = x * 2.0
    first, second = y[:, :3], y[:, 2:]
    first.add_(1.0)
    return second.sum() + first


def _changed_input(x: Tensor) -> Tensor:
    return x.add_(1.0)


def _changed_alias(x: Tensor) -> Tensor:
    y = x * 2.0
    other = y.detach()
    other.add_(1.0)
    return y


def _foreign_tensor(x: Tensor) -> Tensor:
    return x + FOREIGN


def _both_parts(x: Tensor) -> Tensor:
    values, places = x.max(dim=1)
    return values * 2.0 + places


FOREIGN = torch.ones(4)
RECORDED: list[Function] = [_changed_chunk, _changed_view, _both_parts, lambda x: x.detach() + x.expand(3, 4)]
REFUSED: list[Function] = [
    _changed_row,
    _changed_overlap,
    _changed_input,
    _changed_alias,
    _foreign_tensor,
]


@pytest.mark.parametrize("function", RECORDED)
def test_a_graph_computes_what_its_function_does(function: Function) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(_recorded(function)(x), function(x))


@pytest.mark.parametrize("function", REFUSED)
def test_a_change_that_is_read_elsewhere_is_refused(function: Function) -> None:
    with pytest.raises(NotRecorded):
        _recorded(function)


def test_a_form_replaces_its_operator_also_within_forms() -> None:
    forms: dict[torch._ops.OpOverload, Form] = {
        aten.relu.default: lambda x: aten.clamp_min(x, 0.0),
        aten.clamp_min.default: lambda x, low: aten.maximum(x, torch.full_like(x, low)),
        aten.neg.default: lambda x: NotImplemented,
        aten.expand.default: lambda x, sizes: x,
    }
    graph = _recorded(lambda x: -x.relu().expand(3, 4), forms)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [aten.full_like.default, aten.maximum.default, aten.neg.default]
    x = torch.arange(12.0).reshape(3, 4) - 5.0
    assert torch.equal(graph(x), -x.relu())


def _recorded(function: Function, forms: dict[torch._ops.OpOverload, Form] | None = None) -> GraphModule:
    recorder = Recorder(forms or {})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        x = mode.from_tensor(torch.zeros(3, 4))
        recorder.input("x", x, {})
        with recorder:
            y = function(x)
    recorder.output(y)
    return GraphModule(torch.nn.Module(), recorder.graph)

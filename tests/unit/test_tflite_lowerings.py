"""The lowerings of frequent operators: the file has the bytes that the converter's own lowerings give."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.formats.tflite.converter.lowerings import ROWS, direct_lowerings
from fanin.edge.export.graph.decompositions.programs.program import program_of
from fanin.edge.export.quiet import quiet_converter

aten = torch.ops.aten
X, ROW, COLUMN, COUNTS = (
    torch.randn(2, 3, 4),
    torch.randn(4),
    torch.randn(3, 1),
    torch.arange(24).reshape(2, 3, 4).int(),
)
Function = Callable[..., Tensor]

CALLS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "sums of three shapes": (lambda x, y, z: aten.add(x, y) + aten.add(y, z), (X, ROW, COLUMN)),
    "differences, quotients and products": (lambda x, y, z: (x - y) / (z * z + 1.0), (X, ROW, COLUMN)),
    "integers of the code": (lambda x: 2 * x + 1, (X,)),
    "integers": (lambda x, y: x * y - 3, (COUNTS, COUNTS)),
    "a number of two integers": (lambda x: x.sum() * 2 + x.max(), (COUNTS,)),
    "matrix product": (lambda x, y: x @ y, (torch.randn(3, 4), torch.randn(4, 5))),
    "views": (lambda x: x.reshape(6, 4).view(-1).view(2, -1, 3) + 1.0, (X,)),
    "permutations": (lambda x: x.permute(2, 0, -2) * x.permute(-1, -3, 1) + x.permute(0, 1, 2).sum(), (X,)),
    "new dimensions": (lambda x: x.unsqueeze(-1) * x.unsqueeze(0).unsqueeze(-1), (X,)),
    "expansions": (lambda x, y: x.expand(5, -1, 3, 4) + y.expand(3, 4) * 2.0, (X, COLUMN)),
    "expansion of integers": (lambda x: x[0, 0].expand(2, 3, 4) + x, (COUNTS,)),
    "slices": (lambda x: x[:, 1:, ::2] + x[:, -2:, 1:3] * x[:, 2:1].sum(), (X,)),
    "selections": (lambda x: x.select(1, -1) + x.select(1, 0), (X,)),
    "padding": (lambda x: aten.constant_pad_nd(x, [1, 2, 0, 1], 0.5) * 2.0, (X,)),
    "negative padding": (lambda x: aten.constant_pad_nd(x, [1, -2]) + 1.0, (X,)),
    "padding of integers": (lambda x: aten.constant_pad_nd(x, [1, 2], 7) + 1, (COUNTS,)),
    "sums over dimensions": (lambda x: x.sum(-1, keepdim=True) + x.sum([0, 2]).sum() + x.sum(1).sum([0, 1]), (X,)),
    "sums of integers": (lambda x: x.sum(1, dtype=torch.int32), (COUNTS,)),
    "activation": (lambda x: x.relu() + x.clone(), (X,)),
    "activation of integers": (lambda x: x.relu() + x.clone(), (COUNTS,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_direct_lowering_gives_the_same_file(name: str) -> None:
    function, inputs = CALLS[name]
    assert _file(function, inputs, direct=True) == _file(function, inputs, direct=False)


def test_each_lowering_is_called() -> None:
    functions = [make_fx(function)(*inputs) for function, inputs in CALLS.values()]
    called = {node.target for traced in functions for node in traced.graph.nodes}
    assert called >= set(ROWS)


def _file(function: Function, inputs: tuple[Tensor, ...], *, direct: bool) -> bytes:
    with quiet_converter(), direct_lowerings() if direct else nullcontext():
        from litert_torch._convert import litert_converter
        from litert_torch._convert.signature import Signature

        program = program_of(make_fx(lambda *args: (function(*args),))(*inputs), inputs)
        rows = [Signature("call", nn.Module(), inputs, {})]
        data: bytes = litert_converter.exported_programs_to_flatbuffer([program], rows).to_bytes()
    return data

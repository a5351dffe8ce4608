"""The decomposition of a program by one retrace, against torch's decomposition: the same operators and results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, default_decompositions

from fanin.edge.export.graph.decompositions.programs.program import PlainProgram, program_of
from fanin.edge.export.quiet import quiet_torch


class Layers(nn.Module):
    """Composite operators with a form (linear, a transposition), and some that torch keeps (upsampling)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.BatchNorm2d(2),
            nn.Upsample(scale_factor=2.0, mode="bilinear"),
            nn.Upsample(scale_factor=2.0),
            nn.PixelShuffle(1),
            nn.Flatten(2),
            nn.Linear(144, 3),
            nn.GELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 3, 2)."""
        y: Tensor = self.layers(x)
        return torch.einsum("bcd,de->bec", y, torch.ones(3, 3)) * torch.tensor([2.0, 3.0])


class InPlace(nn.Module):
    """Operators that change a tensor in place, one of them through a view."""

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 1, 5, 5)."""
        y = x * 2.0
        y[:, :, 0].add_(1.0)
        y.clamp_(max=0.5)
        return y


class Recurrent(nn.Module):
    """A composite operator with a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((12, 5), (12, 3), (12,), (12,))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 5, 3)."""
        state = (torch.zeros(1, len(x), 3), torch.zeros(1, len(x), 3))
        y: Tensor = torch.lstm(x.squeeze(1), state, list(self.weights), True, 1, 0.0, False, False, True)[0]
        return y


MODULES: dict[str, Callable[[], nn.Module]] = {"layers": Layers, "in place": InPlace, "recurrent": Recurrent}


def _table_without_linear() -> dict[torch._ops.OperatorBase, Callable[..., object]]:
    table = default_decompositions()
    table.pop(torch.ops.aten.linear.default)
    return dict(table.items())


LINEAR_KEPT = "linear layers are kept"
TABLES: dict[str, Callable[[], dict[torch._ops.OperatorBase, Callable[..., object]]]] = {
    "torch's table": default_decompositions,
    LINEAR_KEPT: _table_without_linear,
}


@pytest.mark.parametrize(
    ("name", "table"),
    # Linear layers inside a recurrent layer are always decomposed.
    [(name, table) for name in MODULES for table in TABLES if (name, table) != ("recurrent", LINEAR_KEPT)],
)
def test_one_retrace_equals_torchs_decomposition(name: str, table: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name]().eval(), torch.randn(2, 1, 5, 5)
    with quiet_torch():
        exported_program = torch.export.export(module, (x,), strict=False)
        program = program_of(exported_program.module(check_guards=False), [x]).run_decompositions(TABLES[table]())
        expected = exported_program.run_decompositions(TABLES[table]())
    assert isinstance(program, PlainProgram)
    assert _operators(program) == _operators(expected)
    with torch.no_grad():
        assert torch.equal(_output(program, x), _output(expected, x))


def _operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def _output(program: ExportedProgram, x: Tensor) -> Tensor:
    output = program.module()(x)
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def test_an_operator_that_a_pass_wraps_in_a_function_is_kept() -> None:
    operator = torch.ops.aten.upsample_bilinear2d.vec
    x = torch.randn(1, 1, 4, 4)
    with quiet_torch():
        module = torch.export.export(nn.Upsample(scale_factor=2.0, mode="bilinear"), (x,)).module(check_guards=False)
        program = program_of(module, [x]).run_decompositions(default_decompositions())
        (node,) = (node for node in program.graph.nodes if node.target is operator)
        node.target = lambda *arguments: operator(*arguments).relu()
        new_program = program.run_decompositions({torch.ops.aten.relu.default: lambda y: y.clamp(min=0.0)})
    assert _operators(new_program) == [str(operator), "aten.clamp.default"]

"""Generates the table in docs/howto/operators.md: it exports a small module for each operator and graph format.

    PYTHONPATH=tests python tests/golden/operator_table.py            # writes the table
    PYTHONPATH=tests python tests/golden/operator_table.py erf sort   # prints these rows

An operator trains if a module with the operator between two trained layers can be exported. The export compares the
graphs with eager torch. Otherwise the script tries the operator on the input, before the only trained layer, where it
needs no gradient.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from golden.operators import FUNCTIONS, LAYERS, WIDTH, Function
from support.models import PUBLISHER
from torch import Tensor, nn

from fanin.edge.export import App, export
from fanin.protos.errors import FaninError

PAGE: Final = Path(__file__).parents[2] / "docs" / "howto" / "operators.md"
BEGIN: Final = "<!-- operators: made by tests/golden/operator_table.py -->\n"
END: Final = "<!-- end of operators -->\n"
FORMATS: Final = ("onnx", "tflite")
TRAINS, INFERS, REFUSED = "trains", "infers", "no"


class Around(nn.Module):
    """An operator between two trained layers, or on the input before the only trained layer."""

    def __init__(self, case: Function | nn.Module, *, trains: bool) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH) if trains else nn.Identity()
        self.case = case
        if isinstance(case, nn.Module) and not trains:
            case.requires_grad_(False).eval()
        with torch.no_grad():
            self.after = nn.Linear(self._values(torch.ones(2, WIDTH)).shape[1], 3)

    def _values(self, x: Tensor) -> Tensor:
        return self.case(self.before(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        logits: Tensor = self.after(self._values(x))
        return logits


class Together(nn.Module):
    """The mean of the logits of several operators."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        return torch.stack([part(x) for part in self.parts]).mean(0)


def around(name: str, *, trains: bool) -> Around:
    """Return the module of an operator."""
    case = ALL[name]
    return Around(case() if name in LAYERS else case, trains=trains)


def export_module(module: nn.Module, formats: Sequence[str]) -> None:
    """Export a module of (B, 16) to (B, 3). Raises FaninError if a format cannot express it."""
    app = App(name="operator", module=module, calibration=torch.randn(24, WIDTH), batch_size=4, num_classes=3)
    with tempfile.TemporaryDirectory() as folder:
        export(app, Path(folder) / "bundle", PUBLISHER, formats)


def train_together(names: Sequence[str], formats: Sequence[str]) -> None:
    """Export several operators in one module. Raises FaninError if one of them does not train."""
    torch.manual_seed(0)
    export_module(Together([around(name, trains=True) for name in names]), formats)


def state(name: str, graph_format: str) -> str:
    """Return how an operator can be used in a format."""
    for word, trains in ((TRAINS, True), (INFERS, False)):
        torch.manual_seed(0)
        try:
            export_module(around(name, trains=trains), (graph_format,))
        except FaninError as exc:
            sys.stderr.write(f"{name}, {graph_format}, {word}: {exc}\n")
        else:
            return word
    return REFUSED


ALL: Final[Mapping[str, Callable[..., object]]] = {
    name: case for cases in (*FUNCTIONS.values(), LAYERS) for name, case in cases.items()
}


def row(name: str) -> str:
    return f"| {name} | {' | '.join(state(name, each) for each in FORMATS)} |\n"


def table() -> str:
    """Return the table of all operators."""
    lines = ["| operator | ONNX | TFLite |\n", "|---|---|---|\n"]
    for group, cases in {**FUNCTIONS, "layers": LAYERS}.items():
        lines.append(f"| **{group}** | | |\n")
        lines += [row(name) for name in cases]
    return "".join(lines)


def rows_of(page: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of the page's table: the operator, and its state in each format."""
    lines = page[page.index(BEGIN) + len(BEGIN) : page.index(END)].splitlines()[2:]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return {name: tuple(states) for name, *states in cells if not name.startswith("**")}


def main(names: list[str]) -> None:
    if names:
        sys.stdout.writelines(row(name) for name in names)
        return
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + table() + page[page.index(END) :])


if __name__ == "__main__":
    main(sys.argv[1:])

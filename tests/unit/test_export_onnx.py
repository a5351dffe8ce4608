"""The ONNX writer hides the log messages of the libraries that it uses."""

import logging

import pytest
import torch
from torch import Tensor, nn

from fanin.edge.export.formats.onnx.writer import as_exported
from fanin.edge.export.graph.traced import Traced


class Positions(nn.Module):
    """Looks up constants in a longer table, as BERT does for its token types."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 512))
        self.register_buffer("index", torch.arange(32)[None])

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, 32) plus the constants."""
        return x + torch.gather(self.table, 1, self.index)


def test_a_constant_that_the_optimizer_cannot_fold_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4, 32)
    program = torch.export.export(Positions().eval(), (x,))
    with caplog.at_level(logging.WARNING):
        model = as_exported(Traced(program=program, examples=[x], inputs=["x"], outputs=["y"]), "App positions")
    assert "GatherElements" in [node.op_type for node in model.graph.node]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

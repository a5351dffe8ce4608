"""Boolean indices in a model: an assignment at a mask is exported, a selection by a mask is refused with its line."""

import pytest
import torch
from support.models import export_bundle
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.build import check_app
from fanin.protos.errors import UnsupportedModel

KEEP = torch.tensor([True, False, True, False])
ORDER = torch.tensor([3, 0, 2, 1])


class Silenced(nn.Module):
    """Assigns numbers at a mask and at some features, and indexes a mask by integers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = x * 2.0
        hidden[x < 0] = 0.5
        hidden[:, KEEP] = 0.0
        return self.head(hidden + (x > 0.2)[torch.arange(len(x))[:, None], ORDER])


class Selected(Silenced):
    """Selects features by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.cat([x[:, KEEP]] * 2, 1))


def app_of(module: nn.Module) -> App:
    torch.manual_seed(0)
    return App(name="masked", module=module, calibration=torch.randn(16, 4), batch_size=4, num_classes=3)


@pytest.mark.nightly
def test_values_are_put_where_a_mask_is_true() -> None:
    # The export compares its graphs with eager torch.
    assert set(export_bundle(app_of(Silenced()), ("tflite",)).manifest.slots) == {"tflite"}


def test_a_selection_by_a_mask_is_refused_with_its_line() -> None:
    app = app_of(Selected())
    (finding,) = check_app(app, ["onnx", "tflite"])
    assert finding.graph_format == "tflite"
    assert "an index of true and false at test_masked_index.py:36 has no form" in finding.reason
    assert "use index_select; or export without" in finding.advice
    with pytest.raises(UnsupportedModel, match=r"test_masked_index.py:36 has no form, expected an index of whole numb"):
        export_bundle(app, ("tflite",))

"""Forms that models of packages have, in words of our own: each exports, trains as in torch, and predicts."""

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest
import torch
from support.models import PUBLISHER, export_bundle
from support.nightly import in_ci
from torch import Tensor, nn
from torch.nn import functional as F

from fanin.edge.export import App, check_app, export
from fanin.edge.export.formats.graphs import FORMATS


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    """The block of a ResNet: the input is added in place to the result of a norm, and one to that of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.mixer, self.head = nn.Linear(16, 16), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 3, 4, 4)."""
        out = self.norm(self.first(x))
        out += x
        out = torch.relu(out).flatten(2)
        mixed = self.mixer(out)
        mixed += out
        logits: Tensor = self.head(mixed.mean(2))
        return logits


class Activated(nn.BatchNorm1d):
    """A norm with a forward of its own, which ends in an activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (N, C) normalized and activated."""
        return torch.relu(super().forward(x))


class Tokens(nn.Module):
    """Norms over the flattened tokens of a batch: by samples, as in LeViT, and by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.by_sample, self.by_position = nn.Linear(8, 16), Activated(16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, T, 8)."""
        x = self.first(x)
        x = self.by_sample(x.flatten(0, 1)).reshape_as(x).transpose(0, 1)
        x = self.by_position(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        logits: Tensor = self.head(torch.tanh(x).mean(0))
        return logits


class Skipping(nn.Module):
    """The layers of transformers' Whisper: a value is drawn for each, and compared in Python, also at probability 0."""

    def __init__(self, layerdrop: float = 0.0, *, draws_in_evaluation: bool = True) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 4)
        self.layerdrop, self.draws_in_evaluation = layerdrop, draws_in_evaluation

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 8)."""
        for layer in self.layers:
            chance = torch.rand([]) if self.training or self.draws_in_evaluation else torch.zeros([])
            if not (self.training and chance < self.layerdrop):
                x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


class Counted(nn.Module):
    """The number of samples by ``len``, and lengths that depend on shapes and are read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, T, 8)."""
        lengths = torch.full((x.shape[0],), x.shape[1])
        longest = int(torch.max(lengths).item())
        is_hidden = torch.arange(longest).expand(x.shape[0], longest) >= lengths.unsqueeze(1)
        pooled = x.masked_fill(is_hidden.unsqueeze(-1), 0.0).mean(1)
        logits: Tensor = self.head(pooled.reshape(len(pooled), -1))
        return logits


class Padded(nn.Module):
    """An encoder with a mask of the padded tokens, which torch computes by nested tensors in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(16, 8, padding_idx=0), nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of tokens (B, T)."""
        logits: Tensor = self.head(self.encoder(self.embedding(x), src_key_padding_mask=x == 0).mean(1))
        return logits


class Interactions(nn.Module):
    """Values at pairs of positions, as in DLRM, after a write to the diagonal, as in a dense graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(6 + 8, 4)
        self.register_buffer("rows", torch.tensor([1, 2, 2, 3, 3, 3]))
        self.register_buffer("columns", torch.tensor([0, 0, 1, 0, 1, 2]))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 4, 8)."""
        hidden, diagonal = torch.tanh(self.first(x)), torch.arange(4)
        products = (hidden @ hidden.transpose(1, 2)).clone()
        products[:, diagonal, diagonal] = 1.0
        mixed = (products @ hidden).mean(1)
        logits: Tensor = self.head(torch.cat([products[:, self.rows, self.columns], mixed], 1))
        return logits


class Rotary(nn.Module):
    """A table of angles in a buffer, which the first pass fills, in a disabled context for another device."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.register_buffer("angles", torch.zeros(16, 8), persistent=False)
        self.num_angles = 0

    @torch.autocast("cuda", enabled=False)
    def rotated(self, x: Tensor) -> Tensor:
        """Return x (B, T, 8) times the cosines of its positions."""
        if self.num_angles < x.shape[1]:
            self.angles[: x.shape[1]] = torch.outer(torch.arange(x.shape[1]).float(), 0.5 ** torch.arange(8).float())
            self.num_angles = x.shape[1]
        return x * self.angles[: x.shape[1]].cos()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, T, 8)."""
        logits: Tensor = self.head(self.rotated(x).mean(1))
        return logits


class Spectrum(nn.Module):
    """The mel features of torchaudio: a reshape of complex values, and no operator that ONNX lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 4)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of signals (B, T)."""
        frames = torch.stft(x, 16, 8, 16, self.window, return_complex=True, center=True)
        frames = frames / self.window.square().sum().sqrt()
        power = frames.reshape(x.shape[0], *frames.shape[-2:]).abs().pow(2.0)
        logits: Tensor = self.head(torch.log(power + 1e-3).mean(2))
        return logits


class Filtered(nn.Module):
    """A filter in the frequencies, whose result is a signal again."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of signals (B, 16)."""
        logits: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x)[:, :4], 16))
        return logits


class Turned(nn.Module):
    """Rotary positions as products of complex numbers, as in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("angles", torch.outer(torch.arange(6.0), 0.5 ** torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, 6, 8)."""
        pairs = torch.view_as_complex(torch.tanh(self.first(x)).unflatten(-1, (4, 2)))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(self.angles), self.angles)).flatten(-2)
        logits: Tensor = self.head(turned.mean(1))
        return logits


class Pooled(nn.Module):
    """The pooler of Swin: the mean over tokens, whose channels are last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.pooler = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, T, 8)."""
        logits: Tensor = self.head(self.pooler(self.norm(self.first(x)).transpose(1, 2)).flatten(1))
        return logits


class OneKeyHead(nn.Module):
    """Attention of two heads of queries and one of keys and values, which is repeated as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, size) for size in (16, 8, 8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of sequences (B, T, 8)."""
        num, length, _ = x.shape
        query = self.query(x).view(num, length, 2, 8).transpose(1, 2)
        key, value = (
            layer(x).view(num, length, 1, 8).transpose(1, 2)[:, :, None].expand(num, 1, 2, length, 8).reshape_as(query)
            for layer in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(mixed.transpose(1, 2).reshape(num, length, 16).mean(1))
        return logits


class Trend(nn.Module):
    """The trend of a series, as in DLinear: pools over time without an axis of channels, and a layer over each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.average, self.highest = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of series (B, T)."""
        x = torch.tanh(self.first(x))
        trend = F.avg_pool1d(torch.cat([x[:, :1], x, x[:, -1:]], 1), 3, 1)
        logits: Tensor = self.average(trend) + self.highest(F.max_pool1d(x, 3, 1, 1))
        return logits


class Parts(nn.Module):
    """Layers over parts of the channels and of the samples, of which a single sample has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 8)."""
        hidden = [self.first(part) for part in x.chunk(math.ceil(x.shape[0] / 2))]
        logits: Tensor = torch.cat([self.head(part) for part in torch.cat(hidden).split(8, 1)], 1)
        return logits


def padded_tokens() -> Tensor:
    """Return tokens (40, 6) with padding at the end of every third row."""
    x = torch.randint(1, 16, (40, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    x[::3, 4:] = 0
    return x


FORMS: Final[Mapping[str, tuple[Callable[[], nn.Module], Tensor]]] = {
    "residual in place": (Residual, random(40, 3, 4, 4)),
    "norms of tokens": (Tokens, random(40, 6, 8)),
    "a skipped layer": (Skipping, random(40, 8)),
    "numbers of shapes": (Counted, random(40, 6, 8)),
    "pairs of positions": (Interactions, random(40, 4, 8)),
    "a table that the first pass fills": (Rotary, random(40, 6, 8)),
    "mel features": (Spectrum, random(40, 64)),
    "products of complex numbers": (Turned, random(40, 6, 8)),
    "a mean over tokens": (Pooled, random(40, 6, 8)),
    "one head of keys": (OneKeyHead, random(40, 6, 8)),
    "pools of a series": (Trend, random(40, 12)),
    "an orthogonal weight": (
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4)),
        random(40, 8),
    ),
    "an encoder of padded tokens": (Padded, padded_tokens()),
}


def test_complex_values_without_a_form_are_refused_in_tflite_with_the_replacement() -> None:
    (finding,) = check_app(app_of(nn.Sequential(Filtered()), random(40, 16)), ("tflite",))
    assert (finding.module, finding.kind, finding.operator) == ("0", "Filtered", "torch.fft.rfft")
    assert finding.line.startswith("test_stock_forms.py:") and "returns complex numbers" in finding.reason
    assert "frames times a matrix of cosines and sines are the same spectrum" in finding.advice


@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ["onnx"]))
@pytest.mark.parametrize("name", in_ci(FORMS, ["residual in place", "norms of tokens", "one head of keys"]))
def test_a_form_of_a_package_is_exported_and_verified(name: str, graph_format: str) -> None:
    make, x = FORMS[name]
    torch.manual_seed(1)
    app = app_of(make(), x)
    # An export compares the steps and the predictions of its graphs with eager torch.
    assert export_bundle(app, (graph_format,)).manifest.table.num_values > 0


def test_parts_of_the_samples_are_exported_in_tflite() -> None:
    torch.manual_seed(1)
    assert export_bundle(app_of(Parts(), random(40, 8)), ("tflite",)).manifest.table.num_values > 0


def app_of(module: nn.Module, x: Tensor, **facts: object) -> App:
    return App(name="a", module=module, calibration=x, batch_size=4, num_classes=4, **facts)


def test_a_fused_encoder_with_another_result_in_evaluation_is_noted(tmp_path: Path) -> None:
    torch.manual_seed(1)
    notes = export(app_of(Padded(), padded_tokens()), tmp_path / "bundle", PUBLISHER, ("onnx",)).notes
    assert any("sets the padded positions of module encoder (TransformerEncoder) to 0" in note for note in notes)


def test_a_layer_that_is_skipped_by_chance_is_refused_with_its_line_and_the_remedy() -> None:
    (finding,) = check_app(app_of(Skipping(0.1), random(40, 8)), ("onnx",))
    line = inspect.getsourcelines(Skipping.forward)[1] + 4
    assert (finding.kind, finding.line) == ("Skipping", f"test_stock_forms.py:{line}")
    assert "branches on a random value, by bool()" in finding.reason
    assert finding.advice.startswith("let no layer be skipped by chance: layerdrop=0.0 (in transformers also")


class Chancy(nn.Module):
    """A value that is drawn in evaluation, too, and used there."""

    def __init__(self, *, is_compared: bool) -> None:
        super().__init__()
        self.head, self.is_compared = nn.Linear(8, 4), is_compared

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 8)."""
        chance = torch.rand([])
        if not self.is_compared:
            x = x * (1.0 + chance)
        elif chance < 0.3:
            x = -x
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("is_compared", [False, True])
def test_a_value_that_evaluation_draws_and_uses_is_refused(is_compared: bool) -> None:
    (finding,) = check_app(app_of(Chancy(is_compared=is_compared), random(40, 8)), ("onnx",))
    assert "branches on a random value" in finding.reason or "in evaluation mode, expected none" in finding.reason


def test_a_loop_over_the_samples_is_refused_as_a_constant_number() -> None:
    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * 2.0 for row in super().forward(x)])

    (finding,) = check_app(app_of(Rows(8, 4), random(40, 8)), ("onnx",))
    assert "computes with the number of samples as a constant, 4 in the example batch" in finding.reason
    assert "replace loops over the samples" in finding.advice


def test_rows_that_belong_to_no_sample_are_refused_with_the_norm() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.cat([x, x.flip(1)], 1).transpose(0, 1).reshape(-1, 6)
            return self.head(self.norm(pairs).reshape(12, x.shape[0], 1).mean(0).expand(-1, 6))

    (finding,) = check_app(app_of(Across(), random(40, 6)), ("onnx",))
    assert finding.module == "norm" and "whose rows are not in the order of the 4 samples" in finding.reason
    assert finding.advice.startswith("give the norm (batch, channels, ...)")

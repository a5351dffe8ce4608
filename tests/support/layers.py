"""Small modules, each with parallel layers of one kind: the name of a wrong parameter identifies its layer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fanin.datacenter.models.recurrent import RecurrentClassifier, RecurrentShape
from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer

NUM_CLASSES: Final = 4
BATCH_SIZE: Final = 4
VOCABULARY: Final = 11
LENGTH: Final = 4


class Scale(nn.Module):
    """A factor for each channel. Equal values stay equal in every runtime."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, ...) to the same shape."""
        return x * self.weight.reshape(-1, *(1 for _ in x.shape[2:]))


class Branches(nn.Module):
    """Layers on the same input. The means of all their channels are concatenated into a linear head."""

    def __init__(self, shape: tuple[int, ...], layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.head = nn.Linear(sum(self._features(torch.zeros(2, *shape), key).shape[1] for key in layers), NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.cat([self._features(x, key) for key in self.layers], dim=1))

    def _features(self, x: Tensor, key: str) -> Tensor:
        output = self.layers[key](x)
        # Positions have different weights, because otherwise a gradient at a wrong position would pass.
        flat = output.flatten(start_dim=2) if output.dim() > 2 else output.unsqueeze(2)
        return (flat * torch.linspace(0.5, 1.5, flat.shape[2])).mean(dim=2)


class Call(nn.Module):
    """A function after a layer."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, then the function."""
        return self._function(self.layer(x))


class Normed(nn.Module):
    """A BatchNorm after every kind of product, one that keeps its statistics, and one without a product before it."""

    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.BatchNorm2d(3)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.kept = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8).eval()
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.dense, self.last = nn.Linear(128, 8), nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 4)
        with torch.no_grad():
            for norm in (self.lead, self.norm, self.kept, self.last):
                norm.running_mean.normal_(0.0, 0.2)
                norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = F.relu(self.norm(self.first(self.lead(x))))
        y = F.relu(self.second(F.relu(self.kept(self.deep(y)))))
        return self.head(F.relu(self.last(self.dense(y.flatten(1)))))


class Sequence(nn.Module):
    """An embedding of tokens, a layer over (B, T, width), and a head for class logits."""

    def __init__(self, layer: nn.Module, padding_idx: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8, padding_idx=padding_idx)
        self.layer = layer
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, NUM_CLASSES)."""
        hidden = self.layer(self.tokens(x))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden[:, -1] + hidden.mean(dim=1))


class Causal(nn.Module):
    """torch's multi-head attention with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 8) to the same shape."""
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


def activations() -> nn.Module:
    """Return every activation, each after its own linear layer."""
    kinds = {
        "relu": nn.ReLU(),
        "relu6": nn.ReLU6(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
        "hardswish": nn.Hardswish(),
        "hardsigmoid": nn.Hardsigmoid(),
        "leaky_relu": nn.LeakyReLU(0.1),
        "elu": nn.ELU(),
        "tanh": nn.Tanh(),
        "sigmoid": nn.Sigmoid(),
        "softmax": nn.Softmax(dim=1),
        "softplus": nn.Softplus(),
        "prelu": nn.PReLU(),
    }
    return Branches((12,), {name: nn.Sequential(nn.Linear(12, 6), kind) for name, kind in kinds.items()})


def convolutions() -> nn.Module:
    """Return every kind of convolution of images."""
    return Branches(
        IMAGE,
        {
            "plain": nn.Conv2d(4, 6, 3, padding=1),
            "strided": nn.Conv2d(4, 6, 3, stride=2),
            "dilated": nn.Conv2d(4, 6, 3, dilation=2, padding=(1, 0)),
            "grouped": nn.Conv2d(4, 6, 3, groups=2, stride=(2, 1), bias=False),
            "pointwise": nn.Conv2d(4, 6, 1),
            "pointwise_strided": nn.Conv2d(4, 6, 1, stride=2),
            "depthwise": nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1, groups=4)),
            "depthwise_strided": nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4)),
            "depthwise_wide": nn.Conv2d(4, 4, 3, padding=1, groups=4, dilation=2),
            "depthwise_twice": nn.Conv2d(4, 8, 3, padding=1, groups=4),
            "stacked": nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1, stride=2), nn.Conv2d(4, 4, 3, groups=4)),
            "transposed": nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
        },
    )


class Residual(nn.Module):
    """A layer with a residual connection, which is added in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, ...) to the same shape."""
        y = self.layer(x)
        y += x
        return y


def separable() -> nn.Module:
    """Return depthwise and 1x1 convolutions of narrow images in turn, with frozen norms and activations between."""

    def block(stride: int, activation: nn.Module, bias: bool = False) -> list[nn.Module]:
        layers = [nn.Conv2d(4, 4, 3, stride, 1, groups=4, bias=bias), nn.BatchNorm2d(4).eval(), activation]
        layers += [nn.Conv2d(4, 4, 1, bias=bias), nn.BatchNorm2d(4).eval()]
        return layers

    kinds = {
        "relu": nn.Sequential(*block(1, nn.ReLU()), nn.ReLU(), *block(1, nn.ReLU(), bias=True)),
        "in_place": nn.Sequential(*block(1, nn.ReLU(inplace=True)), nn.ReLU6(inplace=True), *block(2, nn.ReLU6())),
        "residual": nn.Sequential(Residual(nn.Sequential(*block(1, nn.ReLU()))), *block(1, nn.SiLU())),
    }
    return Branches(IMAGE, {key: nn.Sequential(nn.AvgPool2d(2), kind) for key, kind in kinds.items()})


def signals() -> nn.Module:
    """Return convolutions and pools of one dimension."""
    return Branches(
        (4, 23),
        {
            "plain": nn.Sequential(nn.Conv1d(4, 6, 5, padding=2), nn.ReLU(), nn.Conv1d(6, 3, 3)),
            "strided": nn.Sequential(nn.Conv1d(4, 6, 3, stride=2), nn.MaxPool1d(3, 2, 1)),
            "depthwise": nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Conv1d(4, 4, 3, groups=4)),
            "dilated": nn.Sequential(nn.Conv1d(4, 6, 3, dilation=3), nn.AvgPool1d(3, 2, 1)),
            "transposed": nn.ConvTranspose1d(4, 2, 3, stride=2),
            "adaptive": nn.Sequential(Scale(4), nn.AdaptiveAvgPool1d(5)),
        },
    )


def pools() -> nn.Module:
    """Return every kind of pool, for images with constant regions."""
    kinds = {
        "max": nn.MaxPool2d(2),
        "max_overlapping": nn.MaxPool2d(3, 2, 1),
        "max_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
        "max_dilated": nn.MaxPool2d(2, 1, dilation=2),
        "average": nn.AvgPool2d(2),
        "average_overlapping": nn.AvgPool2d(3, 2, 1),
        "average_uncounted": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "average_ceil": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        "adaptive": nn.AdaptiveAvgPool2d((7, 2)),
        "adaptive_uneven": nn.AdaptiveAvgPool2d((4, 3)),
        "adaptive_one": nn.AdaptiveAvgPool2d(1),
        "adaptive_max": nn.AdaptiveMaxPool2d((2, 7)),
    }
    return Branches(IMAGE, {name: nn.Sequential(Scale(4), kind) for name, kind in kinds.items()})


def norms() -> nn.Module:
    """Return norms, each after a convolution. The BatchNorm is frozen."""
    frozen = nn.BatchNorm2d(6).eval()
    with torch.no_grad():
        frozen.running_mean.normal_()
        frozen.running_var.uniform_(0.5, 1.5)
    kinds = {
        "batch_frozen": frozen,
        "group": nn.GroupNorm(2, 6),
        "group_plain": nn.GroupNorm(3, 6, affine=False),
        "instance": nn.InstanceNorm2d(6, affine=True),
        "layer": nn.LayerNorm([6, 7, 7]),
        "layer_last": nn.LayerNorm(7),
        "rms": nn.RMSNorm(7),
    }
    return Branches(IMAGE, {key: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), kind) for key, kind in kinds.items()})


def batch_norms() -> nn.Module:
    """Return trained BatchNorms: of images, after a depthwise convolution, of signals and of plain features."""
    return Branches(
        IMAGE,
        {
            "image": nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU()),
            "deep": nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4, momentum=0.3)),
            "plain": nn.Sequential(Scale(4), nn.BatchNorm2d(4, affine=False)),
            "signal": nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 5, stride=3), nn.BatchNorm1d(6)),
            "features": nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.BatchNorm1d(6)),
        },
    )


def shapes() -> nn.Module:
    """Return operations that change shapes between layers."""
    functions = {
        "slice": lambda y: y[:, :, 1:-2:2, ::3],
        "select": lambda y: torch.stack([y[:, 0], y[:, -1]], dim=1),
        "index": lambda y: y[:, torch.tensor([2, 0, 2])],
        "pad": lambda y: F.pad(y, (1, 0, 2, 1), value=0.5),
        "reflect": lambda y: F.pad(y, (1, 2, 2, 1), mode="reflect"),
        "replicate": lambda y: F.pad(y, (1, 0, 2, 1), mode="replicate"),
        "upsample": lambda y: F.interpolate(y, scale_factor=2, mode="nearest"),
        "where": lambda y: torch.where(y > 0.3, y * y, -y),
        "highest": lambda y: y.amax(dim=2),
        "shuffle": lambda y: F.pixel_shuffle(y, 2),
        "products": lambda y: torch.einsum("bchw,bcvw->bchv", y.tanh(), y.sigmoid()),
    }
    return Branches(IMAGE, {key: Call(nn.Conv2d(4, 4, 3, 2, 1), function) for key, function in functions.items()})


def _images() -> Tensor:
    # With few distinct values, windows of equal values are common.
    return torch.randint(0, 3, (5, BATCH_SIZE, *IMAGE)).float()


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (5, BATCH_SIZE, LENGTH), dtype=torch.int32)


def _decoder(**choices: str) -> Callable[[], nn.Module]:
    shape = DecoderShape(vocabulary=VOCABULARY, context=LENGTH + 2, width=8, num_heads=2, num_blocks=1, **choices)
    return lambda: DecoderTransformer(shape=shape)


def _recurrent(cell: str) -> Callable[[], nn.Module]:
    shape = RecurrentShape(vocabulary=VOCABULARY, width=5, hidden=6, num_classes=NUM_CLASSES, cell=cell)
    return lambda: RecurrentClassifier(shape=shape)


IMAGE: Final = (4, 14, 14)
CASES: Final[Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]] = MappingProxyType(
    {
        "activations": (activations, lambda: torch.randn(5, BATCH_SIZE, 12)),
        "convolutions": (convolutions, _images),
        "separable": (separable, lambda: torch.randn(5, BATCH_SIZE, *IMAGE)),
        "signals": (signals, lambda: torch.randn(5, BATCH_SIZE, 4, 23)),
        "pools": (pools, _images),
        "norms": (norms, _images),
        "batch_norms": (batch_norms, lambda: torch.randn(5, BATCH_SIZE, *IMAGE)),
        "shapes": (shapes, _images),
        "decoder_gelu": (_decoder(), _tokens),
        "decoder_silu": (_decoder(norm="rms", activation="silu"), _tokens),
        "attention": (lambda: Sequence(Causal(), padding_idx=3), _tokens),
        "encoder": (
            lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)),
            _tokens,
        ),
        "gru": (_recurrent("gru"), _tokens),
        "lstm": (_recurrent("lstm"), _tokens),
        "gru_both_ways": (lambda: Sequence(nn.GRU(8, 4, bidirectional=True, batch_first=True)), _tokens),
        "lstm_both_ways": (lambda: Sequence(nn.LSTM(8, 4, bidirectional=True, batch_first=True)), _tokens),
    }
)
"""The module, and five batches of inputs (5, BATCH_SIZE, ...)."""

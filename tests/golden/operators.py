"""The operators of the table in docs/howto/operators.md: a function or a layer for each, on inputs (B, 16)."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

WIDTH: Final = 16

Function = Callable[[Tensor], Tensor]


def image(x: Tensor) -> Tensor:
    """Reshape (B, 16) to (B, 4, 2, 2)."""
    return x.unflatten(1, (4, 2, 2))


def plane(x: Tensor) -> Tensor:
    """Reshape (B, 16) to (B, 1, 4, 4)."""
    return x.unflatten(1, (1, 4, 4))


def signal(x: Tensor) -> Tensor:
    """Reshape (B, 16) to (B, 2, 8)."""
    return x.unflatten(1, (2, 8))


def cube(x: Tensor) -> Tensor:
    """Reshape (B, 16) to (B, 2, 2, 2, 2)."""
    return x.unflatten(1, (2, 2, 2, 2))


def positive(x: Tensor) -> Tensor:
    return x * x + 0.5


def with_assigned_columns(x: Tensor) -> Tensor:
    """Return a copy of the input with other values in two columns."""
    y = x.clone()
    y[:, 0] = 0.0
    y[:, 1] = x[:, 2]
    return y


class Packed(nn.Module):
    """A recurrent layer over sequences whose lengths are computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0.0).long()
        _, last = self.layer(pack_padded_sequence(signal(x), lengths, batch_first=True, enforce_sorted=False))
        result: Tensor = last[0]
        return result


class Shaped(nn.Module):
    """A layer between a function of its input and a choice of its output."""

    def __init__(self, layer: nn.Module, shape: Function, pick: Callable[[object], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.shape, self.pick = layer, shape, pick

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.shape(x))
        result: Tensor = y if self.pick is None else self.pick(y)
        return result


class Attention(nn.Module):
    """torch's attention over four steps with a mask."""

    def __init__(self, masks: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.attention, self.masks = nn.MultiheadAttention(4, 2, batch_first=True), masks

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unflatten(1, (4, 4))
        result: Tensor = self.attention(steps, steps, steps, need_weights=False, **self.masks(x))[0]
        return result


def causal(_: Tensor) -> dict[str, Tensor]:
    """Return the mask that hides later steps."""
    return {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)}


def padding(x: Tensor) -> dict[str, Tensor]:
    """Return a mask that depends on the input: each sample has 1 to 4 steps."""
    lengths = 1 + (x[:, :3] > 0.0).sum(dim=1, keepdim=True)
    return {"key_padding_mask": torch.arange(4) >= lengths}


class GumbelSoftmax(nn.Module):
    """A softmax with Gumbel noise in training, and without it in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x, dim=1) if self.training else x.softmax(1)


class Pair(nn.Module):
    """A bilinear layer over both halves of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x[:, :8], x[:, 8:])
        return result


class Positions(nn.Module):
    """A trained table, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.table(torch.arange(WIDTH))[:, 0]
        return result


class Bags(nn.Module):
    """The mean and the sum of rows of trained tables, added to the input. Its signs are the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = nn.EmbeddingBag(2, WIDTH), nn.EmbeddingBag(2, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0.0).long()
        result: Tensor = x + self.mean(tokens) + self.sum(tokens)
        return result


def first(y: object) -> Tensor:
    assert isinstance(y, tuple)
    result: Tensor = y[0]
    return result


INDEX: Final = torch.tensor([3, 0, 7, 7, 12])
LETTERS: Final = torch.arange(WIDTH) % 3
GRID: Final = torch.linspace(-0.9, 0.9, 18).reshape(1, 3, 3, 2)

FUNCTIONS: Final[Mapping[str, Mapping[str, Function]]] = {
    "arithmetic": {
        "add, sub, mul, neg": lambda x: -(x + 2.0) * x - x,
        "div": lambda x: x / positive(x),
        "pow": lambda x: positive(x) ** 1.7,
        "pow of two tensors": lambda x: positive(x) ** x.tanh(),
        "exp, expm1": lambda x: (0.3 * x).exp() + (0.3 * x).expm1(),
        "log, log1p, log2": lambda x: positive(x).log() + positive(x).log1p() + positive(x).log2(),
        "sqrt, rsqrt": lambda x: positive(x).sqrt() + positive(x).rsqrt(),
        "abs, sign": lambda x: x.abs() + x.sign(),
        "sin, cos": lambda x: x.sin() + x.cos(),
        "tan": lambda x: (0.3 * x).tan(),
        "asin, acos": lambda x: (0.5 * x.tanh()).asin() + (0.5 * x.tanh()).acos(),
        "atan": lambda x: x.atan(),
        "atan2": lambda x: torch.atan2(x, positive(x)),
        "sinh, cosh": lambda x: (0.3 * x).sinh() + (0.3 * x).cosh(),
        "asinh, acosh, atanh": lambda x: x.asinh() + (positive(x) + 1.0).acosh() + (0.5 * x.tanh()).atanh(),
        "erf, erfc": lambda x: x.erf() + x.erfc(),
        "hypot": lambda x: torch.hypot(x, positive(x)),
        "lgamma": lambda x: positive(x).lgamma(),
        "floor, ceil, round, trunc": lambda x: x + x.floor() + x.ceil() + x.round() + x.trunc(),
        "clamp": lambda x: x.clamp(-0.5, 0.7),
        "maximum, minimum": lambda x: torch.maximum(x, 0.5 * x) + torch.minimum(x, x * x),
        "where, masked_fill": lambda x: torch.where(x > 0, x, 0.1 * x).masked_fill(x > 1.0, 0.5),
        "remainder": lambda x: torch.remainder(x, 0.7),
        "lerp": lambda x: torch.lerp(x, x * x, 0.3),
        "addcmul, addcdiv": lambda x: torch.addcmul(x, x, x) + torch.addcdiv(x, x, positive(x)),
        "nan_to_num": lambda x: x.nan_to_num(),
    },
    "activations": {
        "relu, relu6, leaky_relu, prelu": lambda x: (
            F.relu(x) + F.relu6(x) + F.leaky_relu(x) + F.prelu(x, x.new_tensor(0.2))
        ),
        "gelu, silu, mish": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.mish(x),
        "elu, selu, celu": lambda x: F.elu(x) + F.selu(x) + F.celu(x),
        "hardtanh, hardsigmoid, hardswish": lambda x: F.hardtanh(x) + F.hardsigmoid(x) + F.hardswish(x),
        "sigmoid, tanh, softsign, logsigmoid": lambda x: x.sigmoid() + x.tanh() + F.softsign(x) + F.logsigmoid(x),
        "softplus, threshold": lambda x: F.softplus(x) + F.threshold(x, 0.1, 0.0),
        "softmax, log_softmax, softmin": lambda x: x.softmax(1) + x.log_softmax(1) + F.softmin(x, 1),
        "glu": lambda x: F.glu(x, 1),
        "softshrink, hardshrink, tanhshrink": lambda x: F.softshrink(x) + F.hardshrink(x) + F.tanhshrink(x),
    },
    "reductions": {
        "sum, mean": lambda x: x - x.mean(1, keepdim=True) + x.sum(1, keepdim=True),
        "amax, amin": lambda x: x - x.amax(1, keepdim=True) + x.amin(1, keepdim=True),
        "max with indices": lambda x: x - x.max(1, keepdim=True).values,
        "argmax": lambda x: x + x.argmax(1, keepdim=True).to(x.dtype),
        "var, std": lambda x: x + x.var(1, keepdim=True) + x.std(1, keepdim=True),
        "prod": lambda x: x + (0.2 * x + 1.0).prod(1, keepdim=True),
        "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
        "norm": lambda x: x / x.norm(dim=1, keepdim=True),
        "normalize": lambda x: F.normalize(x),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: (0.2 * x + 1.0).cumprod(1),
        "logcumsumexp": lambda x: (100.0 * x).logcumsumexp(1),
        "cummax": lambda x: x.cummax(1).values,
        "sort": lambda x: x.sort(1).values,
        "topk": lambda x: x.topk(4, 1).values,
        "median": lambda x: x - x.median(1, keepdim=True).values,
    },
    "shapes and indices": {
        "reshape, permute, transpose": lambda x: plane(x).permute(0, 2, 1, 3).transpose(2, 3).reshape(-1, WIDTH),
        "cat, stack, split, chunk": lambda x: torch.cat(
            [torch.stack(x.chunk(2, 1), 1).flatten(1), x.split(8, 1)[0]], 1
        ),
        "slices with steps": lambda x: x[:, 1:15:3],
        "flip, roll": lambda x: x.flip(1) + x.roll(3, 1),
        "expand, repeat, tile": lambda x: x.unsqueeze(1).expand(-1, 2, -1).repeat(1, 1, 2).flatten(1).tile(1, 2),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "index_select, x[:, index]": lambda x: x.index_select(1, INDEX) + x[:, INDEX],
        "gather": lambda x: x.gather(1, x.detach().argsort(1)[:, :3]),
        "gather by constants": lambda x: x.gather(1, INDEX.expand(x.shape[0], -1)),
        "scatter, scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, LETTERS.expand(x.shape[0], -1), x),
        "index_add": lambda x: torch.zeros_like(x).index_add(1, LETTERS, x),
        "tril, triu": lambda x: plane(x).tril() + plane(x).triu(1),
        "diagonal": lambda x: plane(x).diagonal(dim1=2, dim2=3),
        "unfold of a tensor": lambda x: x.unfold(1, 4, 3),
        "unfold, fold of images": lambda x: F.fold(F.unfold(plane(x), 2), (4, 4), 2),
        "pixel_shuffle, pixel_unshuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(image(x), 2), 2),
        "channel_shuffle": lambda x: F.channel_shuffle(image(x), 2),
        "pad: constant": lambda x: F.pad(plane(x), (1, 0, 2, 1), value=0.5),
        "pad: reflect, replicate": lambda x: (
            F.pad(plane(x), (1, 2, 1, 0), mode="reflect") + F.pad(plane(x), (1, 2, 1, 0), mode="replicate")
        ),
        "pad: circular": lambda x: F.pad(plane(x), (1, 2, 1, 0), mode="circular"),
        "x[:, 0] = 0.0": with_assigned_columns,
        "one_hot": lambda x: x.unsqueeze(2) * F.one_hot(LETTERS, 3),
        "boolean index x[x > 0]": lambda x: x[x > 0].sum() + x,
        "nonzero": lambda x: x + x.nonzero().sum(),
    },
    "matrices": {
        "matmul, bmm": lambda x: torch.bmm(plane(x)[:, 0], plane(x)[:, 0]) @ plane(x)[:, 0],
        "einsum": lambda x: torch.einsum("bcij,bcjk->bik", plane(x), plane(x)),
        "einsum of three tensors": lambda x: torch.einsum("bcij,bcjk,bckl->bil", plane(x), plane(x), plane(x)),
        "baddbmm": lambda x: torch.baddbmm(plane(x)[:, 0], plane(x)[:, 0], plane(x)[:, 0]),
        "outer product": lambda x: x[:, :4, None] * x[:, None, 4:8],
        "cosine_similarity": lambda x: F.cosine_similarity(x[:, :8], x[:, 8:], dim=1)[:, None] * x,
        "pairwise_distance": lambda x: F.pairwise_distance(x[:, :8], x[:, 8:])[:, None] * x,
        "cdist": lambda x: torch.cdist(signal(x), signal(x)[:, :, [1, 0, 3, 2, 5, 4, 7, 6]]),
        "linalg.inv": lambda x: torch.linalg.inv(plane(x)[:, 0] + 5.0 * torch.eye(4)),
        "fft.fft: real part": lambda x: torch.fft.fft(x).real,
        "fft.rfft": lambda x: torch.fft.rfft(x).abs(),
    },
    "images and attention": {
        "interpolate: nearest": lambda x: F.interpolate(plane(x), scale_factor=2.0, mode="nearest"),
        "interpolate: bilinear": lambda x: F.interpolate(plane(x), scale_factor=2.0, mode="bilinear"),
        "interpolate: bicubic": lambda x: F.interpolate(plane(x), scale_factor=2.0, mode="bicubic"),
        "interpolate: area": lambda x: F.interpolate(plane(x), size=(2, 2), mode="area"),
        "grid_sample": lambda x: F.grid_sample(plane(x), GRID.expand(x.shape[0], -1, -1, -1), align_corners=False),
        "affine_grid": lambda x: F.affine_grid(
            x[:, :6].unflatten(1, (2, 3)), [x.shape[0], 1, 4, 4], align_corners=False
        ),
        "max_pool1d, 2d": lambda x: F.max_pool2d(plane(x), 2).flatten(1) + F.max_pool1d(signal(x), 4).flatten(1),
        "max_pool3d": lambda x: F.max_pool3d(cube(x), 2),
        "avg_pool1d, 2d": lambda x: F.avg_pool2d(plane(x), 2).flatten(1) + F.avg_pool1d(signal(x), 4).flatten(1),
        "avg_pool3d": lambda x: F.avg_pool3d(cube(x), 2),
        "adaptive_avg_pool, adaptive_max_pool": lambda x: (
            F.adaptive_avg_pool2d(plane(x), 3) + F.adaptive_max_pool2d(plane(x), 3)
        ),
        "lp_pool2d": lambda x: F.lp_pool2d(positive(plane(x)), 2.0, 2),
        "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(plane(x), 2, return_indices=True), 2),
        "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
            signal(x), signal(x), signal(x), is_causal=True
        ),
    },
}

LAYERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "Conv1d": lambda: Shaped(nn.Conv1d(2, 3, 3, padding=1), signal),
    "Conv2d: strides, padding, dilation, groups": lambda: Shaped(
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=2), nn.Conv2d(6, 6, 3, groups=3, dilation=2, padding=2)),
        image,
    ),
    "Conv2d: depthwise": lambda: Shaped(nn.Conv2d(4, 8, 3, padding=1, groups=4), image),
    "Conv3d": lambda: Shaped(nn.Conv3d(2, 3, 2, padding=1), cube),
    "ConvTranspose1d": lambda: Shaped(nn.ConvTranspose1d(2, 3, 3, stride=2), signal),
    "ConvTranspose2d": lambda: Shaped(nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), image),
    "ConvTranspose2d: groups, dilation": lambda: Shaped(nn.ConvTranspose2d(4, 4, 3, groups=2, dilation=2), image),
    "ConvTranspose3d": lambda: Shaped(nn.ConvTranspose3d(2, 3, 2), cube),
    "BatchNorm1d, BatchNorm2d": lambda: nn.Sequential(
        nn.BatchNorm1d(WIDTH), Shaped(nn.BatchNorm2d(4), image), nn.Flatten()
    ),
    "LayerNorm, RMSNorm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)),
    "GroupNorm, InstanceNorm2d": lambda: nn.Sequential(
        Shaped(nn.GroupNorm(2, 4), image), nn.InstanceNorm2d(4, affine=True)
    ),
    "LocalResponseNorm": lambda: Shaped(nn.LocalResponseNorm(2), image),
    "weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "Bilinear": Pair,
    "Dropout, AlphaDropout": lambda: nn.Sequential(nn.Dropout(0.2), nn.AlphaDropout(0.1)),
    "Dropout2d": lambda: Shaped(nn.Dropout2d(0.2), image),
    "gumbel_softmax in training": GumbelSoftmax,
    "RNN": lambda: Shaped(nn.RNN(8, 6, batch_first=True), signal, first),
    "GRU": lambda: Shaped(nn.GRU(8, 6, batch_first=True), signal, first),
    "GRU: bidirectional, two layers": lambda: Shaped(
        nn.GRU(8, 4, num_layers=2, bidirectional=True, batch_first=True), signal, first
    ),
    "LSTM": lambda: Shaped(nn.LSTM(8, 6, batch_first=True), signal, first),
    "LSTM: bidirectional": lambda: Shaped(nn.LSTM(8, 4, bidirectional=True, batch_first=True), signal, first),
    "GRU of pack_padded_sequence": Packed,
    "GRUCell": lambda: nn.GRUCell(WIDTH, 6),
    "MultiheadAttention: causal mask": lambda: Attention(causal),
    "MultiheadAttention: padding mask of the input": lambda: Attention(padding),
    "TransformerEncoderLayer": lambda: Shaped(
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True), signal
    ),
    "Embedding of positions": Positions,
    "EmbeddingBag: mean, sum": Bags,
}

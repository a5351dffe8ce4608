"""Models of images: residual, inverted-residual, encoder-decoder, attention and mixer networks, own definitions.

The structure of each is the published one. The widths are smaller, and the inputs are 32 x 32 or less, because the zoo
trains each model in three runtimes on a CPU.
"""

from typing import Final

import torch
from torch import Tensor, nn

RESNET_STAGES: Final = ((1, 1), (2, 2), (4, 2), (8, 2))
"""(factor of the width, stride) of ResNet18's four stages of two blocks."""
MOBILENET_V2: Final = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 2, 2), (6, 96, 1, 1), (6, 160, 2, 2))
"""(expansion, channels, blocks, stride); the last stage of the paper is left out, and strides suit 32 x 32 images."""
MOBILENET_V3: Final = (
    *((16, 16, 3, True, "relu", 2), (72, 24, 3, False, "relu", 1), (88, 24, 3, False, "relu", 1)),
    *((96, 40, 5, True, "hard", 2), (240, 40, 5, True, "hard", 1), (120, 48, 5, True, "hard", 1)),
    *((288, 96, 5, True, "hard", 2), (576, 96, 5, True, "hard", 1)),
)
"""(expanded channels, channels, kernel, squeeze-and-excite, activation, stride) of the small network's blocks."""


def conv_norm(ins: int, outs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution without bias and its BatchNorm."""
    conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outs)]


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut. Reference: He et al. 2015, arXiv 1512.03385, section 4.1."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_norm(ins, outs, 3, stride), nn.ReLU(), *conv_norm(outs, outs, 3))
        is_same = ins == outs and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*conv_norm(ins, outs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ins, H, W) to (B, outs, H / stride, W / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet18 for small images: the stem is a 3 x 3 convolution without a pool."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        layers, ins = [*conv_norm(3, width, 3), nn.ReLU()], width
        for factor, stride in RESNET_STAGES:
            layers += [BasicBlock(ins, width * factor, stride), BasicBlock(width * factor, width * factor, 1)]
            ins = width * factor
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(ins, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, projection. Reference: Sandler et al. 2018, arXiv 1801.04381, section 3.3."""

    def __init__(self, ins: int, outs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = ins * expansion
        layers = [*conv_norm(ins, inner, 1), nn.ReLU6()] if expansion > 1 else []
        layers += [*conv_norm(inner, inner, 3, stride, inner), nn.ReLU6(), *conv_norm(inner, outs, 1)]
        self.body, self.is_residual = nn.Sequential(*layers), ins == outs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ins, H, W) to (B, outs, H / stride, W / stride)."""
        output: Tensor = self.body(x)
        return x + output if self.is_residual else output


class MobileNetV2(nn.Module):
    """MobileNetV2 with a width factor."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        ins = int(32 * width)
        layers = [*conv_norm(3, ins, 3), nn.ReLU6()]
        for expansion, channels, num_blocks, stride in MOBILENET_V2:
            for block in range(num_blocks):
                outs = int(channels * width)
                layers.append(InvertedResidual(ins, outs, expansion, 1 if block else stride))
                ins = outs
        layers += [*conv_norm(ins, int(1280 * width), 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(int(1280 * width), num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits


class SqueezeExcite(nn.Module):
    """A factor for each channel, of the means of all. Reference: Hu et al. 2017, arXiv 1709.01507, section 3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4)
        self.gate = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.ReLU()),
            *(nn.Conv2d(inner, channels, 1), nn.Hardsigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        output: Tensor = x * self.gate(x)
        return output


class MobileNetV3Block(nn.Module):
    """An inverted residual with squeeze-and-excite. Reference: Howard et al. 2019, arXiv 1905.02244, figure 4."""

    def __init__(self, ins: int, row: tuple[int, int, int, bool, str, int], width: float) -> None:
        super().__init__()
        inner, outs, kernel, has_gate, activation, stride = row
        inner, outs = int(inner * width), int(outs * width)
        make = nn.Hardswish if activation == "hard" else nn.ReLU
        layers = [*conv_norm(ins, inner, 1), make(), *conv_norm(inner, inner, kernel, stride, inner)]
        layers += [SqueezeExcite(inner)] if has_gate else []
        self.body = nn.Sequential(*layers, make(), *conv_norm(inner, outs, 1))
        self.is_residual, self.num_outs = ins == outs and stride == 1, outs

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ins, H, W) to (B, outs, H / stride, W / stride)."""
        output: Tensor = self.body(x)
        return x + output if self.is_residual else output


class MobileNetV3(nn.Module):
    """MobileNetV3-Small with a width factor."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        ins = int(16 * width)
        layers = [*conv_norm(3, ins, 3), nn.Hardswish()]
        for row in MOBILENET_V3:
            layers.append(MobileNetV3Block(ins, row, width))
            ins = int(row[1] * width)
        outs, hidden = int(576 * width), int(1024 * width)
        layers += [*conv_norm(ins, outs, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(outs, hidden), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(hidden, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits


class UNet(nn.Module):
    """An encoder-decoder with skips. Reference: Ronneberger et al. 2015, arXiv 1505.04597, section 2."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.first, self.second = self._double(1, width), self._double(width, 2 * width)
        self.bottom = self._double(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.out_second = self._double(4 * width, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out_first = self._double(2 * width, width)
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, num_classes, 1)

    @staticmethod
    def _double(ins: int, outs: int) -> nn.Sequential:
        return nn.Sequential(*conv_norm(ins, outs, 3), nn.ReLU(), *conv_norm(outs, outs, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, H, W) to logits of each pixel (B, H, W, num_classes)."""
        first = self.first(x)
        second = self.second(self.pool(first))
        x = self.up_second(self.bottom(self.pool(second)))
        x = self.up_first(self.out_second(torch.cat([second, x], dim=1)))
        logits: Tensor = self.head(self.out_first(torch.cat([first, x], dim=1)))
        return logits.movedim(1, -1)


class VisionTransformer(nn.Module):
    """Patches, a class token and attention. Reference: Dosovitskiy et al. 2020, arXiv 2010.11929, section 3.1."""

    def __init__(self, num_classes: int, width: int, size: int, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, size, size) to logits (B, num_classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.body(tokens)[:, 0]))
        return logits


class MixerBlock(nn.Module):
    """Two perceptrons, over patches and over channels."""

    def __init__(self, num_patches: int, width: int) -> None:
        super().__init__()
        self.norm_patches, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(
            nn.Linear(num_patches, 2 * num_patches), nn.GELU(), nn.Linear(2 * num_patches, num_patches)
        )
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, patches, width) to the same shape."""
        x = x + self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2)
        output: Tensor = x + self.channels(self.norm_channels(x))
        return output


class MlpMixer(nn.Module):
    """Patches without attention. Reference: Tolstikhin et al. 2021, arXiv 2105.01601, section 2."""

    def __init__(self, num_classes: int, width: int, size: int, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.body = nn.Sequential(*(MixerBlock((size // patch) ** 2, width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, size, size) to logits (B, num_classes)."""
        tokens = self.body(self.patches(x).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return logits

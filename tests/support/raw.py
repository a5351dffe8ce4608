"""Three Apps whose devices have raw data: pixels, sound and characters."""

import math
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fanin.edge.export import App

NUM_CLASSES = 4
BATCH_SIZE = 4


class Pixels(nn.Module):
    """Maps bytes (n, 8, 8, 1) to normalised values (n, 1, 8, 8)."""

    def forward(self, raw: Tensor) -> Tensor:
        """Normalise to a mean of about 0, and move the channels to the front."""
        return ((raw.to(torch.float32) / 255.0 - 0.5) / 0.25).permute(0, 3, 1, 2)


class Spectrogram(nn.Module):
    """Maps sound (n, samples) to the logarithm of energies in bands (n, bands, frames).

    The product of a frame with cosines and sines is its discrete Fourier transform. A convolution computes it for all
    frames.
    """

    def __init__(self, frame: int = 64, hop: int = 32, num_bands: int = 10) -> None:
        super().__init__()
        places, frequencies = torch.arange(frame), torch.arange(frame // 2 + 1)
        angles = 2.0 * math.pi * frequencies[:, None] * places / frame
        waves = torch.cat([angles.cos(), -angles.sin()]) * torch.hann_window(frame)
        centres = torch.linspace(0.0, frame / 2, num_bands)
        self.hop = hop
        self.register_buffer("waves", waves[:, None])
        self.register_buffer("bands", (1.0 - (frequencies - centres[:, None]).abs() / 4.0).clamp(min=0.0))

    def forward(self, raw: Tensor) -> Tensor:
        """Compute frames, powers, bands and the logarithm."""
        real, imaginary = nn.functional.conv1d(raw[:, None], self.waves, stride=self.hop).chunk(2, dim=1)
        return torch.log(self.bands @ (real.square() + imaginary.square()) + 1e-3)


class Characters(nn.Module):
    """Maps bytes of text (n, T) to tokens (n, T): lower-case letters from 1 on, all other bytes to 0."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(256, dtype=torch.int32)
        table[ord("a") : ord("z") + 1] = torch.arange(1, 27, dtype=torch.int32)
        self.register_buffer("table", table)

    def forward(self, raw: Tensor) -> Tensor:
        """Look up each character."""
        return self.table[raw.to(torch.int32)]


def raw_of(name: str) -> Tensor:
    """Return raw inputs, always the same."""
    generator = torch.Generator().manual_seed(3)
    if name == "spectrogram":
        time = torch.arange(512) / 64.0
        pitch = torch.rand((24, 1), generator=generator) * 20.0
        return torch.sin(2.0 * math.pi * pitch * time) + 0.1 * torch.randn((24, 512), generator=generator)
    shape = (24, 8, 8, 1) if name == "pixels" else (24, 12)
    return torch.randint(0, 256 if name == "pixels" else 128, shape, generator=generator, dtype=torch.uint8)


PREPROCESS = MappingProxyType({"pixels": Pixels, "spectrogram": Spectrogram, "characters": Characters})


def raw_app(name: str) -> App:
    """Return the App of this name, always with the same initial parameters."""
    torch.manual_seed(3)
    preprocess, raw = PREPROCESS[name](), raw_of(name)
    x = preprocess(raw)
    layers = (nn.Embedding(27, 4), nn.Flatten(), nn.Linear(48, NUM_CLASSES))
    flat = (nn.Flatten(), nn.Linear(x[0].numel(), NUM_CLASSES))
    return App(
        name=name,
        module=nn.Sequential(*(layers if name == "characters" else flat)),
        calibration=x,
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        preprocess=preprocess,
        raw=raw,
    )


def pixels() -> App:
    """Return the App of pixels, for a job that finds it by name."""
    return raw_app("pixels")

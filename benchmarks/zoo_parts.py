"""Models of several inputs, of several heads, of experts, and of noise."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot, softmax

from fanin.edge.export import cross_entropy


def features(channels: int, width: int) -> nn.Sequential:
    """Return two convolutions, a pool and a linear layer to (B, width)."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, width)),
    )


class Siamese(nn.Module):
    """One encoder for two images, and the distance of their features."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder, self.head = features(1, width), nn.Linear(width, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Map two images (B, 1, H, W) to logits (B, 2)."""
        logits: Tensor = self.head((self.encoder(left) - self.encoder(right)).abs())
        return logits


class TwoInputs(nn.Module):
    """An image and some numbers, with dropout; returns a dict."""

    def __init__(self, num_numbers: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.encoder = features(1, width)
        self.head = nn.Sequential(
            nn.Linear(width + num_numbers, width), nn.ReLU(), nn.Dropout(0.25), nn.Linear(width, num_classes)
        )

    def forward(self, image: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        """Map images (B, 1, H, W) and numbers (B, n) to ``features`` and ``logits`` (B, num_classes)."""
        image_features = self.encoder(image)
        return {"features": image_features, "logits": self.head(torch.cat([image_features, numbers], dim=1))}


class Experts(nn.Module):
    """A mixture of perceptrons, of which a gate selects one for each sample.

    Reference:
        Fedus et al. 2021, arXiv 2101.03961, section 2.1. Here all experts are computed, and the gate's share of the
        others is set to zero, because a graph's shapes do not depend on values.
    """

    def __init__(self, num_features: int, num_classes: int, num_experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(num_experts)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (B, n) to logits (B, num_classes)."""
        shares = softmax(self.gate(x), dim=-1)
        selected = one_hot(shares.argmax(dim=-1), len(self.experts)).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits: Tensor = self.head(torch.relu(((shares * selected).unsqueeze(-1) * outputs).sum(dim=1)))
        return logits


class TwoHeads(nn.Module):
    """One encoder and two heads of the same number of classes."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(features(1, width), nn.ReLU())
        self.kind, self.quarter = nn.Linear(width, num_classes), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, H, W) to the logits of both heads (B, 2, num_classes)."""
        hidden = self.encoder(x)
        return torch.stack([self.kind(hidden), self.quarter(hidden)], dim=1)


def weighted_heads(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of both heads (B,): the second counts half."""
    return cross_entropy(logits[:, 0], labels[:, 0]) + 0.5 * cross_entropy(logits[:, 1], labels[:, 1])


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the pixels (B,) of logits (B, H, W, num_classes)."""
    return cross_entropy(logits, labels).mean(dim=(1, 2))


class VariationalAutoencoder(nn.Module):
    """Two perceptrons with a noisy code between them. Reference: Kingma and Welling 2013, arXiv 1312.6114."""

    def __init__(self, num_values: int, num_codes: int, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(num_values, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, num_codes), nn.Linear(width, num_codes)
        self.decoder = nn.Sequential(nn.Linear(num_codes, width), nn.ReLU(), nn.Linear(width, num_values))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, ...) to (B, num_values + 2 num_codes): the reconstruction, the mean, the log variance."""
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if self.training else mean
        return torch.cat([self.decoder(code), mean, log_variance], dim=1)


class EvidenceBound:
    """The squared error of the reconstruction and the divergence of the code, from one tensor."""

    def __init__(self, num_values: int, num_codes: int) -> None:
        self._sizes = [num_values, num_codes, num_codes]

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return losses (B,). The targets (B, num_values + 2 num_codes) are padded."""
        values, mean, log_variance = output.split(self._sizes, dim=1)
        error = mse_loss(values, y[:, : self._sizes[0]], reduction="none").mean(dim=1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(dim=1)
        return error + 0.01 * divergence


class DenoisingAutoencoder(nn.Module):
    """Convolutions that repair an image; in training they receive noise. Reference: Vincent et al. 2008, ICML."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
            *(nn.Upsample(scale_factor=2), nn.Conv2d(width, 1, 3, padding=1), nn.Flatten()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, H, W) to their values (B, H W)."""
        values: Tensor = self.body(x + 0.3 * torch.randn_like(x) if self.training else x)
        return values

"""Models of token sequences and signals: transformers, BERT and Llama as they are, convolutions over time, bags."""

import sys
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class DropoutEncoder(nn.Module):
    """``nn.TransformerEncoder`` with dropout, and the mean over the tokens."""

    def __init__(self, vocabulary: int, length: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.body(self.tokens(x) + self.positions).mean(dim=1))
        return logits


def bert(vocabulary: int, length: int, num_classes: int) -> nn.Module:
    """Return ``BertForSequenceClassification`` with random weights."""
    library = _transformers()
    config = library.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        num_labels=num_classes,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    module: nn.Module = library.BertForSequenceClassification(config)
    return module


def llama(vocabulary: int, length: int) -> nn.Module:
    """Return ``LlamaForCausalLM`` with random weights and grouped queries."""
    library = _transformers()
    config = library.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    module: nn.Module = library.LlamaForCausalLM(config)
    return module


def _transformers() -> ModuleType:
    import transformers

    return sys.modules[transformers.__name__]


class TemporalBlock(nn.Module):
    """Two dilated causal convolutions with normalized weights and dropout."""

    def __init__(self, ins: int, outs: int, dilation: int) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.first = weight_norm(nn.Conv1d(ins, outs, 3, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(outs, outs, 3, dilation=dilation))
        self.shortcut = nn.Identity() if ins == outs else nn.Conv1d(ins, outs, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ins, T) to (B, outs, T)."""
        hidden = self.dropout(torch.relu(self.first(self.pad(x))))
        hidden = self.dropout(torch.relu(self.second(self.pad(hidden))))
        return torch.relu(hidden + self.shortcut(x))


class TemporalConvolutions(nn.Module):
    """A TCN. Reference: Bai et al. 2018, arXiv 1803.01271, section 3."""

    def __init__(self, channels: int, num_classes: int, width: int = 16) -> None:
        super().__init__()
        widths = (channels, width, width, width)
        self.body = nn.Sequential(
            *(TemporalBlock(widths[level], widths[level + 1], 2**level) for level in range(len(widths) - 1))
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, T) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.body(x)[:, :, -1])
        return logits


class KeywordSpotter(nn.Module):
    """Convolutions over a spectrogram and a bidirectional GRU over time, as in Arik et al. 2017, arXiv 1703.05390."""

    def __init__(self, num_bands: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, (5, 3), stride=(2, 2), padding=(2, 1), bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.cell = nn.GRU(8 * (num_bands // 2), 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, bands, T) to logits (B, num_classes)."""
        steps = self.conv(x).flatten(1, 2).transpose(1, 2)
        states, _ = self.cell(steps)
        logits: Tensor = self.head(states.mean(dim=1))
        return logits


class Forecaster(nn.Module):
    """Convolutions over a signal, and the next values."""

    def __init__(self, steps: int, horizon: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(1, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU()),
            *(nn.Flatten(), nn.Linear(width * (steps // 2), horizon)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, steps) to values (B, horizon)."""
        values: Tensor = self.body(x)
        return values


class BagOfWords(nn.Module):
    """``nn.EmbeddingBag`` and a linear layer."""

    def __init__(self, vocabulary: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(vocabulary, width, mode="mean"), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, num_classes)."""
        logits: Tensor = self.head(self.bag(x))
        return logits

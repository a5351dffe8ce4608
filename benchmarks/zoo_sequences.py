"""Models of tokens, signals, series and graphs: transformers, torchaudio, neuralforecast, torch_geometric."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_packages import NUM_CLASSES, NUM_EXAMPLES, Stock, ZooModel, normal, rows_of, tokens

from fanin.edge.export import next_token, squared_error

VOCABULARY: Final = 100
LENGTH: Final = 16
"""Tokens of a sequence."""
STEPS, HORIZON = 32, 8
"""Values of a series, and of its forecast."""
SAMPLES: Final = 1600
"""Values of a signal."""
NUM_NODES, NUM_FEATURES = 6, 8
WIDTHS: Final = MappingProxyType(
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
)
"""The sizes of most configs of transformers."""


class Classified(nn.Module):
    """An encoder of a package, with a linear layer over the mean of its outputs."""

    def __init__(self, encoder: nn.Module, width: int, pick: Callable[[object], Tensor]) -> None:
        super().__init__()
        self.encoder, self.head, self.pick = encoder, nn.Linear(width, NUM_CLASSES), pick

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, ...) to logits (B, NUM_CLASSES)."""
        logits: Tensor = self.head(self.pick(self.encoder(x)).mean(1))
        return logits


def _transformers(kind: str, inputs: Mapping[str, Tensor], output: str = "logits", **sizes: object) -> Stock:
    """Return a classifier of transformers."""
    return Stock(module=_configured(kind, num_labels=NUM_CLASSES, **sizes), inputs=inputs, output=output)


def _configured(kind: str, **sizes: object) -> nn.Module:
    import transformers

    cls = getattr(transformers, kind)
    module: nn.Module = cls(cls.config_class(**sizes))
    return module


def _text(kind: str, **sizes: object) -> Stock:
    return _transformers(kind, {"input_ids": tokens(VOCABULARY, LENGTH)}, vocab_size=VOCABULARY, **sizes)


def _image(kind: str, **sizes: object) -> Stock:
    return _transformers(kind, {"pixel_values": normal(3, 64, 64)}, **sizes)


def _language_model(kind: str, **sizes: object) -> Stock:
    return Stock(
        module=_configured(kind, vocab_size=VOCABULARY, **sizes),
        inputs={"input_ids": tokens(VOCABULARY, LENGTH)},
        num_classes=VOCABULARY,
        loss=next_token,
        output="logits",
    )


def _t5() -> Stock:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    encoder = _configured("T5EncoderModel", vocab_size=VOCABULARY, **sizes)
    return Stock(module=Classified(encoder, 32, last_hidden_state), inputs={"x": tokens(VOCABULARY, LENGTH)})


def last_hidden_state(output: object) -> Tensor:
    """Return the last states of an output of transformers (B, T, width)."""
    state: Tensor = output.last_hidden_state  # type: ignore[attr-defined]  # a ModelOutput
    return state


def _whisper() -> Stock:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    encoder = WhisperEncoder(WhisperConfig(max_source_positions=50, num_mel_bins=20, **sizes))
    return Stock(module=Classified(encoder, 32, last_hidden_state), inputs={"x": normal(20, 100)})


def _wav2vec2() -> Stock:
    return _transformers(
        "Wav2Vec2ForSequenceClassification",
        {"input_values": normal(SAMPLES)},
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=32,
        mask_time_prob=0.0,
        layerdrop=0.0,
        **WIDTHS,
    )


def _patchtst() -> Stock:
    module = _configured(
        "PatchTSTForPrediction",
        num_input_channels=3,
        context_length=STEPS,
        prediction_length=HORIZON,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
    )
    inputs = {"past_values": normal(STEPS, 3)}
    return Stock(module=module, inputs=inputs, num_classes=0, loss=squared_error, output="prediction_outputs")


class MelClassifier(nn.Module):
    """Mel features of torchaudio before its speech model."""

    def __init__(self) -> None:
        super().__init__()
        import torchaudio

        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=128, hop_length=64, n_mels=16)
        self.net = torchaudio.models.DeepSpeech(n_feature=16, n_hidden=32, n_class=NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map signals (B, T) to log-probabilities (B, NUM_CLASSES, frames)."""
        features = torch.log(self.mel(x) + 1e-6).transpose(1, 2).unsqueeze(1)
        outputs: Tensor = self.net(features)
        return outputs.transpose(1, 2)


def _mel() -> Stock:
    return Stock(module=MelClassifier(), inputs={"x": normal(SAMPLES)}, class_axis=1, loss=frame_loss)


def _wav2letter() -> Stock:
    import torchaudio

    module = torchaudio.models.Wav2Letter(num_classes=NUM_CLASSES, input_type="waveform", num_features=1)
    return Stock(module=module, inputs={"x": normal(1, 4000)}, class_axis=1, loss=frame_loss)


def frame_loss(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the frames of each signal, without those of the label -1."""
    return F.nll_loss(log_probabilities, labels, ignore_index=-1, reduction="none").mean(1)


class ConformerClassifier(nn.Module):
    """torchaudio's Conformer over sequences of full length, and a linear layer over the mean of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        import torchaudio

        self.encoder = torchaudio.models.Conformer(
            input_dim=16, num_heads=4, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7
        )
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (B, T, 16) to logits (B, NUM_CLASSES)."""
        outputs, _ = self.encoder(x, torch.full((x.shape[0],), x.shape[1]))
        logits: Tensor = self.head(outputs.mean(1))
        return logits


def _conformer() -> Stock:
    return Stock(module=ConformerClassifier(), inputs={"x": normal(24, 16)})


class Forecast(nn.Module):
    """A model of neuralforecast on a tensor instead of its dict of windows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map series (B, STEPS) to forecasts (B, HORIZON)."""
        window = {"insample_y": x.unsqueeze(-1), "insample_mask": torch.ones_like(x).unsqueeze(-1)}
        window |= dict.fromkeys(("futr_exog", "hist_exog", "stat_exog"))
        outputs: Tensor = self.model(window)
        return outputs.flatten(1)


def _forecast(name: str, **settings: object) -> Stock:
    import neuralforecast.models

    model = getattr(neuralforecast.models, name)(h=HORIZON, input_size=STEPS, **settings)
    return Stock(module=Forecast(model), inputs={"x": normal(STEPS)}, num_classes=0, loss=squared_error)


class DenseGraphs(nn.Module):
    """Two dense layers of torch_geometric, and the mean over the nodes."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        import torch_geometric.nn

        cls = getattr(torch_geometric.nn, layer)
        self.first, self.second = (
            cls(_perceptron(ins)) if layer == "DenseGINConv" else cls(ins, 16) for ins in (NUM_FEATURES, 16)
        )
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        """Map features (B, N, NUM_FEATURES) and adjacencies (B, N, N) to logits (B, NUM_CLASSES)."""
        x = torch.relu(self.first(x, adj))
        logits: Tensor = self.head(torch.relu(self.second(x, adj)).mean(1))
        return logits


def _perceptron(ins: int) -> nn.Module:
    return nn.Sequential(nn.Linear(ins, 16), nn.ReLU(), nn.Linear(16, 16))


def _graphs(layer: str) -> Stock:
    generator = torch.Generator().manual_seed(1)
    edges = torch.rand(NUM_EXAMPLES, NUM_NODES, NUM_NODES, generator=generator).triu(1) < 0.4
    adjacency = (edges | edges.transpose(1, 2)).float()
    return Stock(module=DenseGraphs(layer), inputs={"x": normal(NUM_NODES, NUM_FEATURES), "adj": adjacency})


SEQUENCES: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        **rows_of(
            "transformers",
            {
                "bert": partial(_text, "BertForSequenceClassification", **WIDTHS),
                "distilbert": partial(
                    _text, "DistilBertForSequenceClassification", dim=32, n_layers=2, n_heads=2, hidden_dim=64
                ),
                "albert": partial(_text, "AlbertForSequenceClassification", embedding_size=16, **WIDTHS),
                "mobilebert": partial(
                    _text,
                    "MobileBertForSequenceClassification",
                    embedding_size=32,
                    true_hidden_size=32,
                    intra_bottleneck_size=32,
                    **WIDTHS | {"hidden_size": 64},
                ),
                "roberta": partial(_text, "RobertaForSequenceClassification", **WIDTHS),
                "electra": partial(_text, "ElectraForSequenceClassification", embedding_size=16, **WIDTHS),
                "opt": partial(
                    _language_model,
                    "OPTForCausalLM",
                    word_embed_proj_dim=32,
                    ffn_dim=64,
                    **WIDTHS,
                ),
                "gpt_neox": partial(_language_model, "GPTNeoXForCausalLM", **WIDTHS),
                "qwen2": partial(_language_model, "Qwen2ForCausalLM", num_key_value_heads=1, **WIDTHS),
                "gpt2": partial(_language_model, "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH),
                "llama": partial(_language_model, "LlamaForCausalLM", num_key_value_heads=1, **WIDTHS),
                "t5_encoder": _t5,
                "whisper_encoder": _whisper,
                "patchtst": _patchtst,
                "vit": partial(_image, "ViTForImageClassification", image_size=64, patch_size=16, **WIDTHS),
                "dinov2": partial(_image, "Dinov2ForImageClassification", image_size=64, patch_size=16, **WIDTHS),
                "resnet": partial(
                    _image,
                    "ResNetForImageClassification",
                    embedding_size=16,
                    hidden_sizes=[16, 24, 32, 48],
                    depths=[1, 1, 1, 1],
                    layer_type="basic",
                ),
                "convnext": partial(
                    _image, "ConvNextForImageClassification", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]
                ),
                "swin": partial(
                    _image,
                    "SwinForImageClassification",
                    image_size=64,
                    window_size=4,
                    embed_dim=8,
                    depths=[1, 1],
                    num_heads=[1, 2],
                ),
                "segformer": partial(
                    _image,
                    "SegformerForImageClassification",
                    hidden_sizes=[8, 16, 24, 32],
                    depths=[1, 1, 1, 1],
                    num_attention_heads=[1, 1, 2, 2],
                ),
            },
        ),
        "mixtral": ZooModel(
            package="transformers",
            make=partial(
                _language_model,
                "MixtralForCausalLM",
                num_key_value_heads=1,
                num_local_experts=4,
                experts_implementation="batched_mm",
                **WIDTHS,
            ),
            settings="experts_implementation=batched_mm",
        ),
        "wav2vec2": ZooModel(package="transformers", make=_wav2vec2, settings="layerdrop=0, mask_time_prob=0"),
        **rows_of("torchaudio", {"mel_deepspeech": _mel, "wav2letter": _wav2letter, "conformer": _conformer}),
        **rows_of(
            "neuralforecast",
            {
                "nhits": partial(_forecast, "NHITS"),
                "lstm": partial(_forecast, "LSTM", encoder_hidden_size=16, decoder_hidden_size=16),
                "dlinear": partial(_forecast, "DLinear"),
                "gru": partial(_forecast, "GRU", encoder_hidden_size=16, decoder_hidden_size=16),
                "tcn": partial(_forecast, "TCN", encoder_hidden_size=16, decoder_hidden_size=16),
                "nbeats": partial(_forecast, "NBEATS", mlp_units=[[16, 16]] * 3),
                "tide": partial(_forecast, "TiDE", hidden_size=16, decoder_output_dim=8),
                "mlp": partial(_forecast, "MLP", hidden_size=32),
            },
        ),
        **rows_of(
            "torch-geometric",
            {
                "dense_gcn": partial(_graphs, "DenseGCNConv"),
                "dense_sage": partial(_graphs, "DenseSAGEConv"),
                "dense_gin": partial(_graphs, "DenseGINConv"),
            },
        ),
    }
)

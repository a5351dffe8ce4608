"""Models and batches of the matrix's cells, by family: small, and identical on every rank and in one process."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from parallel.cells import BATCH, LENGTH, VOCABULARY, Cell
from torch import nn

from fanin.datacenter.config.settings import LayoutSettings
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.families.encoders import encoder_layout
from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.models.encoder import Encoder, EncoderConfig
from fanin.datacenter.models.mlp import Mlp
from fanin.datacenter.models.pretrained import module_of
from fanin.datacenter.models.tiny.ds_cnn import CHANNELS, NUM_BLOCKS, DsCnn
from fanin.datacenter.models.tiny.resnet8 import ResNet8
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.objective import padded_objective
from fanin.datacenter.parallel.transformers_layout import pretrained_model
from fanin.edge.export.app.app import cross_entropy
from fanin.edge.runtimes.graphs import NO_TOKEN

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRETRAINED: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": LENGTH // 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": LENGTH // 2},
    "gemma": {"head_dim": 4},
}
"""Kinds of ``transformers`` models, each with the settings that are its own. Qwen2 also has biases."""
SIZES: Mapping[str, object] = {"hidden_size": 32, "num_attention_heads": 8}
FEED_FORWARD: Mapping[str, object] = {"intermediate_size": 32}
UNPLANNED: Mapping[str, Mapping[str, object]] = {
    "qwen3": {**SIZES, **FEED_FORWARD, "num_key_value_heads": 4, "head_dim": 4},
    "phi3": {**SIZES, **FEED_FORWARD, "num_key_value_heads": 4},
    "mixtral": {**SIZES, **FEED_FORWARD, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {**SIZES, **FEED_FORWARD},
    "gpt2": {"n_embd": 32, "n_head": 8, "n_positions": LENGTH, "tie_word_embeddings": True},
    "opt": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": LENGTH},
    "bert": {**SIZES, **FEED_FORWARD, "max_position_embeddings": LENGTH, "tie_word_embeddings": True},
}
"""Kinds of ``transformers`` models that ``tp`` cannot split, each with its own names of sizes."""
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout", "hidden_dropout_prob")
MASKED = ("encoder", *PRETRAINED)
"""Families whose models accept an attention mask."""
RESNET = LayoutSettings(
    layers="stacks", num_layers=3, inputs=("stem",), outputs=("pool", "head"), plan={"head": "logits"}
)
KEYWORDS = LayoutSettings(
    layers="blocks",
    num_layers=NUM_BLOCKS,
    inputs=("stem",),
    outputs=("pool", "head"),
    # The 1x1 convolutions are whole on every rank of tp, as all convolutions are.
    plan={"head": "logits"},
    feed_forward=CHANNELS,
)
IMAGES: Mapping[str, tuple[Callable[[], nn.Module], LayoutSettings, tuple[int, ...]]] = {
    "mlp": (
        lambda: Mlp(1, (36, 32, 16, 10)),
        LayoutSettings(
            layers="body", num_layers=6, plan={"body.1": "column", "body.3": "row", "body.5": "logits"}, feed_forward=32
        ),
        (1, 6, 6),
    ),
    "cnn": (
        lambda: DigitsCnn(1, (4, 4)),
        LayoutSettings(layers="convolutions", num_layers=2, outputs=("flatten", "head"), plan={"head": "logits"}),
        (1, 8, 8),
    ),
    "resnet8": (lambda: ResNet8(1, "group"), RESNET, (3, 8, 8)),
    "resnet8-batch": (lambda: ResNet8(1, "batch"), RESNET, (3, 8, 8)),
    "ds_cnn": (lambda: DsCnn(1, "group"), KEYWORDS, (1, 13, 5)),
    "ds_cnn-batch": (lambda: DsCnn(1, "batch"), KEYWORDS, (1, 13, 5)),
}
"""Image models: function that builds the model, layout, and shape of a sample. The samples are smaller than usual."""


def model_of(cell: Cell) -> TrainableModel:
    """Return the cell's model, which is identical on every rank and in one process."""
    dtype = DTYPES[cell.dtype]
    if cell.family in {**PRETRAINED, **UNPLANNED}:
        return pretrained_model(module_of(pretrained_row(cell), cell.dtype, 1, cell.family))
    if cell.family in IMAGES:
        builder, layout, _ = IMAGES[cell.family]
        return TrainableModel(
            module=builder().to(dtype), layout=layout.layout, objective=padded_objective(cross_entropy)
        )
    if cell.family == "encoder":
        shape = EncoderConfig(
            vocabulary=VOCABULARY,
            context=LENGTH,
            width=32,
            num_layers=cell.layers,
            num_heads=4,
            feed_forward=32,
            tied=cell.tied,
        )
        return TrainableModel(module=Encoder(shape, seed=1).to(dtype), layout=encoder_layout(shape))
    config = DecoderConfig(
        vocabulary=VOCABULARY,
        width=32,
        num_layers=cell.layers,
        num_heads=8,
        num_kv_heads=4,
        feed_forward=32,
        tied=cell.tied,
    )
    return TrainableModel(module=Decoder(config, seed=1).to(dtype), layout=decoder_layout(config))


def pretrained_row(cell: Cell) -> Mapping[str, object]:
    """Return the config of a small model of ``transformers``.

    The model has no dropout, which each rank would draw by itself.
    """
    special_tokens: Mapping[str, object] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if cell.family in UNPLANNED:
        sizes = {"model_type": cell.family, "vocab_size": VOCABULARY, "num_hidden_layers": cell.layers}
        dropouts = dict.fromkeys((*DROPOUTS, "attention_probs_dropout_prob"), 0.0)
        return {**sizes, **special_tokens, **dropouts, "tie_word_embeddings": cell.tied, **UNPLANNED[cell.family]}
    return {
        "model_type": cell.family,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": cell.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": cell.tied,
        **special_tokens,
        **PRETRAINED[cell.family],
    }


def batches(num: int, family: str = "decoder") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``num`` global batches, which alternate between two, as inputs and targets.

    The number of targets that count differs much between ranks, so that the test detects a mean of means.
    """
    pairs = [_images(seed, family) if family in IMAGES else _tokens(seed) for seed in range(2)]
    for step in range(num):
        yield pairs[step % 2]


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) tokens and targets of samples of many lengths."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, (BATCH, LENGTH + 1)))
    targets = tokens[:, 1:].clone()
    for sample in range(BATCH):
        targets[sample, 1 + sample * LENGTH // BATCH :] = NO_TOKEN
    return tokens[:, :-1], targets


def _images(seed: int, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (B, ...) and labels (B,). Four samples have no label, among them the last three."""
    generator = np.random.default_rng(seed)
    inputs = torch.from_numpy(generator.random((BATCH, *IMAGES[family][2])))
    targets = torch.from_numpy(generator.integers(0, 10, BATCH))
    targets[-3:] = targets[5] = NO_TOKEN
    return inputs, targets

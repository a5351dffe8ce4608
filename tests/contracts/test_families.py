"""The contract of model families: fanin's families keep it, and the check names each breach."""

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import raises
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.datacenter.families import Family, ModelSizes, TokenModel, Work, check_family, seeded
from fanin.datacenter.families.decoders import DECODER, decoder_layout
from fanin.datacenter.families.encoders import ENCODER
from fanin.datacenter.families.folders import PRETRAINED
from fanin.datacenter.models.decoder import Attention, Decoder, DecoderConfig, Layer
from fanin.datacenter.models.encoder import EncoderConfig
from fanin.datacenter.models.pretrained import PretrainedSettings
from fanin.datacenter.parallel.checks import check_job
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

SMALL = DecoderConfig(vocabulary=12, width=16, num_layers=2, num_heads=4, num_kv_heads=2, feed_forward=24)
ROW = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}


@pytest.mark.parametrize("tied", in_ci((False, True), (False,)))
def test_decoders_keep_the_contract(tied: bool) -> None:
    check_family(DECODER, replace(SMALL, tied=tied))


@pytest.mark.parametrize("tied", in_ci((False, True), (True,)))
def test_encoders_keep_the_contract(tied: bool) -> None:
    sizes = EncoderConfig(vocabulary=12, context=6, width=16, num_layers=2, num_heads=4, feed_forward=24, tied=tied)
    check_family(ENCODER, sizes)


@pytest.mark.parametrize("kind", in_ci(("llama", "gpt_neox"), ("llama",)))
def test_pretrained_models_keep_the_contract(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ROW | {"model_type": kind}))
    check_family(PRETRAINED, PretrainedSettings(folder=tmp_path))


class Mixing(nn.Module):
    """A layer without attention: the mean of earlier positions, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        counts = torch.arange(1, stream.shape[1] + 1, dtype=stream.dtype)
        mixed: Tensor = stream + self.down(torch.tanh(self.up(stream.cumsum(1) / counts[:, None])))
        return mixed


def mixing(config: DecoderConfig, seed: int) -> nn.Module:
    with seeded(seed):
        embed, head = nn.Embedding(config.vocabulary, config.width), nn.Linear(config.width, config.vocabulary)
        layers = nn.Sequential(*(Mixing(config.width) for _ in range(config.num_layers)))
    return nn.Sequential(OrderedDict(embed=embed, layers=layers, head=head))


def mixing_layout(config: DecoderConfig) -> Layout:
    return Layout(
        sizes=ModelSizes(num_layers=config.num_layers, num_heads=0, num_kv_heads=0, feed_forward=2 * config.width),
        inputs=("embed",),
        layers="layers",
        outputs=("head",),
        plan={"embed": "vocabulary", "layers.*.up": "column", "layers.*.down": "row", "head": "logits"},
    )


def test_a_family_without_attention_has_no_heads_and_splits_over_tp() -> None:
    family = Family(config=DecoderConfig, build=mixing, layout=mixing_layout, tokens=DECODER.tokens)
    check_family(family, SMALL)
    training = TrainingSettings(batch_size=8, learning_rate=0.1)
    check_job(mixing_layout(SMALL), ParallelSettings(mesh=MeshShape(tp=8)), training, 8)
    with pytest.raises(InvalidInput, match="FN-1267"):
        check_job(mixing_layout(SMALL), ParallelSettings(mesh=MeshShape(tp=3)), training, 3)


class Other(Decoder):
    """A decoder that is wrong in one way."""

    def __init__(self, config: DecoderConfig, seed: int, fault: str) -> None:
        super().__init__(config, 5 if fault == "seed" else seed)
        self.fault = fault
        if fault == "unused":
            self.head.register_parameter("extra", nn.Parameter(torch.zeros(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        if self.fault == "changed":
            stream = self.embed(tokens) * 2.0
            for layer in self.layers:
                stream = layer(stream)
            changed: Tensor = self.head(self.norm(stream * 2.0))
            return changed
        logits: Tensor = super().forward(tokens)
        match self.fault:
            case "shape":
                return logits[:, -1]
            case "future":
                return logits + logits.mean(dim=1, keepdim=True)
            case "single":
                return logits.float()
        return logits


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("seed", "build: seeds 3 and 4 gave the same parameters; use ``seeded"),
        ("unused", "backward: head.extra got no gradient"),
        ("shape", r"forward: got logits \(2, 12\), expected \(2, 8, 12\)"),
        ("future", "the last token changed earlier logits"),
        ("changed", "layout: two stages changed the logits"),
        ("single", "forward: got torch.float32 from float64 parameters"),
    ],
)
def test_a_module_that_breaks_the_contract_is_named(fault: str, text: str) -> None:
    family = replace(DECODER, build=lambda config, seed: Other(config, seed, fault))
    with pytest.raises(AssertionError, match=text):
        check_family(family, SMALL)


def test_wrong_flops_are_named() -> None:
    family = replace(DECODER, work=lambda config: Work(matmul_values=1, num_layers=0, attention_width=0))
    with pytest.raises(AssertionError, match=r"work: got 96 FLOPs for 16 tokens, expected \d+, which torch counts"):
        check_family(family, SMALL)


def with_plan(**plan: str) -> Family[DecoderConfig]:
    def layout(config: DecoderConfig) -> Layout:
        default = decoder_layout(config)
        return replace(default, plan={**default.plan, **plan})  # type: ignore[arg-type]

    return replace(DECODER, layout=layout)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"layers.*.attention.qkv": "column"}, r"the pattern 'layers.\*.attention.qkv' of the plan matches no module"),
        (
            {"embed": "colunm"},
            r"layout: got the style 'colunm' for the pattern 'embed' of the plan, expected one of sha",
        ),
        ({"layers.1.*": "whole"}, r"'layers.\*.attention' and 'layers.1.\*' of the plan match the module layers.1.att"),
    ],
)
def test_patterns_match_exactly(plan: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        check_family(with_plan(**plan), SMALL)


class Fixed(Attention):
    """Attention that assumes the total number of heads: each rank splits its share into four heads."""

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        query, key, value = (part(stream).unflatten(-1, (4, -1)).transpose(1, 2) for part in self._parts())
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _parts(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


def fixed(config: DecoderConfig, seed: int) -> nn.Module:
    module = Decoder(config, seed)
    for layer in module.layers:
        layer.attention.__class__ = Fixed
    return module


class Placed(Layer):
    """A layer that counts the positions of its input: on a split sequence, each rank starts at 0."""

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        positions = torch.arange(stream.shape[1], dtype=stream.dtype)
        return super().forward(stream * (1.0 + positions[:, None]))


def placed(config: DecoderConfig, seed: int) -> nn.Module:
    module = Decoder(config, seed)
    for layer in module.layers:
        layer.__class__ = Placed
    return module


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            with_plan(norm="row"),
            "layout: got the style 'row' for norm, a RMSNorm, expected a Linear: torch splits no oth",
        ),
        (
            with_plan(**{"layers.*.feed_forward.down": "whole"}),
            r"tp=2 a training step fails, but not in one process: Ru",
        ),
        (replace(DECODER, build=fixed), r"on tp=2 a training step changes \S+ by other values than one process"),
        (
            replace(DECODER, build=placed),
            r"on tp=2 with sequence_parallel a training step changes \S+ by other values than one process",
        ),
    ],
    ids=["kind", "shapes", "values", "positions"],
)
def test_a_plan_is_tried_on_two_ranks(family: Family[DecoderConfig], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_family(family, replace(SMALL, num_kv_heads=4))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"layout": lambda config: decoder_layout(replace(config, num_layers=3))}, "got num_layers 3, expected 2"),
        ({"build": lambda config, seed: Decoder(replace(config, num_layers=1), seed)}, "got num_layers 2, expected 1"),
    ],
    ids=["layout", "build"],
)
def test_the_layout_has_as_many_layers_as_the_module(part: dict[str, Any], text: str) -> None:
    error = (
        f"layout: {text}, the number of modules in layers; correct the sizes of the layout or the build of the model"
    )
    with pytest.raises(InvalidInput, match=error):
        check_family(replace(DECODER, **part), SMALL)


def test_a_layout_without_a_list_of_layers_has_one_layer() -> None:
    family = replace(DECODER, layout=lambda config: replace(decoder_layout(config), layers=""))
    error = "layout: got layers '' and num_layers 2; name the list of layers, or set num_layers = 1"
    with raises(InvalidInput, error):
        check_family(family, SMALL)


def test_a_tie_names_two_parameters() -> None:
    tied = ("head.weight", "embed.wieght")
    family = replace(DECODER, layout=lambda config: replace(decoder_layout(config), tied=tied))
    with pytest.raises(InvalidInput, match="FN-1285"):
        check_family(family, SMALL)


def test_layout_names_refer_to_modules() -> None:
    family = replace(DECODER, layout=lambda config: replace(decoder_layout(config), outputs=("norm", "haed")))
    with pytest.raises(InvalidInput, match="FN-1284"):
        check_family(family, SMALL)


def test_a_parameter_outside_of_the_chain_is_named() -> None:
    family = replace(DECODER, layout=lambda config: replace(decoder_layout(config), outputs=("head",)))
    with pytest.raises(InvalidInput, match="FN-1279"):
        check_family(family, SMALL)


@dataclass(frozen=True, kw_only=True)
class OtherConfig:
    """A config of another family."""

    width: int = 3


def test_the_config_has_the_type_of_the_family() -> None:
    with pytest.raises(AssertionError, match=r"config: got OtherConfig\(width=3\), expected a DecoderConfig"):
        check_family(DECODER, OtherConfig())


def test_tokens_declare_what_a_model_predicts() -> None:
    family = replace(ENCODER, tokens=lambda config: TokenModel(vocabulary=config.vocabulary, positions=config.context))
    sizes = EncoderConfig(vocabulary=12, context=6, width=16, num_layers=2, num_heads=4, feed_forward=24)
    with pytest.raises(AssertionError, match="expected a causal model"):
        check_family(family, sizes)

"""The models of the zoo, each with its data and its loss, as Apps that are the same in every process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
import zoo_data as data
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from zoo_parts import (
    DenoisingAutoencoder,
    EvidenceBound,
    Experts,
    Siamese,
    TwoHeads,
    TwoInputs,
    VariationalAutoencoder,
    pixel_cross_entropy,
    weighted_heads,
)
from zoo_sequences import BagOfWords, DropoutEncoder, Forecaster, KeywordSpotter, TemporalConvolutions, bert, llama
from zoo_vision import MlpMixer, MobileNetV2, MobileNetV3, ResNet18, UNet, VisionTransformer

from fanin.clients.data.examples import Examples
from fanin.datacenter.models import cnn, mlp
from fanin.datacenter.models.recurrent import RecurrentClassifier, RecurrentShape
from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.models.tiny import ds_cnn, mobilenet, resnet8
from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer
from fanin.edge.export import App, cross_entropy, next_token, squared_error
from fanin.edge.export.app.losses import Loss

BATCH_SIZE: Final = 8
NUM_CALIBRATION: Final = 64
CALIBRATION, PRETRAINING, TRAINING, HELD_OUT = range(4)
"""Seeds of the parts of a model's data."""
FEW_STEPS: Final = 50
"""Steps of a pretraining of a deep convolutional model, whose steps take long."""
LENGTH: Final = 16
"""Tokens of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        make: Creates the module; its initial parameters come from torch's generator.
        data: Its examples.
        num_classes: 0 for values.
        loss: One number for each sample.
        output: Path of the output that the loss sees.
        learning_rate: Of the 20 steps.
        frozen_norms: Whether its BatchNorms keep their statistics in the 20 steps.
        num_pretraining_steps: Steps in eager torch before the export.
    """

    make: Callable[[], nn.Module]
    data: data.Data
    num_classes: int = 0
    loss: Loss = cross_entropy
    output: str = ""
    learning_rate: float = 0.01
    frozen_norms: bool = False
    num_pretraining_steps: int = 150


def _recurrent(cell: str) -> ZooModel:
    shape = RecurrentShape(
        vocabulary=data.VOCABULARY,
        width=16,
        hidden=32,
        num_classes=data.NUM_PACES,
        cell="gru" if cell == "gru" else "lstm",
    )
    return ZooModel(make=lambda: RecurrentClassifier(shape=shape), data=data.paces(LENGTH), num_classes=data.NUM_PACES)


def _published(make: Callable[[], nn.Module], shape: tuple[int, ...], num_classes: int) -> ZooModel:
    """Return an MLPerf Tiny model. Its norms are frozen, as on devices with few examples."""
    return ZooModel(
        make=make,
        data=data.images(shape, num_classes),
        num_classes=num_classes,
        learning_rate=0.001,
        frozen_norms=True,
        num_pretraining_steps=FEW_STEPS,
    )


DECODER: Final = DecoderShape(vocabulary=data.VOCABULARY, context=LENGTH, width=32, num_heads=2, num_blocks=2)
IMAGE: Final = (3, 32, 32)
SMALL: Final = (1, 16, 16)
NUM_CLASSES: Final = 4
NUM_STEPS, HORIZON = 32, 4
NUM_VALUES, NUM_CODES = 256, 8


def _residual(make: Callable[[], nn.Module]) -> ZooModel:
    """Return a deep model of colour images, whose norms train. At higher rates it amplifies torch's own rounding."""
    return ZooModel(
        make=make,
        data=data.images(IMAGE, 10),
        num_classes=10,
        learning_rate=0.001,
        num_pretraining_steps=FEW_STEPS,
    )


CLASSIC: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        "mlp": ZooModel(make=mlp.Mlp, data=data.images(mlp.INPUT_SHAPE, 10), num_classes=10),
        "digits_cnn": ZooModel(make=cnn.DigitsCnn, data=data.images(cnn.INPUT_SHAPE, 10), num_classes=10),
        "ds_cnn": _published(ds_cnn.DsCnn, ds_cnn.INPUT_SHAPE, ds_cnn.NUM_CLASSES),
        "resnet8": _published(resnet8.ResNet8, resnet8.INPUT_SHAPE, resnet8.NUM_CLASSES),
        "mobilenet": _published(mobilenet.MobileNetV1, mobilenet.INPUT_SHAPE, mobilenet.NUM_CLASSES),
        "decoder": ZooModel(
            make=lambda: DecoderTransformer(shape=DECODER),
            data=data.next_tokens(LENGTH),
            num_classes=data.VOCABULARY,
            loss=next_token,
        ),
        "gru": _recurrent("gru"),
        "lstm": _recurrent("lstm"),
    }
)
"""The models of ``parity.py``."""
VISION: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        "resnet18": _residual(lambda: ResNet18(10, 16)),
        "mobilenet_v2": _residual(lambda: MobileNetV2(10, 0.25)),
        "mobilenet_v3": _residual(lambda: MobileNetV3(10, 0.5)),
        "vit": ZooModel(make=lambda: VisionTransformer(10, 32, 16), data=data.images((3, 16, 16), 10), num_classes=10),
        "mlp_mixer": ZooModel(make=lambda: MlpMixer(10, 32, 16), data=data.images((3, 16, 16), 10), num_classes=10),
        "unet": ZooModel(make=lambda: UNet(3, 8), data=data.discs(16), num_classes=3, loss=pixel_cross_entropy),
    }
)
SEQUENCES: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        "encoder": ZooModel(
            make=lambda: DropoutEncoder(data.VOCABULARY, LENGTH, data.NUM_PACES),
            data=data.paces(LENGTH),
            num_classes=data.NUM_PACES,
        ),
        "bert": ZooModel(
            make=lambda: bert(data.VOCABULARY, LENGTH, NUM_CLASSES),
            data=data.masked_bags(LENGTH, NUM_CLASSES),
            num_classes=NUM_CLASSES,
            output="logits",
            learning_rate=0.001,
        ),
        "llama": ZooModel(
            make=lambda: llama(data.VOCABULARY, LENGTH),
            data=data.next_tokens(LENGTH, "input_ids"),
            num_classes=data.VOCABULARY,
            loss=next_token,
            output="logits",
        ),
        "tcn": ZooModel(
            make=lambda: TemporalConvolutions(2, NUM_CLASSES),
            data=data.waves((2, NUM_STEPS), NUM_CLASSES),
            num_classes=NUM_CLASSES,
            learning_rate=0.002,
        ),
        "keyword_spotter": ZooModel(
            make=lambda: KeywordSpotter(16, NUM_CLASSES), data=data.images((1, 16, 24), NUM_CLASSES), num_classes=4
        ),
        "forecaster": ZooModel(
            make=lambda: Forecaster(NUM_STEPS, HORIZON), data=data.futures(NUM_STEPS, HORIZON), loss=squared_error
        ),
        "bag_of_words": ZooModel(
            make=lambda: BagOfWords(data.VOCABULARY, NUM_CLASSES), data=data.bags(12, NUM_CLASSES), num_classes=4
        ),
    }
)
PARTS: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        "siamese": ZooModel(make=Siamese, data=data.image_pairs(SMALL, NUM_CLASSES), num_classes=2),
        "two_inputs": ZooModel(
            make=lambda: TwoInputs(data.NUM_NUMBERS, NUM_CLASSES),
            data=data.images_with_numbers(SMALL, NUM_CLASSES),
            num_classes=NUM_CLASSES,
            output="logits",
        ),
        "mixture_of_experts": ZooModel(
            make=lambda: Experts(data.NUM_FEATURES, NUM_CLASSES), data=data.clusters(NUM_CLASSES), num_classes=4
        ),
        "multi_head": ZooModel(
            make=lambda: TwoHeads(NUM_CLASSES),
            data=data.two_labels(SMALL, NUM_CLASSES),
            num_classes=NUM_CLASSES,
            loss=weighted_heads,
        ),
        "vae": ZooModel(
            make=lambda: VariationalAutoencoder(NUM_VALUES, NUM_CODES),
            data=data.reconstructions(SMALL, NUM_CLASSES, 2 * NUM_CODES),
            loss=EvidenceBound(NUM_VALUES, NUM_CODES),
        ),
        "denoising_autoencoder": ZooModel(
            make=DenoisingAutoencoder, data=data.reconstructions(SMALL, NUM_CLASSES), loss=squared_error
        ),
    }
)
MODELS: Final[Mapping[str, ZooModel]] = MappingProxyType({**CLASSIC, **VISION, **SEQUENCES, **PARTS})
"""All models by name."""


def examples_of(name: str, part: int, num: int) -> Examples:
    """Return ``num`` examples of a part of a model's data: CALIBRATION, PRETRAINING, TRAINING or HELD_OUT."""
    model, rng = MODELS[name], np.random.default_rng(part)
    examples = model.data(num, rng)
    return examples if part == HELD_OUT else data.with_wrong_labels(examples, model.num_classes, rng)


def app_of(name: str, state: Path | None = None) -> App:
    """Return the App of a model.

    Args:
        name: A key of MODELS.
        state: A file with the module's ``state_dict``; None for its initial one.
    """
    model = MODELS[name]
    with seeded(0):
        module = model.make()
    if state is not None:
        module.load_state_dict(torch.load(state, weights_only=True))
        if model.frozen_norms:
            for layer in module.modules():
                if isinstance(layer, _BatchNorm):
                    layer.eval()
    return App(
        name=name,
        module=module,
        calibration=dict(examples_of(name, CALIBRATION, NUM_CALIBRATION).inputs),
        batch_size=BATCH_SIZE,
        num_classes=model.num_classes,
        loss=model.loss,
        output=model.output,
    )

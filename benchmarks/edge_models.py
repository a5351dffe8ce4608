"""The models that ``edge.py`` measures, each as an App with batches. They are the same in every process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fanin.clients.data.examples import Examples
from fanin.datacenter.models import cnn, mlp
from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.models.mlp import Mlp
from fanin.datacenter.models.recurrent import RecurrentClassifier, RecurrentShape
from fanin.datacenter.models.tiny import ds_cnn, mobilenet, resnet8
from fanin.datacenter.models.tiny.ds_cnn import DsCnn
from fanin.datacenter.models.tiny.mobilenet import MobileNetV1
from fanin.datacenter.models.tiny.resnet8 import ResNet8
from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer
from fanin.edge.export import App, cross_entropy, next_token

BATCH_SIZE: Final = 16
NUM_BATCHES: Final = 4
LENGTH: Final = 32
"""Tokens of a sequence of the recurrent classifier."""
DECODERS: Final = MappingProxyType(
    {
        "attention": DecoderShape(num_blocks=1),
        "attention-small": DecoderShape(vocabulary=64, context=32, width=32, num_blocks=1),
    }
)
"""The first is limited by matrix products; the second, like the small perceptron, by the number of calls."""
RECURRENT: Final = RecurrentShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The input shape and the number of classes of an image model."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int


IMAGES: Final[Mapping[str, Images]] = MappingProxyType(
    {
        "mlp": Images(make=Mlp, shape=mlp.INPUT_SHAPE, num_classes=mlp.NUM_CLASSES),
        "mlp-small": Images(
            make=lambda: Mlp(sizes=(64, 32, cnn.NUM_CLASSES)), shape=cnn.INPUT_SHAPE, num_classes=cnn.NUM_CLASSES
        ),
        "cnn": Images(make=DigitsCnn, shape=cnn.INPUT_SHAPE, num_classes=cnn.NUM_CLASSES),
        "ds-cnn": Images(make=DsCnn, shape=ds_cnn.INPUT_SHAPE, num_classes=ds_cnn.NUM_CLASSES),
        "ds-cnn-group": Images(
            make=lambda: DsCnn(norm="group"), shape=ds_cnn.INPUT_SHAPE, num_classes=ds_cnn.NUM_CLASSES
        ),
        "resnet8": Images(make=ResNet8, shape=resnet8.INPUT_SHAPE, num_classes=resnet8.NUM_CLASSES),
        "mobilenet": Images(make=MobileNetV1, shape=mobilenet.INPUT_SHAPE, num_classes=mobilenet.NUM_CLASSES),
    }
)
"""BatchNorms are frozen, because the statistics of a few examples on a device are of little use."""
MODELS: Final = (*IMAGES, *DECODERS, "gru")


def app_of(name: str) -> App:
    """Return the App. Its initial parameters are always the same."""
    examples = examples_of(name)
    classes = {
        **{key: images.num_classes for key, images in IMAGES.items()},
        **{key: shape.vocabulary for key, shape in DECODERS.items()},
        "gru": RECURRENT.num_classes,
    }
    return App(
        name=name,
        module=_module(name),
        calibration=torch.from_numpy(examples.inputs["x"]),
        batch_size=BATCH_SIZE,
        num_classes=classes[name],
        loss=next_token if name in DECODERS else cross_entropy,
    )


def examples_of(name: str) -> Examples:
    """Return NUM_BATCHES random batches. The values do not affect the time of a step."""
    rng, num = np.random.default_rng(0), NUM_BATCHES * BATCH_SIZE
    if name in DECODERS:
        shape = DECODERS[name]
        tokens = rng.integers(0, shape.vocabulary, (num, shape.context + 1)).astype(np.int32)
        return Examples(inputs={"x": tokens[:, :-1].copy()}, y=tokens[:, 1:].copy())
    if name == "gru":
        x = rng.integers(0, RECURRENT.vocabulary, (num, LENGTH)).astype(np.int32)
        return Examples(inputs={"x": x}, y=rng.integers(0, RECURRENT.num_classes, num).astype(np.int32))
    images = IMAGES[name]
    x = rng.standard_normal((num, *images.shape)).astype(np.float32)
    return Examples(inputs={"x": x}, y=rng.integers(0, images.num_classes, num).astype(np.int32))


def _module(name: str) -> nn.Module:
    if name in DECODERS:
        return DecoderTransformer(shape=DECODERS[name])
    if name == "gru":
        return RecurrentClassifier(shape=RECURRENT)
    module = IMAGES[name].make()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return module

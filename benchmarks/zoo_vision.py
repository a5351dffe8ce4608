"""Vision models of the zoo: torchvision, timm and segmentation-models-pytorch."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from torch import Tensor
from torch.nn import functional as F
from zoo_packages import NUM_CLASSES, Stock, ZooModel, normal, rows_of

SIZE: Final = 64
"""Height and width of most images. BatchNorms of one value a sample would have ill-conditioned statistics."""


def _torchvision(name: str, size: int = SIZE, **settings: object) -> Stock:
    import torchvision

    module = getattr(torchvision.models, name)(weights=None, num_classes=NUM_CLASSES, **settings)
    return Stock(module=module, inputs={"x": normal(3, size, size)})


def _timm(name: str, size: int = SIZE, **settings: object) -> Stock:
    import timm

    module = timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES, **settings)
    return Stock(module=module, inputs={"x": normal(3, size, size)})


def _segmentation(name: str, encoder: str) -> Stock:
    import segmentation_models_pytorch

    module = getattr(segmentation_models_pytorch, name)(encoder_name=encoder, encoder_weights=None, classes=3)
    inputs = {"x": normal(3, SIZE, SIZE)}
    return Stock(module=module, inputs=inputs, num_classes=3, class_axis=1, loss=pixel_cross_entropy)


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the pixels of each image, without those of the label -1."""
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").flatten(1).mean(1)


VISION: Final[Mapping[str, ZooModel]] = MappingProxyType(
    {
        **rows_of(
            "torchvision",
            {
                "resnet18": partial(_torchvision, "resnet18"),
                "alexnet": partial(_torchvision, "alexnet"),
                "mobilenet_v2": partial(_torchvision, "mobilenet_v2"),
                "mobilenet_v3_small": partial(_torchvision, "mobilenet_v3_small"),
                "efficientnet_b0": partial(_torchvision, "efficientnet_b0"),
                "shufflenet_v2_x0_5": partial(_torchvision, "shufflenet_v2_x0_5"),
                "squeezenet1_1": partial(_torchvision, "squeezenet1_1"),
                "densenet121": partial(_torchvision, "densenet121"),
                "convnext_tiny": partial(_torchvision, "convnext_tiny"),
                "vit_b_16": partial(_torchvision, "vit_b_16", 32, image_size=32),
                "swin_t": partial(_torchvision, "swin_t"),
                "regnet_y_400mf": partial(_torchvision, "regnet_y_400mf"),
                "mnasnet0_5": partial(_torchvision, "mnasnet0_5"),
            },
        ),
        "googlenet": ZooModel(
            package="torchvision",
            make=partial(_torchvision, "googlenet", aux_logits=False, init_weights=True),
            settings="aux_logits=False",
        ),
        **rows_of(
            "timm",
            {
                "ghostnet_050": partial(_timm, "ghostnet_050"),
                "levit_128s": partial(_timm, "levit_128s", 224),
                "mobilenetv4_conv_small": partial(_timm, "mobilenetv4_conv_small"),
                "poolformer_s12": partial(_timm, "poolformer_s12"),
                "mixer_s32_224": partial(_timm, "mixer_s32_224", 224),
                "efficientformer_l1": partial(_timm, "efficientformer_l1", 224),
                "deit_tiny": partial(_timm, "deit_tiny_patch16_224", img_size=SIZE),
                "mobilevit_xxs": partial(_timm, "mobilevit_xxs"),
                "fastvit_t8": partial(_timm, "fastvit_t8"),
                "edgenext_xx_small": partial(_timm, "edgenext_xx_small"),
                "repvgg_a0": partial(_timm, "repvgg_a0"),
            },
        ),
        **rows_of(
            "segmentation-models-pytorch",
            {
                "unet": partial(_segmentation, "Unet", "resnet18"),
                "fpn": partial(_segmentation, "FPN", "mobilenet_v2"),
                "deeplab_v3": partial(_segmentation, "DeepLabV3", "resnet18"),
            },
        ),
    }
)

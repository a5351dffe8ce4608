"""What a model of the zoo is, and how its package is imported.

Wheels of torchvision and torchaudio are built for one build of torch. With another build, such as that for CPUs, their
compiled operators cannot be loaded. No model of the zoo calls them, so they are declared without a kernel.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export import cross_entropy
from fanin.edge.export.app.losses import Loss

NUM_CALIBRATION: Final = 8
"""Examples that calibrate int8. The train steps draw their batches from them."""
NUM_EXAMPLES: Final = 2 * NUM_CALIBRATION
"""Examples of a model. The second half is held out."""
NUM_CLASSES: Final = 10
LIBRARIES: Final[list[torch.library.Library]] = []
"""Declared operators. torch removes them with their library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """A module of a package, with random parameters, and what an App needs besides.

    Attributes:
        module: The module.
        inputs: Random examples (NUM_EXAMPLES, ...) by name.
        num_classes: 0 for values.
        class_axis: Axis of the classes in the logits.
        loss: One number for each sample.
        output: Path of the output that the loss sees.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    num_classes: int = NUM_CLASSES
    class_axis: int = -1
    loss: Loss = cross_entropy
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A row of the zoo.

    Attributes:
        package: The distribution that the module is from.
        make: Creates the module; its initial parameters come from torch's generator.
        settings: What differs from the package's defaults, besides input size and number of classes.
    """

    package: str
    make: Callable[[], Stock]
    settings: str = ""


def rows_of(package: str, makes: Mapping[str, Callable[[], Stock]]) -> dict[str, ZooModel]:
    """Return rows of one package with its defaults."""
    return {name: ZooModel(package=package, make=make) for name, make in makes.items()}


def normal(*shape: int) -> Tensor:
    """Return NUM_EXAMPLES random inputs of a shape."""
    return torch.randn(NUM_EXAMPLES, *shape, generator=torch.Generator().manual_seed(0))


def tokens(vocabulary: int, length: int) -> Tensor:
    """Return NUM_EXAMPLES random sequences of tokens, without the token 0."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (NUM_EXAMPLES, length), generator=generator, dtype=torch.int32)


def prepare_imports() -> None:
    """Make torchvision and torchaudio importable with any build of torch. Call it before either is imported."""
    if not _loads("torchvision", "_C*.so"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        LIBRARIES.append(library)
    if not _loads("torchaudio", "lib/_torchaudio*.so"):
        # torchaudio has such a module if it was built without compiled operators.
        extension = ModuleType("torchaudio._extension")
        extension.__dict__.update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function)
        sys.modules[extension.__name__] = extension


def _loads(package: str, pattern: str) -> bool:
    """Return whether the compiled operators of a package fit this build of torch."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is missing: run `make zoo`"
    try:
        for file in Path(spec.origin).parent.glob(pattern):
            torch.ops.load_library(file)
    except OSError:
        return False
    return True

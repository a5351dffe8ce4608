"""The App: what an ML engineer writes to get a Bundle, and how it is found.

An App names a torch module, a loss, calibration data and a batch size; nothing in the module is rewritten for
the device. ``load_app`` finds one by ``package.module:name`` or ``path/to/file.py:name``; this and subcommands
are the only things in fanin that are found by a string.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fanin.protos.errors import InvalidInput, UnsupportedModel

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, num_classes), labels (B,) int64) -> the loss of each sample (B,)."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each sample (B,).

    The right class is found by comparison: ``one_hot`` and ``gather`` either look at the labels while they are
    traced, or need a scatter in the backward pass that not every runtime has.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    right = (labels[:, None] == classes).to(logits.dtype)
    return -(right * torch.log_softmax(logits, dim=1)).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A model and how it learns.

    ``module`` maps ``x`` (B, ...) float32 to logits (B, num_classes). Its parameters that require a gradient are
    trained and travel; all others and its buffers are constants of the Bundle. ``calibration`` (n, ...) float32
    are real inputs: the int8 graph's activation scales come from them, and they never leave this machine.
    """

    name: str
    module: torch.nn.Module
    calibration: Tensor
    batch_size: int
    num_classes: int
    loss: Loss = cross_entropy
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.name:
            raise UnsupportedModel("App: got an empty name")
        if self.batch_size < 1 or self.num_classes < 2:
            raise UnsupportedModel(
                f"App {self.name}: got batch_size {self.batch_size} and num_classes {self.num_classes}, "
                "expected at least 1 and 2"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise UnsupportedModel(f"App {self.name}: got momentum {self.momentum}, expected 0.0 to below 1.0")
        found = self.calibration
        if found.dtype != torch.float32 or found.dim() < 2 or len(found) < 2 or not bool(found.isfinite().all()):
            raise UnsupportedModel(
                f"App {self.name}: got calibration data {found.dtype} {tuple(found.shape)}, "
                "expected float32 (n, ...) with n of at least 2 and finite values only; take some real inputs"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.calibration.shape[1:])

    def examples(self, num: int) -> Tensor:
        """``num`` inputs (num, ...), the calibration data over and over."""
        return self.calibration[torch.arange(num) % len(self.calibration)].detach().clone()


def load_app(where: str) -> App:
    """The App at ``package.module:name`` or ``path/to/file.py:name``; ``name`` may be a function that makes it.

    Raises InvalidInput if it is not found, UnsupportedModel if what is found is no App.
    """
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise InvalidInput(f"App: got {where!r}, expected 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if not hasattr(module, name):
        raise InvalidInput(f"App {where!r}: {place} has no {name!r}")
    found = getattr(module, name)
    made = found() if callable(found) else found
    if not isinstance(made, App):
        raise UnsupportedModel(
            f"App {where!r}: got {type(made).__name__}, expected a fanin.edge.export.App or a function that returns one"
        )
    return made


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        # What the App's own module fails to import is its author's to see, with its traceback.
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise InvalidInput(f"App: no module {exc.name!r} on the path; a file is named as path/to/file.py:name") from exc


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"App: no file {path}")
    name = f"fanin_app_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

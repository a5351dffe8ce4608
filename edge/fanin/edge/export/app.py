"""The App: what an ML engineer writes to get a Bundle, and how it is found.

An App names a torch module, a loss, calibration data, a batch size and the recipe by which it learns; nothing in
the module is rewritten for the device. ``load_app`` finds one by ``package.module:name`` or
``path/to/file.py:name``; this and subcommands are the only things in fanin that are found by a string.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from fanin.edge.export.losses import Loss, cross_entropy
from fanin.edge.export.optimizers import Optimizer, Sgd
from fanin.edge.export.refusals import own_line
from fanin.protos.errors import FaninError, InvalidInput, UnsupportedModel

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside frozen linear layers and convolutions (LoRA: Hu et al. 2021, arXiv 2106.09685,
    section 4.1): what is trained is ``scale * B A``, with A random, B zero and ``scale = alpha / rank``."""

    rank: int
    alpha: float = 0.0
    """0.0: the rank itself, so that the scale is 1."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.alpha < float("inf"):
            raise UnsupportedModel(
                f"adapters: got rank {self.rank} and alpha {self.alpha}, expected a rank of at least 1 and alpha >= 0.0"
            )

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank if self.alpha else 1.0


PREPROCESSED_AT_ONCE: Final = 1024
"""Spectrograms of more samples would take more memory than the samples."""
Trains = Literal["full", "head", "bias"] | Adapters
"""What learns: all that requires a gradient, the last layer, the biases, or adapters beside frozen layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an App learns on a device: all of it is fixed in the train graph.

    ``clip_norm`` bounds the norm of all gradients together (0.0: no bound). ``proximal`` gives the graph FedProx's
    anchor as inputs. ``quantization_aware`` rounds weights and activations to 8 bits on the way forward, and lets
    gradients pass as if it had not.

    ``scaffold`` gives a traced step SCAFFOLD's control variates as inputs. No device sets these inputs, so an export
    refuses it (``check_recipe``).
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    trains: Trains = "full"
    clip_norm: float = 0.0
    proximal: bool = False
    scaffold: bool = False
    quantization_aware: bool = False

    def __post_init__(self) -> None:
        if self.trains not in ("full", "head", "bias") and not isinstance(self.trains, Adapters):
            raise UnsupportedModel(
                f"recipe: got trains {self.trains!r}, expected 'full', 'head', 'bias' or Adapters(rank=...)"
            )
        if not 0.0 <= self.clip_norm < float("inf"):
            raise UnsupportedModel(f"recipe: got clip_norm {self.clip_norm}, expected 0.0 (none) or a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A model and how it learns.

    ``module`` maps ``x`` (B, ...), float32 or int32 tokens, to logits (B, num_classes), to logits of next tokens
    (B, T, num_classes), or, with ``num_classes`` 0, to values. What of it learns travels; all else are constants of
    the Bundle. ``calibration`` (n, ...) are real inputs: the int8 graph's activation scales come from them, and they
    never leave this machine. ``validation`` are real inputs and what the module should say to them: with it, an
    export whose int8 form is worse than its float form is refused.

    ``preprocess`` makes ``x`` of what devices have: it maps ``raw`` (n, ...), of which some real inputs are given,
    uint8, int32 or float32, to x (n, ...), each sample by itself and all of it constant. Calibration and validation
    data are x.
    """

    name: str
    module: torch.nn.Module
    calibration: Tensor
    batch_size: int
    num_classes: int = 0
    loss: Loss = cross_entropy
    recipe: Recipe = field(default_factory=Recipe)
    validation: tuple[Tensor, Tensor] | None = None
    preprocess: torch.nn.Module | None = None
    raw: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise UnsupportedModel("App: got an empty name")
        if self.batch_size < 1 or self.num_classes < 0 or self.num_classes == 1:
            raise UnsupportedModel(
                f"App {self.name}: got batch_size {self.batch_size} and num_classes {self.num_classes}, "
                "expected at least 1, and at least 2 (or 0 for values)"
            )
        if not isinstance(self.module, torch.nn.Module):
            raise UnsupportedModel(
                f"App {self.name}: got a module of {type(self.module).__name__}, expected a torch.nn.Module"
            )
        _check_inputs(f"App {self.name}: calibration data", self.calibration)
        if self.validation is not None:
            x, y = self.validation
            _check_inputs(f"App {self.name}: validation data", x)
            if x.shape[1:] != self.calibration.shape[1:] or x.dtype != self.calibration.dtype or len(x) != len(y):
                raise UnsupportedModel(
                    f"App {self.name}: got validation data x {x.dtype} {tuple(x.shape)} and y {tuple(y.shape)}, "
                    f"expected as many of both, x as the calibration data is, {tuple(self.calibration.shape)}"
                )
            _check_labels(self, y)
        _check_preprocess(self)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.calibration.shape[1:])

    def examples(self, num: int) -> Tensor:
        """``num`` inputs (num, ...), the calibration data over and over."""
        return self.calibration[torch.arange(num) % len(self.calibration)].detach().clone()


def check_recipe(app: App) -> None:
    """Raise UnsupportedModel for a recipe that devices cannot carry out."""
    if app.recipe.scaffold:
        raise UnsupportedModel(
            f"App {app.name}: got Recipe(scaffold=True), expected False: no device sets SCAFFOLD's control variates, "
            "so it would train without them; Recipe(proximal=True) is FedProx, which devices carry out"
        )


def _preprocessed(app: App, raw: Tensor) -> object:
    """What ``preprocess`` makes of raw inputs (n, ...), a copy of it: evaluation is not to change the module's mode."""
    assert app.preprocess is not None, "asked only for an App that has it"
    with torch.no_grad():
        return copy.deepcopy(app.preprocess).eval()(raw)


def _check_inputs(what: str, found: Tensor, *others: torch.dtype) -> None:
    known = found.dtype in (torch.float32, torch.int32, *others)
    if known and len(found.shape) > 1:
        _check_finite(what, found)
    if not known or found.dim() < 2 or len(found) < 2:
        raise UnsupportedModel(
            f"{what}: got {found.dtype} {tuple(found.shape)}, expected float32 values or int32 tokens "
            f"{'or uint8 bytes ' if others else ''}(n, ...) with n of at least 2; "
            "take some real inputs"
        )


def _check_finite(what: str, found: Tensor) -> None:
    bad = (~found.flatten(start_dim=1).isfinite().all(dim=1)).nonzero().flatten() if found.numel() else found
    if len(bad):
        first = int(bad[0])
        kind = "NaN" if bool(found[first].isnan().any()) else "infinity"
        raise UnsupportedModel(
            f"{what}: got {kind} in sample {first} ({len(bad)} of {len(found)} samples have values that are not "
            "finite), expected finite values only; leave such samples out, or mend what made them"
        )


def _check_preprocess(app: App) -> None:
    """Raise UnsupportedModel unless ``preprocess`` makes the model's inputs of ``raw``, or there are neither."""
    if app.preprocess is None and app.raw is None:
        return
    what = f"App {app.name}: preprocess"
    if app.preprocess is None or app.raw is None:
        raise UnsupportedModel(f"{what}: got only one of preprocess and raw, expected both or none")
    _check_inputs(f"{what}: raw inputs", app.raw, torch.uint8)
    if (app.raw.dtype, app.raw.shape[1:]) == (app.calibration.dtype, app.calibration.shape[1:]):
        raise UnsupportedModel(
            f"{what}: raw is {app.raw.dtype} {tuple(app.raw.shape)} like the calibration data, expected another form: "
            "devices could not tell what is still raw; give raw another shape, or dtype"
        )
    try:
        x = _preprocessed(app, app.raw[:2])
    except Exception as exc:  # it is the App's own code, which may raise anything
        raise UnsupportedModel(f"{what} ({type(app.preprocess).__name__}) fails on raw inputs ({exc})") from exc
    got = (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
    expected = (app.calibration.dtype, (2, *app.input_shape))
    if got != expected:
        raise UnsupportedModel(
            f"{what} ({type(app.preprocess).__name__}): got {got} of two samples, expected {expected} as the "
            "calibration data is"
        )


def inputs_of(app: App, x: Tensor) -> Tensor:
    """``x`` (n, ...) as the module takes it: what is still raw goes through ``preprocess``, all else is as it is."""
    if app.raw is None or (x.dtype, x.shape[1:]) != (app.raw.dtype, app.raw.shape[1:]):
        return x
    parts = [_preprocessed(app, part) for part in torch.split(x, PREPROCESSED_AT_ONCE)]
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _check_labels(app: App, y: Tensor) -> None:
    """Raise UnsupportedModel unless y may be what the module should say: its exact form is known at the export."""
    is_values = y.is_floating_point()
    if is_values and y.dim():
        _check_finite(f"App {app.name}: validation data y", y.reshape(len(y), -1))
    least = -1 if y.dim() > 1 else 0
    in_range = is_values or (int(y.min()) >= least and int(y.max()) < app.num_classes)
    if is_values != (app.num_classes == 0) or not in_range:
        wanted = f"integers from {least} to {app.num_classes - 1}" if app.num_classes else "finite float values"
        raise UnsupportedModel(
            f"App {app.name}: got validation data y {y.dtype} {tuple(y.shape)} from {y.min()} to {y.max()}, "
            f"expected {wanted}"
        )


def load_app(where: str) -> App:
    """The App at ``package.module:name`` or ``path/to/file.py:name``; ``name`` may be a function that makes it.

    The folder of a file goes to the front of ``sys.path``, as Python does for a script: the file may import the modules
    beside it.

    Raises:
        InvalidInput: There is no such file, module or name.
        UnsupportedModel: The object is no App, or the App's own code raises; the message has its file and line.
    """
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise InvalidInput(f"App: got {where!r}, expected 'package.module:name' or 'path/to/file.py:name'")
    module = _guarded(where, lambda: _load_file(Path(place)) if place.endswith(".py") else _load_module(place))
    if not hasattr(module, name):
        raise InvalidInput(f"App {where!r}: {place} has no {name!r}")
    found = getattr(module, name)
    if isinstance(found, torch.nn.Module):
        raise UnsupportedModel(
            f"App {where!r}: got a module, {type(found).__name__}; put it into a fanin.edge.export.App, "
            "with data to calibrate it"
        )
    if callable(found) and any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in signature(found).parameters.values()
    ):
        raise UnsupportedModel(f"App {where!r}: got a function with arguments, expected one that is called without")
    made = _guarded(where, found) if callable(found) else found
    if not isinstance(made, App):
        raise UnsupportedModel(
            f"App {where!r}: got {type(made).__name__}, expected a fanin.edge.export.App or a function that returns one"
        )
    return made


def _guarded(where: str, call: Callable[[], Result]) -> Result:
    """Return the result of a call that runs the App's own code. Raises UnsupportedModel."""
    try:
        return call()
    except FaninError:
        raise
    except (Exception, SystemExit) as exc:
        # It is the App's own code, which may raise anything; a script may even end the process.
        line = own_line(exc)
        place = f" at {line}" if line else ""
        raise UnsupportedModel(f"App {where!r}: its own code raised {type(exc).__name__}{place}: {exc}") from exc


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        # A module that the App's own code fails to import is a mistake of that code.
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise InvalidInput(f"App: no module {exc.name!r} on the path; a file is named as path/to/file.py:name") from exc


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"App: no file {path}")
    name = f"fanin_app_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

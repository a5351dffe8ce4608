"""The App: a torch module, its loss, its data and the recipe by which it learns.

An App is all that an ML engineer writes. The module is not rewritten for the device. An App is validated when it is
created: what can be wrong without tracing the module raises UnsupportedModel here. ``prepare`` reads it next.
"""

import copy
import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from fanin.edge.export.decompositions.own import Decompositions, check_own
from fanin.edge.export.losses import Loss, cross_entropy
from fanin.edge.export.optimizers import Optimizer, Sgd, check_optimizer
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.names import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside frozen linear layers, 2-D convolutions and attention (LoRA).

    An adapter adds ``scale * B A`` to a frozen weight, with ``scale = alpha / rank``. A is random and B is zero at
    first.

    Args:
        rank: Rank of the product, at least 1.
        alpha: Numerator of the scale. 0.0 stands for the rank itself, so that the scale is 1.

    Reference:
        Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """

    rank: int
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.alpha < float("inf"):
            raise UnsupportedModel(
                f"adapters: got rank {self.rank} and alpha {self.alpha}, expected a rank of at least 1 and alpha >= 0.0"
            )

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / self.rank if self.alpha else 1.0


PREPROCESSED_AT_ONCE: Final = 1024
"""Most samples that are preprocessed together: spectrograms of more would not fit into memory."""
AS_FLOAT32: Final = "convert it by x.float(), or x.astype('float32') for an array"
CONVERSIONS: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: AS_FLOAT32,
        torch.float16: AS_FLOAT32,
        torch.bfloat16: AS_FLOAT32,
        torch.int64: "convert tokens by x.int(), values by x.float()",
        torch.uint8: "convert pixels by x.float() / 255, on devices too, or pass them as raw= with preprocess=",
    }
)
"""What to do with data of a common dtype that no graph accepts."""
INNER: Final[Mapping[str, str]] = MappingProxyType(
    {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
)
"""The attribute with the module itself, by the class of torch that wraps it."""
Trains = Literal["full", "head", "bias"] | Adapters
"""The part that learns: all parameters that require a gradient, the last layer, the biases, or adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an App learns on a device. The whole recipe is fixed in the train graph.

    Args:
        optimizer: The optimizer of a train step, ``Sgd()`` by default.
        trains: The part that learns: ``"full"``, ``"head"``, ``"bias"`` or ``Adapters(rank=...)``. The rest is frozen
            to int8.
        clip_norm: Bound on the norm of all gradients together. 0.0 means no bound.
        proximal: Whether the graph has the anchor of FedProx as inputs.
        scaffold: Whether the graph has the control variates of SCAFFOLD as inputs, for Runs with the stage
            ``scaffold``. It needs an optimizer without state, such as ``Sgd(momentum=0.0)``.
        quantization_aware: Whether the forward pass rounds weights and activations to 8 bits. Gradients pass unchanged.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    trains: Trains = "full"
    clip_norm: float = 0.0
    proximal: bool = False
    scaffold: bool = False
    quantization_aware: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.scaffold and self.optimizer.states:
            # A device computes its mean gradient from the change: change / (steps x learning rate).
            raise UnsupportedModel(
                f"Recipe: got scaffold=True with {self.optimizer}, expected an optimizer without state; use "
                "Sgd(momentum=0.0)"
            )
        if self.trains not in ("full", "head", "bias") and not isinstance(self.trains, Adapters):
            raise UnsupportedModel(
                f"recipe: got trains {self.trains!r}, expected 'full', 'head', 'bias' or Adapters(rank=...)"
            )
        if not _is_bound(self.clip_norm):
            raise UnsupportedModel(
                f"recipe: got clip_norm {self.clip_norm!r}, expected 0.0 (none) or a positive number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A model and how it learns.

    Args:
        name: Name of the App in manifests and messages: 1 to 128 letters, digits or ``._:+-``, not a dot first.
        module: Maps ``x`` (B, ...), float32 or int32 tokens, to logits (B, num_classes), to logits of the next tokens
            (B, T, num_classes), or with ``num_classes`` 0 to values (B, ...). The parameters that learn travel between
            server and devices. The others are constants of the Bundle.
        calibration: Real inputs (n, ...), n at least 2. The activation scales of the int8 graph are computed from them.
            They never leave this machine. For all data, a numpy array is as good as a tensor: it is copied into one.
        batch_size: Samples of one train step, at least 1.
        num_classes: Number of classes or tokens, 0 for a module that returns values.
        loss: Maps the output of the module and y (B, ...) to one loss for each sample (B,).
        recipe: What learns, and with which optimizer.
        validation: Real inputs x (n, ...) and their targets y. With them, an export fails if int8 is worse than float
            by more than a limit.
        preprocess: Maps raw inputs (n, ...) to ``x`` (n, ...), each sample by itself and without parameters that learn.
            Devices apply it to their data. ``calibration`` and ``validation`` are already preprocessed.
        raw: Real raw inputs (n, ...), uint8, int32 or float32; required together with ``preprocess``.
        decompositions: Forms of operators by operator overload, for operators without a form in a graph format. They
            take precedence over the built-in ones. See docs/operators.md.

    Raises:
        UnsupportedModel: A field is invalid.

    Example:
        ``App(name="digits", module=net, calibration=images, batch_size=16, num_classes=10)``
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
    decompositions: Decompositions = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UnsupportedModel(f"App: name: got {self.name!r}, expected a str")
        try:
            check_name("App: name", self.name)
        except InvalidInput as exc:
            raise UnsupportedModel(str(exc)) from exc
        for number in ("batch_size", "num_classes"):
            object.__setattr__(self, number, _integer(f"App {self.name}: {number}", getattr(self, number)))
        if self.batch_size < 1 or self.num_classes < 0 or self.num_classes == 1:
            raise UnsupportedModel(
                f"App {self.name}: got batch_size {self.batch_size} and num_classes {self.num_classes}, "
                "expected a batch_size of at least 1 and num_classes of at least 2, or 0 for values"
            )
        _check_parts(self)
        object.__setattr__(self, "calibration", _tensor(f"App {self.name}: calibration data", self.calibration))
        _check_inputs(f"App {self.name}: calibration data", self.calibration)
        if self.validation is not None:
            object.__setattr__(self, "validation", _pair(f"App {self.name}: validation data", self.validation))
            _check_validation(self, *self.validation)
        _check_preprocess(self)
        check_own(f"App {self.name}: decompositions", self.decompositions)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.calibration.shape[1:])

    @property
    def target_shape(self) -> tuple[int, ...] | None:
        """The shape of one target, from the module's output; None if the module fails, which the export explains."""
        module = copy.deepcopy(self.module).eval()
        output = None
        # Errors of any kind: the module is the user's code.
        with torch.no_grad(), suppress(Exception):
            output = module(self.examples(2))
        if not isinstance(output, Tensor) or output.dim() < 2:
            return None
        return tuple(output.shape[1:-1] if self.num_classes else output.shape[1:])

    def examples(self, num: int) -> Tensor:
        """Return ``num`` inputs (num, ...): the calibration data, repeated as often as needed."""
        return self.calibration[torch.arange(num) % len(self.calibration)].detach().clone()


def _is_bound(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 <= value < math.inf


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _integer(what: str, value: object) -> int:
    """Return a number of the App as an int: those of numpy and torch are accepted. Raises UnsupportedModel."""
    if not isinstance(value, SupportsIndex):
        raise UnsupportedModel(f"{what}: got {value!r}, expected an int")
    return operator.index(value)


def _tensor(what: str, value: object) -> Tensor:
    """Return data as a tensor without a gradient. Raises UnsupportedModel unless it is a tensor or a numpy array."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise UnsupportedModel(f"{what}: got a numpy array of {value.dtype}, expected one of numbers")
        # A copy: torch would share the memory of an array that is read-only or that changes later.
        value = torch.from_numpy(np.array(value, order="C"))
    if not isinstance(value, Tensor):
        advice = (
            "pass x alone, without labels; a list of samples becomes a tensor by torch.stack"
            if isinstance(value, tuple | list)
            else "collect the inputs of some batches by torch.cat"
        )
        raise UnsupportedModel(
            f"{what}: got {type(value).__name__}, expected one tensor or numpy array (n, ...); {advice}"
        )
    if value.device.type != "cpu":
        raise UnsupportedModel(f"{what}: is on {value.device}, expected cpu; call .cpu()")
    return value.detach()


def _pair(what: str, value: object) -> tuple[Tensor, Tensor]:
    """Return x and y as tensors. Raises UnsupportedModel."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        received = (
            f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
        )
        raise UnsupportedModel(f"{what}: got {received}, expected a pair (x, y) of tensors or numpy arrays")
    return _tensor(f"{what} x", value[0]), _tensor(f"{what} y", value[1])


def _check_parts(app: App) -> None:
    """Raise UnsupportedModel unless module, loss, recipe and preprocess have their types."""
    what, module = f"App {app.name}", app.module
    if isinstance(module, type):
        raise UnsupportedModel(
            f"{what}: got the class {module.__name__} as module, expected an instance; write {module.__name__}(...)"
        )
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedModel(f"{what}: got a module of type {type(module).__name__}, expected a torch.nn.Module")
    kind = type(module).__name__
    if kind in INNER or isinstance(module, torch.jit.ScriptModule):
        advice = f"pass module.{INNER[kind]}" if kind in INNER else "pass the module that torch.jit was given"
        raise UnsupportedModel(f"{what}: got a module inside torch's {kind}, expected the module itself; {advice}")
    if not isinstance(app.recipe, Recipe):
        raise UnsupportedModel(
            f"{what}: recipe: got {app.recipe!r}, expected a Recipe; write recipe=Recipe(optimizer=...)"
        )
    if not _is_function(app.loss):
        raise UnsupportedModel(
            f"{what}: loss: got {app.loss!r}, expected a function of (output, y) that returns one loss for each "
            "sample, such as fanin.edge.export.cross_entropy or torch.nn.CrossEntropyLoss(reduction='none')"
        )
    if app.preprocess is not None and not isinstance(app.preprocess, torch.nn.Module):
        raise UnsupportedModel(
            f"{what}: preprocess: got {type(app.preprocess).__name__}, expected a torch.nn.Module; call the function "
            "in the forward of one"
        )


def _preprocessed(app: App, raw: Tensor) -> object:
    """Apply a copy of ``preprocess`` to raw inputs (n, ...): the mode of the App's module must not change."""
    assert app.preprocess is not None, "the caller checks that the App has preprocess"
    with torch.no_grad():
        return copy.deepcopy(app.preprocess).eval()(raw)


def _check_inputs(what: str, values: Tensor, *others: torch.dtype) -> None:
    known = values.dtype in (torch.float32, torch.int32, *others)
    if known and len(values.shape) > 1:
        _check_finite(what, values)
    if not known or values.dim() < 2 or len(values) < 2:
        advice = "use some real inputs" if known else CONVERSIONS.get(values.dtype, AS_FLOAT32)
        raise UnsupportedModel(
            f"{what}: got {values.dtype} {tuple(values.shape)}, expected float32 values or int32 tokens "
            f"{'or uint8 bytes ' if others else ''}(n, ...) with n of at least 2; {advice}"
        )


def _check_finite(what: str, values: Tensor) -> None:
    bad = (~values.flatten(start_dim=1).isfinite().all(dim=1)).nonzero().flatten() if values.numel() else values
    if len(bad):
        first = int(bad[0])
        kind = "NaN" if bool(values[first].isnan().any()) else "infinity"
        raise UnsupportedModel(
            f"{what}: got {kind} in sample {first} ({len(bad)} of {len(values)} samples have values that are not "
            "finite), expected finite values only; remove these samples, or fix the code that computes them"
        )


def _check_validation(app: App, x: Tensor, y: Tensor) -> None:
    """Raise UnsupportedModel unless x is like the calibration data, and y has a target for each x."""
    _check_inputs(f"App {app.name}: validation data", x)
    if x.shape[1:] != app.calibration.shape[1:] or x.dtype != app.calibration.dtype or not y.dim() or len(x) != len(y):
        raise UnsupportedModel(
            f"App {app.name}: got validation data x {x.dtype} {tuple(x.shape)} and y {tuple(y.shape)}, "
            f"expected one y for each x, and x like the calibration data {app.calibration.dtype} "
            f"{tuple(app.calibration.shape)} except for the number of samples"
        )
    _check_labels(app, y)


def _check_preprocess(app: App) -> None:
    """Raise UnsupportedModel unless ``preprocess`` maps ``raw`` to inputs of the model, or both are None."""
    if app.preprocess is None and app.raw is None:
        return
    what = f"App {app.name}: preprocess"
    if app.preprocess is None or app.raw is None:
        raise UnsupportedModel(f"{what}: got only one of preprocess and raw, expected both or neither")
    object.__setattr__(app, "raw", _tensor(f"{what}: raw inputs", app.raw))
    _check_inputs(f"{what}: raw inputs", app.raw, torch.uint8)
    if (app.raw.dtype, app.raw.shape[1:]) == (app.calibration.dtype, app.calibration.shape[1:]):
        raise UnsupportedModel(
            f"{what}: raw is {app.raw.dtype} {tuple(app.raw.shape)} like the calibration data, expected another dtype "
            "or shape; otherwise devices cannot distinguish raw inputs from preprocessed ones"
        )
    try:
        x = _preprocessed(app, app.raw[:2])
    except Exception as exc:  # the App's own code may raise anything
        raise UnsupportedModel(f"{what} ({type(app.preprocess).__name__}) fails on raw inputs ({exc})") from exc
    signature = (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
    expected = (app.calibration.dtype, (2, *app.input_shape))
    if signature != expected:
        raise UnsupportedModel(
            f"{what} ({type(app.preprocess).__name__}): got {signature} from two samples, expected {expected} like the "
            "calibration data"
        )


def inputs_of(app: App, x: Tensor) -> Tensor:
    """Return ``x`` (n, ...) as the module accepts it.

    Args:
        app: The App.
        x: Inputs of the module or raw inputs. Raw inputs are recognized by their dtype and shape, and preprocessed.
    """
    if app.raw is None or (x.dtype, x.shape[1:]) != (app.raw.dtype, app.raw.shape[1:]):
        return x
    parts = [_preprocessed(app, part) for part in torch.split(x, PREPROCESSED_AT_ONCE)]
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _check_labels(app: App, y: Tensor) -> None:
    """Raise UnsupportedModel unless ``y`` can be a target. Its exact shape is only known at the export."""
    is_values = y.is_floating_point()
    if is_values and y.dim():
        _check_finite(f"App {app.name}: validation data y", y.reshape(len(y), -1))
    least = -1 if y.dim() > 1 else 0
    in_range = is_values or (int(y.min()) >= least and int(y.max()) < app.num_classes)
    if is_values != (app.num_classes == 0) or not in_range:
        allowed = f"integers from {least} to {app.num_classes - 1}" if app.num_classes else "finite float values"
        if is_values and tuple(y.shape) == (len(y), app.num_classes):
            allowed += "; convert one-hot rows by y.argmax(-1)"
        raise UnsupportedModel(
            f"App {app.name}: got validation data y {y.dtype} {tuple(y.shape)} from {y.min()} to {y.max()}, "
            f"expected {allowed}"
        )

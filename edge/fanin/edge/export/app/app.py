"""The App: a torch module, its loss, its data and its training recipe (``app.optimizers.recipe``).

An ML engineer writes only the App. The module is not rewritten for the device. An App is validated when it is created:
every fault that needs no trace of the module raises UnsupportedModel here. ``prepare`` reads it next.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, cast

import torch
from torch import Tensor

from fanin.edge.batch_sizes import check_other_sizes
from fanin.edge.export.app.accepted import check_copies, check_module
from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.decompositions import Decompositions, check_own
from fanin.edge.export.app.inputs.checks import as_tensor, check_input, check_target_values, example_targets
from fanin.edge.export.app.inputs.named import (
    AnyArray,
    ExampleInputs,
    are_alike,
    call_module,
    forms_of,
    named_tensors,
    num_samples,
    rows_of,
)
from fanin.edge.export.app.inputs.outputs import Output, Paths, checked_paths, picked
from fanin.edge.export.app.inputs.sequences import check_lengths
from fanin.edge.export.app.losses import Loss, check_loss, cross_entropy
from fanin.edge.export.app.optimizers.fields import integer
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.app.optimizers.recipe import Recipe
from fanin.edge.export.refusals import Place, running_line
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.lengths import TARGETS, Lengths
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.names import check_name

PREPROCESSED_AT_ONCE: Final = 1024
"""Most samples that are preprocessed together: spectrograms of more would not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A model and its training.

    Args:
        name: Name of the App in manifests and messages: 1 to 128 letters, digits or ``._:+-``, not a dot first.
        module: Maps inputs (B, ...), float32 or int32 tokens, to logits (B, num_classes) or to logits of the next
            tokens (B, T, num_classes). With ``num_classes`` 0 it returns values (B, ...). ``class_axis`` is for logits
            with the classes in another axis than the last. Server and devices exchange the trainable parameters. The
            others are constants of the Bundle.
        calibration: Real inputs (n, ...), n at least 2. A tensor is named ``x``. A tuple of tensors has the order of
            the parameters of ``forward``. A dict has the tensors by name. The App keeps the dict ``inputs``. The
            activation scales of the int8 graph are computed from them. They never leave this machine. All data may be
            numpy arrays, which are copied into tensors.
        batch_size: Samples of one train step, at least 1.
        other_batch_sizes: Further batch sizes that a Plan may choose by ``[training] batch_size``, at most three. Each
            has its own train graph.
        num_classes: Number of classes or tokens, 0 for a module that returns values.
        class_axis: Axis of the classes in the logits, not 0: 1 for (B, num_classes, H, W), as torch's losses accept
            them. The loss receives the logits unchanged. All predictions have the classes in the last axis.
        loss: Maps the output of the module and y (B, ...) to one loss for each sample (B,). Or a ``BatchLoss``.
        recipe: What learns, and with which optimizer.
        output: Path of the tensor for the loss and the predictions, in an output that is a tuple, a dict or a
            ModelOutput. A path has keys and positions joined by dots, such as ``logits`` or ``0``. "" is the output
            itself. Or the paths of several tensors. The loss then receives a dict of them by path, and the predictions
            are the first.
        targets: Example targets y (n, ...) of a model of values, for a loss whose targets have another shape than the
            output, or are integers. Integers are at least 0, or at least -1 in two or more dimensions. They are int32
            on devices, and the loss receives them as int64. None: y is float32 and has the shape of the output. With
            ``num_classes``, declared targets are labels of the shape that they have without a declaration.
        validation: Real inputs in the form of ``calibration``, and their targets y (n, ...). With them, an export fails
            if int8 is worse than float by more than a limit.
        preprocess: Maps raw data (n, ...) to the only input (n, ...), each sample independently and without trainable
            parameters. Devices apply it to their data. ``calibration`` and ``validation`` are already preprocessed.
        raw: Real raw inputs (n, ...), uint8, int32 or float32; required together with ``preprocess``.
        lengths: One or more lengths of sequences, each with its own graphs. ``calibration``, ``validation`` and
            ``targets`` have the longest. Shorter rows are padded at their end. See docs/howto/inputs.md.
        decompositions: Forms of operators by operator overload, for operators without a form in a graph format. They
            take precedence over the built-in ones. See docs/howto/operators.md.
        privacy_floor: The least privacy with which devices train the model. See docs/howto/privacy-floor.md.

    Raises:
        UnsupportedModel: A field is invalid.

    Example:
        ``App(name="digits", module=net, calibration=images, batch_size=16, num_classes=10)``
    """

    name: str
    module: torch.nn.Module
    calibration: ExampleInputs
    batch_size: int
    num_classes: int = 0
    class_axis: int = -1
    loss: Loss = cross_entropy
    recipe: Recipe = field(default_factory=Recipe)
    output: Paths = ""
    targets: AnyArray | None = None
    validation: tuple[ExampleInputs, AnyArray] | None = None
    preprocess: torch.nn.Module | None = None
    raw: AnyArray | None = None
    lengths: Lengths | None = None
    other_batch_sizes: Sequence[int] = ()
    decompositions: Decompositions = field(default_factory=dict)
    privacy_floor: PrivacyFloor = NO_FLOOR
    # ``file:line`` of the user's code that creates the App, for errors of a later check; "" if it is unknown.
    created_at: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "created_at", running_line())
        if not isinstance(self.name, str):
            raise UnsupportedModel(f"App: name: got {self.name!r}, expected a str", code="FN-0711")
        try:
            check_name("App: name", self.name)
        except InvalidInput as exc:
            raise UnsupportedModel(str(exc), code=exc.code) from exc
        for number in ("batch_size", "num_classes", "class_axis"):
            object.__setattr__(self, number, integer(f"App {self.name}: {number}", getattr(self, number)))
        if self.batch_size < 1 or self.num_classes < 0 or self.num_classes == 1:
            raise UnsupportedModel(
                f"App {self.name}: got batch_size {self.batch_size} and num_classes {self.num_classes}, "
                "expected a batch_size of at least 1 and num_classes of at least 2, or 0 for values",
                code="FN-0712",
            )
        if not self.class_axis or (self.class_axis != -1 and not self.num_classes):
            raise UnsupportedModel(
                f"App {self.name}: got class_axis {self.class_axis} and num_classes {self.num_classes}, expected the "
                "axis of the classes in the logits, such as 1 for (batch, classes, H, W), and -1 for a model of values",
                code="FN-0712",
            )
        object.__setattr__(self, "other_batch_sizes", _batch_sizes(self))
        _check_parts(self)
        object.__setattr__(self, "calibration", _inputs(self, "calibration data", self.calibration))
        if self.targets is not None:
            targets = example_targets(f"App {self.name}: targets", self.targets, self.num_classes)
            object.__setattr__(self, "targets", targets)
        if self.validation is not None:
            object.__setattr__(self, "validation", _pair(self, self.validation))
            _check_validation(self, *self.held_out)
        _check_preprocess(self)
        _check_lengths(self)
        check_own(f"App {self.name}: decompositions", self.decompositions)

    @property
    def inputs(self) -> Tensors:
        """The calibration data by name of the input."""
        assert isinstance(self.calibration, dict), "the constructor puts it into this form"
        return self.calibration

    @property
    def held_out(self) -> tuple[Tensors, Tensor]:
        """The inputs by name, and the targets, of the validation data, if there is any."""
        assert self.validation is not None, "the caller checks that the App has validation data"
        inputs, y = self.validation
        assert isinstance(inputs, dict) and isinstance(y, Tensor), "the constructor puts them into this form"
        return inputs, y

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one sample of each input."""
        return {name: tuple(value.shape[1:]) for name, value in self.inputs.items()}

    @property
    def raw_data(self) -> Tensor | None:
        """The raw inputs; None without ``preprocess``."""
        assert self.raw is None or isinstance(self.raw, Tensor), "the constructor puts them into this form"
        return self.raw

    def place(self, line: str = "") -> Place:
        """Return the App's own module and the line by which it returns, for errors about its output."""
        return Place(kind=type(self.module).__name__, line=line)

    def call(self, module: torch.nn.Module, inputs: Tensors, line: str = "") -> object:
        """Return the part of a module's output that the loss uses: a tensor, or a dict of them by path.

        Args:
            module: The module.
            inputs: Its inputs by name.
            line: ``file:line`` by which it returns, for the error; "" if unknown.

        Raises:
            UnsupportedModel: The output has no part with the path ``output``.
        """
        return picked(f"App {self.name}", self.place(line), call_module(module, inputs), self.output)

    def predicted(self, output: Output) -> Tensor:
        """Return the predictions in an output: its first tensor, with the classes in the last axis."""
        first = output if isinstance(output, Tensor) else next(iter(output.values()))
        return first if self.class_axis == -1 else first.movedim(self.class_axis, -1)

    def for_batches(self, size: int) -> "App":
        """Return the App for training by batches of one size alone; without ``validation``, which only exports use."""
        if size == self.batch_size:
            return self
        return replace(self, batch_size=size, other_batch_sizes=(), validation=None)

    @property
    def declared_targets(self) -> Tensor | None:
        """The example targets; None if the output decides the form of the targets."""
        assert self.targets is None or isinstance(self.targets, Tensor), "the constructor puts them into this form"
        return None if self.num_classes else self.targets

    @property
    def target_dtype(self) -> torch.dtype:
        """The dtype of targets on devices: int32 for labels and declared integers, float32 for values."""
        declared = self.declared_targets
        is_integer = self.num_classes or (declared is not None and not declared.is_floating_point())
        return torch.int32 if is_integer else torch.float32

    @property
    def target_shape(self) -> tuple[int, ...] | None:
        """The shape of one target, as declared or from the module's output.

        None if the module fails, or if the axis of the classes has another number of them.
        """
        if self.declared_targets is not None:
            return tuple(self.declared_targets.shape[1:])
        module = copy.deepcopy(self.module).eval()
        output = None
        # Any error: the module is the user's code, and its output may have another form.
        with torch.no_grad(), suppress(Exception):
            output = self.predicted(cast("Output", self.call(module, self.examples(2))))
        if not isinstance(output, Tensor) or output.dim() < 2:
            return None
        if not self.num_classes:
            return tuple(output.shape[1:])
        return tuple(output.shape[1:-1]) if output.shape[-1] == self.num_classes else None

    def examples(self, num: int) -> Tensors:
        """Return ``num`` samples of each input: the calibration data, repeated as often as needed."""
        return rows_of(self.inputs, torch.arange(num) % num_samples(self.inputs))


def _batch_sizes(app: App) -> tuple[int, ...]:
    """Return the further batch sizes of an App. Raises UnsupportedModel."""
    what, sizes = f"App {app.name}: other_batch_sizes", cast("object", app.other_batch_sizes)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes):
        raise UnsupportedModel(f"{what}: got {sizes!r}, expected a tuple of integers such as (8,)", code="FN-0711")
    others = tuple(integer(what, size) for size in sizes)
    try:
        check_other_sizes(app.batch_size, others)
    except InvalidInput as exc:
        raise UnsupportedModel(f"App {app.name}: {exc}", code=exc.code) from exc
    return others


def _inputs(app: App, what: str, value: object) -> Tensors:
    """Return data as inputs of the module by name. Raises UnsupportedModel."""
    what = f"App {app.name}: {what}"
    inputs = named_tensors(what, app.module, value)
    for name, tensor in inputs.items():
        check_input(what if inputs.keys() == {X} else f"{what} {name}", tensor)
    return inputs


def _pair(app: App, value: object) -> tuple[Tensors, Tensor]:
    """Return inputs and targets as tensors. Raises UnsupportedModel."""
    what = f"App {app.name}: validation data"
    if not isinstance(value, tuple | list) or len(value) != 2:
        received = (
            f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
        )
        raise UnsupportedModel(
            f"{what}: got {received}, expected a pair (x, y) of tensors or numpy arrays", code="FN-0733"
        )
    y = as_tensor(f"{what} y", value[1])
    return _inputs(app, "validation data", value[0]), y.to(torch.int32) if y.dtype == torch.bool else y


def _check_parts(app: App) -> None:
    """Raise UnsupportedModel unless module, recipe, loss, floor and preprocess have their types."""
    what = f"App {app.name}"
    check_module(what, app.module)
    if not isinstance(app.recipe, Recipe):
        raise UnsupportedModel(
            f"{what}: recipe: got {app.recipe!r}, expected a Recipe; write recipe=Recipe(optimizer=...)", code="FN-0711"
        )
    object.__setattr__(app, "output", checked_paths(f"{what}: output", app.output))
    check_loss(f"{what}: loss", app.loss)
    if not isinstance(app.privacy_floor, PrivacyFloor):
        raise UnsupportedModel(
            f"{what}: privacy_floor: got {app.privacy_floor!r}, expected a PrivacyFloor; write "
            'privacy_floor=PrivacyFloor(protocol="secagg")',
            code="FN-0711",
        )
    if app.preprocess is not None and not isinstance(app.preprocess, torch.nn.Module):
        raise UnsupportedModel(
            f"{what}: preprocess: got {type(app.preprocess).__name__}, expected a torch.nn.Module; call the function "
            "in the forward of one",
            code="FN-0721",
        )
    if app.preprocess is not None:
        check_copies(f"{what}: preprocess", app.preprocess)


def _preprocessed(app: App, raw: Tensor) -> object:
    """Apply a copy of ``preprocess`` to raw inputs (n, ...): the mode of the App's module must not change."""
    assert app.preprocess is not None, "the caller checks that the App has preprocess"
    with torch.no_grad():
        return copy.deepcopy(app.preprocess).eval()(raw)


def _check_validation(app: App, inputs: Tensors, y: Tensor) -> None:
    """Raise UnsupportedModel unless the inputs are like the calibration data, and y has a target for each sample."""
    if not are_alike(inputs, app.inputs) or not y.dim() or num_samples(inputs) != len(y):
        raise UnsupportedModel(
            f"App {app.name}: got validation data x {forms_of(inputs)} and y {tuple(y.shape)}, expected one y for each "
            f"x, and x like the calibration data {forms_of(app.inputs)} except for the number of samples",
            code="FN-0733",
        )
    if app.declared_targets is not None and y.shape[1:] != app.declared_targets.shape[1:]:
        raise UnsupportedModel(
            f"App {app.name}: got validation data y {tuple(y.shape)}, expected the shape of targets except for the "
            f"number of samples: {tuple(app.declared_targets.shape)}",
            code="FN-0733",
        )
    check_target_values(f"App {app.name}: validation data y", y, app.num_classes, app.target_dtype)


def _check_preprocess(app: App) -> None:
    """Raise UnsupportedModel unless ``preprocess`` maps ``raw`` to inputs of the model, or both are None."""
    if app.preprocess is None and app.raw is None:
        return
    what = f"App {app.name}: preprocess"
    if app.preprocess is None or app.raw is None:
        raise UnsupportedModel(f"{what}: got only one of preprocess and raw, expected both or neither", code="FN-0721")
    if len(app.inputs) != 1:
        raise UnsupportedModel(
            f"{what}: got a module with the inputs {list(app.inputs)}, expected a single one; preprocess the data of "
            "several inputs in the module, or before it is stored on devices",
            code="FN-0721",
        )
    raw, (x_data,) = as_tensor(f"{what}: raw inputs", app.raw), app.inputs.values()
    object.__setattr__(app, "raw", raw)
    check_input(f"{what}: raw inputs", raw, torch.uint8)
    if (raw.dtype, raw.shape[1:]) == (x_data.dtype, x_data.shape[1:]):
        raise UnsupportedModel(
            f"{what}: raw is {raw.dtype} {tuple(raw.shape)} like the calibration data, expected another dtype "
            "or shape; otherwise devices cannot distinguish raw inputs from preprocessed ones",
            code="FN-0722",
        )
    x = guarded(f"{what} of raw inputs", app.preprocess, lambda: _preprocessed(app, raw[:2]))
    signature = (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
    expected = (x_data.dtype, (2, *x_data.shape[1:]))
    if signature != expected:
        raise UnsupportedModel(
            f"{what} ({type(app.preprocess).__name__}): got {signature} from two samples, expected {expected} like the "
            "calibration data",
            code="FN-0722",
        )


def _check_lengths(app: App) -> None:
    """Raise UnsupportedModel unless the lengths, if there are any, fit the calibration data."""
    if app.lengths is None:
        return
    targets = {} if app.declared_targets is None else {TARGETS: app.declared_targets}
    check_lengths(f"App {app.name}: lengths", app.lengths, {**app.inputs, **targets})
    if app.preprocess is not None:
        raise UnsupportedModel(
            f"App {app.name}: lengths: got preprocess, too, expected one of them; preprocess the data before",
            code="FN-0721",
        )


def inputs_of(app: App, inputs: Tensors) -> Tensors:
    """Return inputs by name, each (n, ...), as the module accepts them.

    Args:
        app: The App.
        inputs: Inputs of the module, or raw data with the name of its only input. Raw data is recognized by its dtype
            and shape, and preprocessed.
    """
    raw, (name, *_) = app.raw_data, app.inputs
    x = inputs.get(name)
    if raw is None or x is None or (x.dtype, x.shape[1:]) != (raw.dtype, raw.shape[1:]):
        return inputs
    parts = [_preprocessed(app, part) for part in torch.split(x, PREPROCESSED_AT_ONCE)]
    return {name: torch.cat([part for part in parts if isinstance(part, Tensor)])}

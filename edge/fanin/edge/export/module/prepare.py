"""The App's module, prepared for tracing: divided parameters and rounded frozen weights.

Steps, in order:

1. Copy the module, with contiguous tensors.
2. Choose the part that learns (``trains``).
3. Unless that is ``full``, round frozen weights to int8 and freeze the norms.
4. Insert the rounding layers of ``quantization_aware``.
5. In the traced copy, let the BatchNorms that train count no passes (``norms``).

The eager twin holds the same rounded weights, so torch is compared with the module as devices have it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fanin.edge.bundles.quantize import weight_codes, weight_scales
from fanin.edge.export.app.app import App
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.app.optimizers.recipe import Adapters
from fanin.edge.export.module.adapters import add_adapters
from fanin.edge.export.module.gradients import check_hooks, notes_on_unused, unused_parameters
from fanin.edge.export.module.heads import head_of
from fanin.edge.export.module.norms import TrackedNorms, running_statistics, track_norms
from fanin.edge.export.module.places import store_by_rows
from fanin.edge.export.module.quantization_aware import round_layers
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.runtimes.randomness import RandomPort
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.roles import role_by_name

Module = nn.Module
StateDict = Mapping[str, Tensor]
"""A torch module and its ``state_dict``, named here for rooms that do not import torch."""
ADAPTER_SEED: Final = 0
MAX_SHOWN: Final = 8
MIN_FROZEN_VALUES: Final = 64
"""Weights with fewer values stay float: their scales would take more bytes than their codes save."""
NO_FLOAT: Final = (
    "keep a complex number as two real ones (torch.view_as_real), and whole numbers in a buffer (register_buffer)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeight:
    """A weight that does not learn: int8 codes of its shape, and one scale for each channel along ``axis``."""

    codes: Tensor
    scales: Tensor
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An App ready for tracing.

    Attributes:
        app: The App.
        module: The module that is traced.
        eager: The module for a training in eager torch, with the same weights.
        learned: The trainable parameters.
        tracked: Running statistics of norms that train.
        frozen: Weights that are int8 constants of the train graph.
        notes: Changes to the module, and its dependence on padding, one sentence each.
        rates: Factor of the learning rate of each trainable parameter.
        local: Names of the personal parameters and statistics. All others are exchanged.
        unused: Names of trainable parameters that do not affect the output. Like torch's optimizers, a step does not
            change a parameter without a gradient, not even by weight decay.
        length: The length that the App's data are cut to. 0 for an App without lengths, or with all of them.
        positions_first: Names of the norms whose input has its rows in the order of positions, then of samples.
        all_draws: The draws of a train step by length and batch size, known after the check of the module.
    """

    app: App
    module: nn.Module
    eager: nn.Module
    learned: Tensors
    tracked: Tensors
    frozen: Mapping[str, FrozenWeight]
    notes: tuple[str, ...]
    rates: Mapping[str, float]
    local: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    length: int = 0
    positions_first: frozenset[str] = frozenset()
    all_draws: Mapping[tuple[int, int], tuple[RandomPort, ...]] = field(default_factory=dict)

    @property
    def draws(self) -> tuple[RandomPort, ...]:
        """The random numbers that a train step of this length and batch size draws, in order."""
        return self.all_draws.get((self.length, self.app.batch_size), ())

    @property
    def parameters(self) -> Tensors:
        """All parameters of the graphs by name, in sorted order: those that travel and the personal ones."""
        both = self.learned | self.tracked
        return {name: both[name] for name in sorted(both)}

    @property
    def table(self) -> TensorTable:
        """The layout of all parameters of the graphs as one flat vector, with their roles."""
        table = TensorTable.of({name: tuple(value.shape) for name, value in self.parameters.items()})
        return table.with_roles({name: role_by_name(name) for name in self.tracked})

    @property
    def kept_float(self) -> tuple[str, ...]:
        """Weights whose products stay float in the int8 graph.

        Adapters begin at zero, so calibration would find no range for their later values.
        """
        return tuple(self.learned) if isinstance(self.app.recipe.trains, Adapters) else ()

    def norms(self, mask: Tensor, statistics: Tensors | None = None) -> TrackedNorms:
        """Return the mode of the norms that train, for a batch with this mask (B,).

        Args:
            mask: The samples that count.
            statistics: The running statistics by name. None: those of the module.
        """
        tensors = running_statistics(self.module) if statistics is None else statistics
        return TrackedNorms(tensors, mask, self.positions_first)

    @property
    def what(self) -> str:
        """The App and its module, for messages."""
        at = f" at length {self.length}" if self.length else ""
        return f"App {self.app.name} ({type(self.app.module).__name__}){at}"

    def for_batches(self, size: int) -> "Prepared":
        """Return the App for training by batches of one size alone, with the same module."""
        return replace(self, app=self.app.for_batches(size))


def prepare(app: App) -> Prepared:
    """Return the App with its module ready for tracing. Raises UnsupportedModel."""
    eager = copy.deepcopy(app.module)
    check_hooks(f"App {app.name}", app.module)
    _check_parameters(app, eager)
    store_by_rows(eager)
    notes = [*_in_evaluation(app), *_choose(app, eager)]
    unused = unused_parameters(eager, lambda trial: app.call(trial, app.examples(max(app.batch_size, 2))))
    notes += notes_on_unused(unused)
    frozen = {} if app.recipe.trains == "full" else _freeze(eager)
    if app.recipe.trains != "full":
        notes += _freeze_norms(eager)
    if app.recipe.quantization_aware:
        round_layers(eager, app.inputs, app.batch_size)
    module = copy.deepcopy(eager)
    track_norms(module, f"App {app.name}")
    learned = {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}
    tracked = {name: value.detach().clone() for name, value in running_statistics(eager).items()}
    _check_learned(app, learned)
    _check_names(app, learned | tracked)
    _check_rates(app, learned)
    prepared = Prepared(
        app=app,
        module=module,
        eager=eager,
        learned={name: learned[name] for name in sorted(learned)},
        tracked={name: tracked[name] for name in sorted(tracked)},
        frozen=MappingProxyType(frozen),
        notes=tuple(notes),
        rates=MappingProxyType({name: _rate(app, name) for name in sorted(learned)}),
        local=_local_names(app, module, sorted(learned | tracked)),
        unused=unused,
    )
    values = {name: value.numpy() for name, value in prepared.parameters.items()}
    try:
        prepared.table.check_values(prepared.table.flatten(values))
    except InvalidInput as exc:
        raise UnsupportedModel(f"App {app.name}: {exc}", code=exc.code) from exc
    return prepared


def _in_evaluation(app: App) -> list[str]:
    """Return a note for a module whose layers would act in another way in training."""
    layers = [layer for layer in app.module.modules() if isinstance(layer, _BatchNorm | _DropoutNd)]
    kinds = sorted({type(layer).__name__ for layer in layers})
    if app.module.training or not kinds:
        return []
    effect = f"its layers {' and '.join(kinds)} stay so while devices train"
    return [f"the module is in evaluation mode, and {effect}; call .train() on it to change that"]


def _check_parameters(app: App, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        what = f"App {app.name}: parameter {name}"
        if is_lazy(parameter):
            raise UnsupportedModel(
                f"{what} has no shape yet, expected one; call the module once on an example", code="FN-0761"
            )
        if parameter.dtype != torch.float32:
            advice = "call module.float()" if parameter.is_floating_point() else NO_FLOAT
            raise UnsupportedModel(f"{what} is {parameter.dtype}, expected torch.float32; {advice}", code="FN-0761")
        _check_device(what, parameter)
        if not bool(parameter.isfinite().all()):
            raise UnsupportedModel(
                f"{what} holds NaN or infinity, expected finite values; train it again or reset it", code="FN-0763"
            )
    for name, buffer in module.named_buffers():
        _check_device(f"App {app.name}: buffer {name}", buffer)


def _check_device(what: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        advice = "load its values" if tensor.is_meta else "call module.cpu()"
        raise UnsupportedModel(f"{what} is on {tensor.device}, expected cpu; {advice}", code="FN-0729")


def with_parameters(app: App, values: Mapping[str, Float32s]) -> nn.Module:
    """Return a copy of an App's module, as torch itself would train it, with the parameters of a Version.

    Args:
        app: The App.
        values: The parameters by the names of the manifest's table, each of its shape. Personal parameters may be left
            out: they keep the App's values.

    Raises:
        UnsupportedModel: The App cannot be prepared.
        InvalidInput: The names or shapes are not those of the App's parameters.
    """
    prepared = prepare(app)
    shapes = {name: tuple(value.shape) for name, value in prepared.parameters.items()}
    shared = {name: shape for name, shape in shapes.items() if name not in prepared.local}
    if {name: value.shape for name, value in values.items()} not in (shapes, shared):
        raise InvalidInput(
            f"{prepared.what}: got parameters of another model, expected {sorted(shared)} in the shapes of this one",
            code="FN-0767",
        )
    module = copy.deepcopy(prepared.eager).eval()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(torch.from_numpy(np.array(value)))
    return module


def with_state(app: App, state: StateDict) -> App:
    """Return an App whose module starts from a ``state_dict``. The module of ``app`` keeps its parameters.

    Raises:
        InvalidInput: The names or shapes are not those of the module.
    """
    module = copy.deepcopy(app.module)
    try:
        module.load_state_dict(dict(state))
    except (RuntimeError, TypeError, AttributeError) as exc:
        text = " ".join(str(exc).split())
        raise InvalidInput(
            f"App {app.name}: initial: {text}; expected a state_dict of the App's module, such as torch.load(FILE)",
            code="FN-0767",
        ) from exc
    return replace(app, module=module)


def _check_learned(app: App, learned: Tensors) -> None:
    if not learned and next(app.module.parameters(), None) is None:
        buffers = ", ".join(name for name, _ in app.module.named_buffers())
        raise UnsupportedModel(
            f"App {app.name}: the module has no parameters (its buffers: {buffers or 'none'}), expected at least one "
            "to train; add a layer that learns, or keep what must learn as a torch.nn.Parameter instead of a buffer",
            code="FN-0760",
        )
    if not learned:
        raise UnsupportedModel(
            f"App {app.name}: no parameter requires a gradient (trains: {app.recipe.trains!r}), "
            "expected at least one to train; call requires_grad_() on what must learn, or choose "
            "Recipe(trains='head') or Recipe(trains=Adapters(rank=4))",
            code="FN-0760",
        )


def _check_names(app: App, travelling: Tensors) -> None:
    ports = {parameter_port(name): name for name in travelling}
    if shared := sorted(ports.keys() & app.inputs.keys()):
        raise UnsupportedModel(
            f"App {app.name}: the input {shared[0]!r} and the parameter {ports[shared[0]]!r} have the same name, "
            "expected different ones, which name the graphs' inputs; rename the parameter of forward",
            code="FN-0731",
        )


def _rate(app: App, name: str) -> float:
    return next((float(factor) for pattern, factor in app.recipe.rates.items() if fnmatchcase(name, pattern)), 1.0)


def _check_rates(app: App, learned: Tensors) -> None:
    patterns = {name: [each for each in app.recipe.rates if fnmatchcase(name, each)] for name in learned}
    for pattern in app.recipe.rates:
        if all(pattern not in matches for matches in patterns.values()):
            raise UnsupportedModel(
                f"App {app.name}: rates: the pattern {pattern!r} matches no parameter that learns, expected at least "
                f"one of {sorted(learned)[:MAX_SHOWN]}; correct or remove it",
                code="FN-0749",
            )
    for name, matches in patterns.items():
        if len(matches) > 1:
            raise UnsupportedModel(
                f"App {app.name}: rates: the patterns {matches[0]!r} and {matches[1]!r} match the parameter {name}, "
                "expected one; make them more exact",
                code="FN-0749",
            )


def _local_names(app: App, module: nn.Module, names: list[str]) -> frozenset[str]:
    """Return the names that the patterns of ``local`` match. Raises UnsupportedModel for a pattern without a match."""
    what = f"App {app.name}: local"
    for pattern in app.recipe.local:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        frozen = [name for name, _ in module.named_parameters() if fnmatchcase(name, pattern)]
        kind = f"only {frozen[0]}, which does not learn and never travels" if frozen else "no parameter"
        raise UnsupportedModel(
            f"{what}: the pattern {pattern!r} matches {kind}, expected at least one of {names[:MAX_SHOWN]}; correct or "
            "remove it",
            code="FN-0749",
        )
    local = frozenset(name for name in names if any(fnmatchcase(name, each) for each in app.recipe.local))
    if len(local) == len(names):
        raise UnsupportedModel(
            f"{what}: the patterns {list(app.recipe.local)} match all parameters that learn, expected at least one "
            f"that travels, such as {names[0]}; make them more exact, or train without a federation",
            code="FN-0749",
        )
    return local


def _choose(app: App, module: nn.Module) -> list[str]:
    """Let only the parameters of the recipe require a gradient. Returns notes on the choice."""
    notes = []
    match app.recipe.trains:
        case "full":
            return []
        case "head":
            chosen, note = head_of(app, module)
            notes.append(note)
        case "bias":
            trainable = [
                (name.rpartition(".")[2], value) for name, value in module.named_parameters() if value.requires_grad
            ]
            # Biases are also called bias_ih_l0 (recurrent layers) and in_proj_bias (attention).
            chosen = {value for leaf, value in trainable if leaf.startswith("bias") or leaf.endswith("bias")}
        case Adapters() as adapters:
            add_adapters(module, adapters, ADAPTER_SEED)
            return []
        case _:
            assert_never(app.recipe.trains)
    for value in module.parameters():
        value.requires_grad_(value in chosen)
    return notes


def _freeze(module: nn.Module) -> dict[str, FrozenWeight]:
    """Round the frozen weights to int8 in place. Returns their codes and scales."""
    frozen = {}
    # A weight that two layers share has one name here and becomes one constant.
    names = {name for name, _ in module.named_parameters()}
    for owner, layer in module.named_modules():
        axis = 1 if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) else 0
        for leaf, value in layer.named_parameters(recurse=False):
            name = f"{owner}.{leaf}" if owner else leaf
            if name not in names or value.requires_grad or value.dim() < 2 or value.numel() < MIN_FROZEN_VALUES:
                continue
            plain = value.detach().numpy()
            scales = weight_scales(plain, axis)
            codes = weight_codes(plain, axis, scales)
            column = scales.reshape([-1 if dim == axis else 1 for dim in range(plain.ndim)])
            with torch.no_grad():
                value.copy_(torch.from_numpy(codes.astype(np.float32) * column))
            frozen[name] = FrozenWeight(codes=torch.from_numpy(codes), scales=torch.from_numpy(scales), axis=axis)
    return frozen


def _freeze_norms(module: nn.Module) -> list[str]:
    """Keep the statistics that a frozen backbone was trained with. Returns a note for each norm that changes."""
    notes = []
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            layer.eval()
            notes.append(
                f"module {name or 'itself'} ({type(layer).__name__}) keeps its running statistics: "
                "they are only updated with trains 'full'"
            )
    return notes

"""The model of a job: built from its config, with its layout, objective and data.

Every rank builds the same model before the first collective, so errors are raised on all ranks.

A job of several ranks builds its model without parameter values: they are on the meta device until a rank allocates its
own slices. The exception is an App on the first rank. Its function is called there with values, which become the
initial values of all ranks (``jobs.initial``).
"""

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fanin.datacenter.config.settings import FLAT, SAFETENSORS, ModelSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.loading import load_data
from fanin.datacenter.data.samples import DataSplit
from fanin.datacenter.families.family import FamilyModel, ModelFiles, TokenModel
from fanin.datacenter.parallel.build import TrainableModel, apply_precision
from fanin.datacenter.parallel.layout import check_layout
from fanin.datacenter.parallel.objective import (
    Objective,
    ScoredObjective,
    batch_objective,
    largest,
    padded_objective,
    token_objective,
)
from fanin.datacenter.parallel.transforms.meta import RepeatedDraws, drop_values, parameters_on_meta
from fanin.datacenter.training.parameters import load_parameters, parameter_table, trained_module
from fanin.edge.parameter_files import read_parameters
from fanin.edge.runtimes.graphs import X
from fanin.edge.tensors import Float32s
from fanin.protos.errors import FaninError, InvalidInput

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter. A rank without an App does not need them.
    from fanin.edge.export.app.app import App


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The initial values of a job's parameters.

    Attributes:
        build: Returns a module with its initial values.
        repeatable: Whether each call builds an equal new module, so that it can be initialized tensor by tensor.
    """

    build: Callable[[], torch.nn.Module]
    repeatable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A job's model and data.

    Attributes:
        model: The model to build an engine from.
        scored: The objective, with its accuracy counter.
        data: The samples to train and to evaluate on.
        start: The initial values of the parameters, unless they are in ``files``.
        app: The App, if the model is one.
        files: The files of the model.
    """

    model: TrainableModel
    scored: ScoredObjective
    data: DataSplit
    start: Start
    app: "App | None" = None
    files: ModelFiles = field(default_factory=ModelFiles)


def build_job_model(config: TrainConfig, *, rank: int = 0, num_ranks: int = 1) -> JobModel:
    """Build the model of a job, and load its data.

    Args:
        config: The job.
        rank: Number of this rank.
        num_ranks: Number of ranks. With one rank, the parameters have their values, except for those in ``files``.
            With several ranks they are on the meta device, except for those of an App on the first rank.

    Raises:
        InvalidInput: The config, the App or the data is invalid. The App may raise its own errors.
    """
    settings, spread = config.model, num_ranks > 1
    with _seeded_generators(config.seed):
        app = load_rank_app(settings.app, with_values=rank == 0 or not spread) if settings.app else None
    if app is not None:
        _check_inputs(app)
        _check_parameters(app, with_values=rank == 0 or not spread)
    module = trained_module(app) if app is not None else _family_module(config, with_values=not spread)
    apply_precision(module, config.parallel.precision)
    tokens = TokenModel(vocabulary=app.num_classes) if app is not None else _family(settings).tokens
    data = load_data(config, app, tokens)
    over_samples = settings.mean_over == "samples"
    objective = token_objective(over_samples=over_samples) if app is None else _objective(app, config)
    scored = ScoredObjective(objective)
    layout = settings.parallel_layout
    check_layout(layout, module)
    if app is not None and spread and rank > 0:
        drop_values(module)
        drop_values(app.module)
    if not spread:
        _load_canonical(settings, module)
    start = Start(build=partial(_with_values, config, None if app is None else module), repeatable=app is None)
    return JobModel(
        model=TrainableModel(module=module, layout=layout, objective=scored.objective),
        scored=scored,
        data=data,
        start=start,
        app=app,
        files=ModelFiles() if app is not None else _family(settings).files(module),
    )


@contextmanager
def _seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy, so that all ranks build the same model, and restore them at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _objective(app: "App", config: TrainConfig) -> Objective:
    """Return the objective of an App. Raises InvalidInput for a BatchLoss in a job that splits its batch."""
    from fanin.edge.export.app.losses import BatchLoss, loss_sum
    from fanin.edge.export.graph.examples import check_output

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return app.loss(check_output(app, outputs), targets)

    def total(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return loss_sum(app.loss, check_output(app, outputs), targets, mask)

    def predict(outputs: Tensor) -> Tensor:
        values = app.predicted(outputs)
        return largest(values) if app.num_classes else values

    is_of_batch = isinstance(app.loss, BatchLoss)
    if is_of_batch:
        _check_whole_batch(app, config)
    return replace(batch_objective(total) if is_of_batch else padded_objective(loss), predict=predict)


def _check_whole_batch(app: "App", config: TrainConfig) -> None:
    """Raise InvalidInput if a job computes the loss of parts of its batch."""
    mesh, accumulate = config.parallel.mesh, config.training.accumulate
    microbatches = config.parallel.microbatches
    if mesh.dp_replicate * mesh.dp_shard * accumulate * microbatches > 1:
        raise InvalidInput(
            f"App {app.name}: loss: got a BatchLoss, mesh {mesh}, accumulate {accumulate} and microbatches "
            f"{microbatches}, expected the whole batch on one rank at once: a mean over parts of a batch is not the "
            "loss of the batch, whose samples are compared with each other; use a mesh of tp alone or none, accumulate "
            "1 and microbatches 1",
            code="FN-1303",
        )


def _family_module(config: TrainConfig, *, with_values: bool) -> torch.nn.Module:
    with nullcontext() if with_values else parameters_on_meta():
        return _family(config.model).build(config.seed)


def _family(settings: ModelSettings) -> FamilyModel:
    assert settings.family is not None, "a config without an App has a family"
    return settings.family


def load_rank_app(reference: str, *, with_values: bool) -> "App":
    """Load an App for one rank.

    Args:
        reference: The App, as ``package.module:name`` or ``path/to/file.py:name``.
        with_values: Whether the parameters need values. Otherwise a function that builds the App runs with its
            parameters on the meta device. It must not compute with their values, and all of its modules with parameters
            must belong to the trained module. If it does not meet these conditions, it is called again and the caller
            drops the values.
    """
    from fanin.edge.export.app.loading import load_app

    if with_values:
        return load_app(reference)
    created = WeakSet[torch.nn.Module]()

    def call(function: Callable[[], object]) -> object:
        with parameters_on_meta() as registrations, RepeatedDraws():  # type: ignore[no-untyped-call]  # torch's
            result = function()
        for module, _ in registrations:
            created.add(module)
        return result

    try:
        app = load_app(reference, call)
    except FaninError:
        # If the error has another cause, the second call raises it again.
        return load_app(reference)
    gc.collect()
    return app if _complete_on_meta(app, created) else load_app(reference)


def _check_inputs(app: "App") -> None:
    """Raise InvalidInput unless the module has one input without a name and returns the output of the loss itself."""
    if list(app.inputs) != [X] or app.output:
        raise InvalidInput(
            f"App {app.name}: got a module with the inputs {list(app.inputs)} and output {app.output!r}, expected the "
            f"input {X} alone and no path: a datacenter job calls the module with one tensor; pass a module with such "
            "a forward, or train this one with fanin export --pretrain or by simulate()",
            code="FN-1301",
        )


def _check_parameters(app: "App", *, with_values: bool) -> None:
    """Raise InvalidInput unless the App's parameters have shapes and are all float32 or float64, and some learn.

    Args:
        app: The App.
        with_values: Whether they must have values, too.
    """
    is_double = all(value.dtype == torch.float64 for value in app.module.parameters())
    dtype = torch.float64 if is_double else torch.float32
    for name, value in app.module.named_parameters():
        what = f"App {app.name}: parameter {name}"
        if is_lazy(value):
            raise InvalidInput(
                f"{what} has no shape yet, expected one; call the module once on an example", code="FN-1302"
            )
        if with_values and value.is_meta:
            raise InvalidInput(
                f"{what} is on the meta device, expected one with values; load its values", code="FN-1302"
            )
        if value.dtype != dtype:
            raise InvalidInput(
                f"{what} is {value.dtype}, expected torch.float32, or torch.float64 for all; call module.float(), and "
                "choose the job's precision by [parallel] precision",
                code="FN-1302",
            )
    if not any(value.requires_grad for value in app.module.parameters()):
        raise InvalidInput(
            f"App {app.name}: no parameter requires a gradient, expected at least one to train; call requires_grad_() "
            "on what must learn",
            code="FN-1243",
        )


def _complete_on_meta(app: "App", created: Iterable[torch.nn.Module]) -> bool:
    """Return whether only the values of the trained module's parameters are missing.

    A builder's random numbers for other purposes differ, because it has not drawn those of the parameters. The first
    rank sends the buffers of the module, but no other tensors.
    """
    if app.recipe.trains != "full":
        return False
    own = set(app.module.modules())
    attributes = (value for module in own for value in vars(module).values())
    outside = app.preprocess is not None and app.preprocess.state_dict()
    return (
        all(module in own for module in created)
        and not any(value.is_meta for value in app.module.buffers())
        and not any(isinstance(value, torch.Tensor) for value in attributes)
        and not outside
    )


def _with_values(config: TrainConfig, module: torch.nn.Module | None) -> torch.nn.Module:
    """Return ``module``, or build the model of a family, with its initial values."""
    if module is None:
        module = _family_module(config, with_values=True)
        apply_precision(module, config.parallel.precision)
    _load_canonical(config.model, module)
    return module


def _load_canonical(settings: ModelSettings, module: torch.nn.Module) -> None:
    """Load the canonical parameters, or the flat array, that a config names. Raises InvalidInput."""
    path = settings.initial
    if path is None or path.suffix == SAFETENSORS:
        return
    if path.suffix == FLAT:
        table = parameter_table(module)
        load_parameters(module, table, _read_flat(path, table.num_values))
    else:
        load_parameters(module, *read_parameters(path))


def _read_flat(path: Path, num_values: int) -> Float32s:
    """Return the array (num_values,) in a file. Raises InvalidInput."""
    try:
        flat = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise InvalidInput(f"{path}: not a readable .npy file ({exc})", code="FN-1313") from exc
    if not isinstance(flat, np.ndarray) or (flat.dtype, flat.shape) != (np.float32, (num_values,)):
        got = f"{flat.dtype} {list(flat.shape)}" if isinstance(flat, np.ndarray) else "an archive"
        raise InvalidInput(
            f"initial: got {got}, expected float32 [{num_values}], the parameters of this model in the order of names; "
            "pass those of a Version of this model, or arrays by name",
            code="FN-1315",
        )
    return flat

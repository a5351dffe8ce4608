"""Mutants of an export: graphs in which one part is zeroed, doubled or negated, compared with eager torch."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.bundles.manifest import Manifest, OptimizerSetting
from fanin.edge.export import (
    Adagrad,
    Adam,
    App,
    Lion,
    Loss,
    Optimizer,
    Recipe,
    RmsProp,
    Sgd,
    cross_entropy,
    next_token,
    squared_error,
)
from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors
from fanin.edge.export.formats.graphs import ports_of
from fanin.edge.export.graph.decompositions.tables import ONNX, Forms
from fanin.edge.export.graph.forward import trace_evaluate
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.verification.eager import cases_of
from fanin.edge.export.verification.verify import verify_training
from fanin.edge.runtimes.engine import Feed, RunGraph
from fanin.edge.runtimes.graphs import GraphEvaluate
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.signatures import Signature
from fanin.edge.tensors import Array
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import UnsupportedModel

FACTORS: Final = MappingProxyType({"zero": 0.0, "twice": 2.0, "negative": -1.0})
"""The factor of each kind of mutant."""
MOVE: Final = "value"
"""The target of an optimizer's mutant that changes the parameter instead of a state."""
OPTIMIZERS: Final[Mapping[str, Optimizer]] = MappingProxyType(
    {
        "sgd": Sgd(momentum=0.0),
        "sgd-decay": Sgd(momentum=0.0, weight_decay=0.1),
        "sgd-settable": Sgd(momentum=0.0, settable=("momentum", "weight_decay")),
        "momentum": Sgd(),
        "nesterov": Sgd(nesterov=True),
        "adam": Adam(),
        "adam-decay": Adam(weight_decay=0.1),
        "adamw": Adam(weight_decay=0.1, decoupled=True),
        "rmsprop": RmsProp(),
        "rmsprop-momentum": RmsProp(momentum=0.9, weight_decay=0.1),
        "adagrad": Adagrad(),
        "lion": Lion(),
        "lion-decay": Lion(weight_decay=0.1),
    }
)
LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {"cross_entropy": cross_entropy, "next_token": next_token, "squared_error": squared_error}
)
EMPTY: Final = "the values of an empty tensor are written before they are read"
SIGN: Final = "autograd saves the result of a ReLU with it, and the gradient reads the sign alone"
WEIGHT: Final = "the sum of weights, which only a mean over samples reads, and a loss has one value for each sample"
EQUIVALENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{
            f"decomposition {name} empty_permuted[0] {change}": EMPTY
            for name in ("onnx", "tflite")
            for change in FACTORS
        },
        "decomposition onnx detach[0] twice": SIGN,
        **{
            f"decomposition tflite nll_loss{dims}_forward[1] {change}": WEIGHT
            for dims in ("", "2d")
            for change in FACTORS
        },
    }
)
"""The mutants that do not change any result of an export, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantOptimizer:
    """An optimizer whose update of the parameter, or one of its states, is multiplied by a factor."""

    of: Optimizer
    target: str
    factor: float

    @property
    def states(self) -> Mapping[str, str]:
        """The states of the true optimizer."""
        return self.of.states

    @property
    def counts_steps(self) -> bool:
        """See the true optimizer."""
        return self.of.counts_steps

    @property
    def divides(self) -> bool:
        """See the true optimizer."""
        return self.of.divides

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """The same as of the true optimizer."""
        return self.of.settings

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The same as of the true optimizer."""
        return self.of.setting_inputs

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the true results, with one of them mutated."""
        moved, states = self.of.move(value, gradient, state, inputs)
        if self.target == MOVE:
            return value + self.factor * (moved - value), states
        return moved, states | {self.target: self.factor * states[self.target]}

    def eager(self, parameters: Sequence[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return torch's optimizer without the mutation."""
        return self.of.eager(parameters, learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """An export with one mutated part.

    Attributes:
        kind: ``optimizer``, ``loss`` or ``decomposition``.
        part: The mutated part.
        change: A key of ``FACTORS``.
        verify: Traces the mutated graphs and compares them with torch. Raises UnsupportedModel.
        verify_true: The same without the mutation.
    """

    kind: str
    part: str
    change: str
    verify: Callable[[], None]
    verify_true: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.kind} {self.part} {self.change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a mutant: the error that refuses it, or "" for a survivor, and the seconds of the check."""

    error: str
    seconds: float


def outcome_of(mutant: Mutant) -> Outcome:
    """Verify a mutant with the code of an export."""
    began_s = time.perf_counter()
    try:
        mutant.verify()
    except UnsupportedModel as exc:
        return Outcome(error=str(exc), seconds=time.perf_counter() - began_s)
    return Outcome(error="", seconds=time.perf_counter() - began_s)


def verify_traced(mutated: App, app: App, forms: Forms) -> None:
    """Trace an App, and compare its float graphs with another App, without a conversion.

    Args:
        mutated: The App that is traced.
        app: The App that torch runs.
        forms: The decompositions of the graphs.

    Raises:
        UnsupportedModel: A graph differs from torch.
    """
    prepared = prepare(mutated)
    graph = trace_train(prepared, forms)
    true = replace(prepared, app=app)
    manifest = _manifest(prepared, train=graph)
    step = GraphTrainStep(manifest, bind_by_copy(_run(graph)))

    @cache
    def evaluation() -> GraphEvaluate:
        # The graph is traced on its first call, because most mutants fail before that.
        traced = trace_evaluate(prepared, forms)
        return GraphEvaluate(_manifest(prepared, evaluate=traced), _run(traced))

    verify_training(true, manifest, step, lambda *arguments: evaluation()(*arguments), cases_of(true))


def _manifest(prepared: Prepared, **graphs: Traced) -> Manifest:
    signatures = {name: Signature(inputs=(), outputs=(), graphs={}) for name in ("train", "evaluate", "infer")}
    for name, graph in graphs.items():
        inputs, outputs = ports_of(prepared, graph)
        signatures[name] = Signature(inputs=inputs, outputs=outputs, graphs={})
        data = tuple(port for port in inputs if port.name in prepared.app.inputs)
        signatures["infer"] = Signature(inputs=data, outputs=(), graphs={})
    return Manifest(
        name=prepared.app.name,
        batch_size=prepared.app.batch_size,
        num_classes=prepared.app.num_classes,
        table=prepared.table,
        optimizer=prepared.app.recipe.optimizer.settings,
        signatures=signatures,
        slots={},
        artifacts={"parameters": artifact_of(b"")},
        initial="parameters",
    )


def _run(traced: Traced) -> RunGraph:
    module = traced.program.module()

    def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        with torch.no_grad():
            results = module(*(torch.tensor(feed[name]) for name in traced.inputs))
        return [dict(zip(traced.outputs, results, strict=True))[name].numpy() for name in outputs]

    return run


def optimizer_mutants() -> Iterator[Mutant]:
    """Yield mutants of every optimizer: of its parameter update and of each state."""
    for name, optimizer in OPTIMIZERS.items():
        app = replace(_classifier(), recipe=Recipe(optimizer=optimizer))
        for target in (MOVE, *optimizer.states):
            for change, factor in FACTORS.items():
                recipe = Recipe(optimizer=MutantOptimizer(of=optimizer, target=target, factor=factor))
                yield _mutant(("optimizer", f"{name}: {target}", change), app, replace(app, recipe=recipe))


def loss_mutants() -> Iterator[Mutant]:
    """Yield mutants of every loss."""
    apps = {"cross_entropy": _classifier(), "next_token": _decoder(), "squared_error": _regression()}
    for name, loss in LOSSES.items():
        for change, factor in FACTORS.items():
            app = replace(apps[name], loss=loss)
            yield _mutant(("loss", name, change), app, replace(app, loss=_times(loss, factor)))


def _mutant(names: tuple[str, str, str], app: App, mutated: App) -> Mutant:
    kind, part, change = names
    return Mutant(
        kind=kind,
        part=part,
        change=change,
        verify=lambda: verify_traced(mutated, app, ONNX),
        verify_true=lambda: verify_traced(app, app, ONNX),
    )


def _times(loss: Loss, factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def mutated(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * loss(outputs, targets)

    return mutated


def _app(module: nn.Module, calibration: Tensor, num_classes: int) -> App:
    return App(
        name="mutant",
        module=module,
        calibration=calibration,
        batch_size=4,
        num_classes=num_classes,
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
    )


def _classifier() -> App:
    torch.manual_seed(0)
    return _app(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 6), 3)


def _regression() -> App:
    torch.manual_seed(0)
    return _app(nn.Linear(6, 3), torch.randn(8, 6), 0)


def _decoder() -> App:
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (8, 5), dtype=torch.int32)
    return _app(nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7)), tokens, 7)

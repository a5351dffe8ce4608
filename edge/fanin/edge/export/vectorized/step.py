"""The train step of an App, vectorized over clients by ``torch.func.vmap``.

``vmap`` transforms the traced train step, which is a function without state. So the optimizer, the recipe, norms and
masks have a single definition in ``graph.train``. The vectorized step differs from the exported graph only in
rounding. On a GPU, it runs as CUDA graphs.

Reference:
    torch.func.vmap, https://docs.pytorch.org/docs/stable/generated/torch.func.vmap.html.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from fanin.edge.export.app.app import App
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.decompositions.elementwise import copied
from fanin.edge.export.graph.decompositions.selection import slice_scatter
from fanin.edge.export.graph.decompositions.tables import Forms, Table
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.vectorized.gpu import CudaGraphs, exact_convolutions
from fanin.edge.export.verification.ready import with_draws
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.graphs import (
    PROXIMAL_WEIGHT,
    SETTING_PREFIX,
    STEP,
    TARGET_PORTS,
    next_port,
    parameter_port,
    setting_values,
    state_port,
)
from fanin.edge.runtimes.randomness import draw, random_ports
from fanin.edge.signatures import Port
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import UnsupportedModel

EAGER: Final = Forms(graph_format="torch", backward=dict, forward=dict)
"""torch needs no forms: the operators of the trace are its own."""
SHARED: Final = (STEP, PROXIMAL_WEIGHT)
"""The inputs that are the same for all clients. The anchor of FedProx is one, too."""
CHUNK_BYTES: Final = 64 << 20
"""Parameters and optimizer state of the clients that train together. More of them would not fit in the processor's
cache, and their activations need memory, too."""
MAX_CHUNK: Final = 64
TOLERANCE: Final = 1e-3
"""Largest difference between a vectorized step and a single one, relative to the largest value of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """Settings of a vectorized step.

    Attributes:
        learning_rates: Learning rate of each client.
        proximal_weight: FedProx's mu.
        anchor: Parameters towards which the proximal term pulls, the same for all clients (num_values,).
        controls: SCAFFOLD's c - c_i of each client (num_values,); None for a client without SCAFFOLD.
        random_keys: Key of the random inputs of each client.
        optimizer: Settings of the optimizer by name, instead of the App's.
    """

    learning_rates: Sequence[float]
    proximal_weight: float
    anchor: Float32s
    controls: Sequence[Float32s | None]
    random_keys: Sequence[int]
    optimizer: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorState:
    """The parameters and optimizer states of K clients, each tensor (K, ...), by port name."""

    tensors: Tensors
    num_steps: int = 0

    def first(self, num: int) -> "VectorState":
        """Return the state of the first clients."""
        return VectorState(
            tensors={name: value[:num] for name, value in self.tensors.items()}, num_steps=self.num_steps
        )

    def after(self, num: int) -> "VectorState":
        """Return the state of the clients after the first ``num``."""
        return VectorState(
            tensors={name: value[num:] for name, value in self.tensors.items()}, num_steps=self.num_steps
        )


class VectorStep:
    """One train step of many clients at once.

    Attributes:
        max_clients: Number of clients that should train together.
    """

    def __init__(self, app: App, device: str = "cpu") -> None:
        """Trace and vectorize the train step of an App.

        Args:
            app: The App.
            device: ``cpu``, or a GPU: ``cuda``, ``cuda:1``.

        Raises:
            UnsupportedModel: The step cannot be traced or vectorized, or the vectorized one has other results.
        """
        if app.lengths is not None and app.lengths.shorter:
            raise UnsupportedModel(
                f"App {app.name}: lengths: got {list(app.lengths.sizes)}, expected a single length for the engine "
                "vmap: clients that train together have batches of one shape",
                code="FN-0798",
            )
        if app.recipe.local:
            raise UnsupportedModel(
                f"App {app.name}: local: got {list(app.recipe.local)}, expected no personal parameters for the engine "
                "vmap: clients that train together start from one Version",
                code="FN-0798",
            )
        place = torch.device(device)
        prepared = with_draws(prepare(app))
        traced = trace_train(prepared, EAGER)
        self._table: TensorTable = prepared.table
        self._settings = {name: setting.default for name, setting in app.recipe.optimizer.settings.items()}
        self._batch = (*app.inputs, *TARGET_PORTS)
        self._inputs, self._outputs = list(traced.inputs), list(traced.outputs)
        self._examples = dict(zip(self._inputs, traced.examples, strict=True))
        # Without operators that write into a tensor: vmap refuses one that writes a client's values into a shared one.
        # It also refuses a slice without an end, as in the gradient of x[:, 1:].
        forms: Table = {torch.ops.aten.copy.default: copied, torch.ops.aten.slice_scatter.default: slice_scatter}
        with quiet_torch():
            self._one = move_to_device_pass(traced.program.run_decompositions(forms), place).module()
        anchors = {state_port("anchor", spec.name) for spec in self._table.specs}
        shared = {*anchors, *SHARED, *(SETTING_PREFIX + name for name in app.recipe.optimizer.setting_inputs)}
        axes = tuple(None if name in shared else 0 for name in self._inputs)
        self._all: Callable[..., tuple[Tensor, ...]] = torch.func.vmap(self._one, in_dims=axes)
        self._axes = dict(zip(self._inputs, axes, strict=True))
        names = {parameter_port(spec.name): spec.name for spec in self._table.specs}
        self._parameters = {port: name for port, name in names.items() if port in self._examples}
        ports = (Port(name=name, dtype="float32", shape=tuple(value.shape)) for name, value in self._examples.items())
        self._random = random_ports(ports)
        self._states = [name.removeprefix("next.") for name in self._outputs[:-1]]
        if place.type == "cuda":
            on_gpu = self._all = CudaGraphs(self._all, axes, place)
            self._check(prepared, place)
            self.max_clients = on_gpu.max_clients
        else:
            self._check(prepared, place)
            values = sum(self._examples[name].numel() for name in self._states)
            self.max_clients = max(1, min(MAX_CHUNK, CHUNK_BYTES // max(4 * values, 1)))

    def begin(self, parameters: Float32s, num_clients: int) -> VectorState:
        """Return the state of all clients before their first step.

        Args:
            parameters: The parameters of the Version (num_values,).
            num_clients: Number of clients K.
        """
        values = self._table.views(parameters)
        tensors = {
            name: torch.from_numpy(np.array(values[self._parameters[name]]))
            if name in self._parameters
            else torch.zeros_like(self._examples[name])
            for name in self._states
        }
        return VectorState(
            tensors={name: value.expand(num_clients, *value.shape).clone() for name, value in tensors.items()}
        )

    def __call__(
        self, state: VectorState, batches: Sequence[PaddedBatch], settings: VectorSettings
    ) -> tuple[VectorState, Float32s]:
        """Return the next state and the loss of each client (K,).

        Args:
            state: The state of K clients.
            batches: One batch of each client.
            settings: The settings of the step.
        """
        feed = state.tensors | self._extras(settings) | self._scalars(state, settings)
        arrays = [{**batch.inputs, "y": batch.y, "mask": batch.mask} for batch in batches]
        for name in self._batch:
            stacked = torch.from_numpy(np.stack([each[name] for each in arrays]))
            feed[name] = stacked.to(self._examples[name].dtype)
        feed["learning_rate"] = torch.tensor(list(settings.learning_rates), dtype=torch.float32)
        for port in self._random:
            rows = [draw(port, key, state.num_steps) for key in settings.random_keys]
            feed[port.name] = torch.from_numpy(np.stack(rows))
        with torch.no_grad():
            results = dict(zip(self._outputs, self._all(*(feed[name] for name in self._inputs)), strict=True))
        following = {name: results[next_port(name)] for name in self._states}
        losses: Float32s = results["loss"].cpu().numpy()
        return VectorState(tensors=following, num_steps=state.num_steps + 1), losses

    def parameters(self, state: VectorState) -> list[Float32s]:
        """Return the parameters of each client (num_values,)."""
        arrays = {name: state.tensors[port].cpu().numpy() for port, name in self._parameters.items()}
        num = len(next(iter(arrays.values())))
        return [self._table.flatten({name: values[client] for name, values in arrays.items()}) for client in range(num)]

    def _scalars(self, state: VectorState, settings: VectorSettings) -> Tensors:
        values = setting_values(self._settings | dict(settings.optimizer)) | {
            STEP: float(state.num_steps + 1),
            PROXIMAL_WEIGHT: settings.proximal_weight,
        }
        return {name: torch.tensor(value) for name, value in values.items() if name in self._examples}

    def _extras(self, settings: VectorSettings) -> Tensors:
        """Return anchors and control variates, as far as the train step has them as inputs."""
        extras: Tensors = {}
        for name, value in self._table.views(settings.anchor).items():
            if (port := state_port("anchor", name)) in self._examples:
                extras[port] = torch.from_numpy(np.array(value))
        zeros = np.zeros_like(settings.anchor)
        controls = [self._table.views(zeros if control is None else control) for control in settings.controls]
        for name in self._parameters.values():
            if (port := state_port("control", name)) in self._examples:
                extras[port] = torch.from_numpy(np.stack([control[name] for control in controls]))
        return extras

    def _check(self, prepared: Prepared, device: torch.device) -> None:
        """Compare one vectorized step of two clients with two single steps. Raises UnsupportedModel."""
        what = f"App {prepared.app.name}: the train step cannot be vectorized over clients"
        feed = {name: self._two(name, value) for name, value in self._examples.items()}
        try:
            with torch.no_grad(), exact_convolutions():
                together = self._all(*feed.values())
                moved = {name: value.to(device) for name, value in feed.items()}
                singles = [self._one(*(self._of(name, moved[name], client) for name in feed)) for client in range(2)]
        except Exception as exc:  # Any error: an operator without a batching rule may raise any.
            reason = str(exc).strip().partition("\n")[0]
            raise UnsupportedModel(f"{what}: {reason}", code="FN-0799") from exc
        for name, both, *each in zip(self._outputs, together, *singles, strict=True):
            if _difference(both, torch.stack(each)) > TOLERANCE:
                raise UnsupportedModel(
                    f"{what}: got other values of {name} than in a step of one client, expected the same; use "
                    "engine='graph'",
                    code="FN-0799",
                )

    def _two(self, name: str, value: Tensor) -> Tensor:
        """Return an input of two clients. The samples of the second one are in reversed order."""
        if self._axes[name] is None:
            return value
        return torch.stack([value, value.flip(0) if name in self._batch else value])

    def _of(self, name: str, value: Tensor, client: int) -> Tensor:
        return value if self._axes[name] is None else value[client]


def _difference(values: Tensor, others: Tensor) -> float:
    scale = max(float(others.abs().max()), 1.0) if others.numel() else 1.0
    return float((values - others).abs().max()) / scale if others.numel() else 0.0

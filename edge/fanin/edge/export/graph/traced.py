"""The tracer: a function over flat tensors becomes a functional graph with named inputs and outputs.

Every graph of an export is a ``Traced``. Frozen weights are traced as inputs and become int8 constants afterwards. The
tracer evaluates all operators that depend on no input, so it would store a frozen weight as float32.

Gradients become plain operators, and autograd's bookkeeping is removed. ``torch.autograd`` is traced and not
``torch.func``: the latter decomposes some backward operators before our own forms (``decompositions``) can replace
them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, _guards
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.decompositions.programs.program import is_write, program_of
from fanin.edge.export.graph.decompositions.tables import WRITES, Table, with_writes
from fanin.edge.export.module.kernels import tracing
from fanin.edge.export.module.origins import recorded_origins
from fanin.edge.export.module.prepare import FrozenWeight
from fanin.edge.export.quiet import quiet_torch

QUANTIZED_OPERATORS: Final = quantized_decomposed_lib
"""The import registers the operator below."""
dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The graph of one Signature, its example inputs, and the names of its flat inputs and outputs."""

    program: ExportedProgram
    examples: Sequence[Tensor]
    inputs: Sequence[str]
    outputs: Sequence[str]


class FlatInputs:
    """The flat inputs of a traced function, by name, and the frozen weights behind them."""

    def __init__(self, values: Tensors, frozen: dict[str, FrozenWeight]) -> None:
        self.names = list(values)
        self.examples = list(values.values())
        self._frozen = frozen

    @property
    def constants(self) -> list[Tensor]:
        """Codes and scales of the frozen weights. They follow the inputs while these are traced."""
        return [tensor for weight in self._frozen.values() for tensor in (weight.codes, weight.scales)]

    def named(self, flat: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Return (inputs by name, dequantized frozen weights by name)."""
        constants = flat[len(self.names) :]
        frozen = {
            name: _dequantized(weight, codes, scales)
            for (name, weight), codes, scales in zip(self._frozen.items(), constants[::2], constants[1::2], strict=True)
        }
        return dict(zip(self.names, flat, strict=False)), frozen


def _dequantized(weight: FrozenWeight, codes: Tensor, scales: Tensor) -> Tensor:
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    value: Tensor = dequantize(codes, scales, zeros, weight.axis, -128, 127, torch.int8)
    return value


def trace_flat(
    what: str, root: torch.nn.Module, function: Callable[..., tuple[Tensor, ...]], inputs: FlatInputs, table: Table
) -> ExportedProgram:
    """Trace a function over flat tensors into a graph of core operators.

    Args:
        what: Prefix of error messages.
        root: The module that the function runs.
        function: The function. Its arguments are the inputs and then the constants.
        inputs: Names and examples of the inputs, and the frozen weights.
        table: The decompositions.

    Raises:
        UnsupportedModel: The function cannot be traced.
    """

    def trace() -> ExportedProgram:
        with tracing(), recorded_origins(root), shared_shapes():
            graph = make_fx(function, decomposition_table=with_writes(table))(*inputs.examples, *inputs.constants)
        drop_aliases(graph)
        _bind(graph, inputs)
        return without_writes(program_of(graph, inputs.examples))

    return guarded(what, root, trace)


def without_writes(program: ExportedProgram) -> ExportedProgram:
    """Return the program with a new tensor in place of each write into one, and with the bodies of its contexts.

    A context, such as ``torch.autocast("cuda", enabled=False)``, is an operator with a graph of its own.
    """
    if not any(is_write(node) or isinstance(node.target, HigherOrderOperator) for node in program.graph.nodes):
        return program
    with quiet_torch():
        plain: ExportedProgram = program.run_decompositions(dict(WRITES))
    return plain


@contextmanager
def shared_shapes() -> Iterator[None]:
    """Let all nodes of a trace keep their shapes in one fake mode.

    The tracer would create a mode for each node, and each mode reads the source of the complete call stack.
    """
    with _guards.tracing(_guards.TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


def _bind(graph: GraphModule, inputs: FlatInputs) -> None:
    """Turn the last inputs of the graph, the frozen weights, into constants."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, (node, value) in enumerate(zip(placeholders[len(inputs.names) :], inputs.constants, strict=True)):
        name = f"frozen{index}"
        graph.register_buffer(name, value)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.graph.erase_node(node)
    graph.recompile()


ALIASES: Final = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def gradients_of(
    function: Callable[[Tensors], tuple[Tensor, Tensors]], parameters: Tensors
) -> tuple[Tensors, Tensor, Tensors]:
    """Return the gradients of a function's value.

    Args:
        function: parameters by name -> (scalar value, auxiliary tensors by name).
        parameters: The tensors to differentiate by.

    Returns:
        (gradients by name, the value, the auxiliary tensors).
    """
    # By default, the gradient of a write to a view reads memory by strides (``as_strided``), which no format has.
    with torch.enable_grad(), _force_original_view_tracking(True):
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        value, auxiliary = function(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True)), value.detach(), auxiliary


def disable_inplace(module: torch.nn.Module) -> None:
    """Turn in-place activations off: they would overwrite a tensor that the gradient needs."""
    for layer in module.modules():
        if getattr(layer, "inplace", False):
            vars(layer)["inplace"] = False


def drop_aliases(graph: GraphModule) -> None:
    """Remove aliases and detaches, which only autograd needs: converters do not recognize an image behind one."""
    for node in list(graph.graph.nodes):
        if node.target in ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)

"""Programs of plain operators, built and decomposed by one trace.

``torch.export.export`` and ``ExportedProgram.run_decompositions`` prepare any module for any backend. They collect each
operator of the process that could be decomposed. They trace the graph several times, with autograd's machinery. The
graphs of an export have no state and no gradient. So one trace is enough, with torch's own handling of operators that
change a tensor in place and of composite operators.

A graph outside of these limits, and one whose shapes are free, is decomposed by torch. The result is the same.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._export.verifier import TrainingIRVerifier
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.export import ExportedProgram
from torch.export.decomp_utils import CustomDecompTable
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature, _override_composite_implicit_decomp
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_structure

from fanin.edge.export.graph.decompositions.programs.recorder import NotRecorded, Recorder, Views, view_of_rows
from fanin.edge.export.module.kernels import plain_kernels

Form = Callable[..., object]


class PlainProgram(ExportedProgram):
    """A program that is decomposed by one trace, if its graph allows it."""

    wrapped: frozenset[OpOverload] = frozenset()
    """Composite operators of the programs that this one was decomposed from. Passes wrap them in functions."""

    def run_decompositions(
        self,
        decomp_table: dict[OperatorBase, Form] | None = None,
        decompose_custom_triton_ops: bool = False,
    ) -> ExportedProgram:
        """Replace each operator of a table by its form, also within other forms.

        Args:
            decomp_table: The form of each operator. None selects torch's core decompositions.
            decompose_custom_triton_ops: An option of torch for kernels that no graph of an export has.

        Returns:
            The decomposed program.
        """
        if decomp_table is not None:
            # The methods of torch's own table collect every operator of the process first.
            table = decomp_table.decomp_table if isinstance(decomp_table, CustomDecompTable) else decomp_table
            retraced = _retraced(self, table)
            if retraced is not None:
                return retraced
        decomposed: ExportedProgram = super().run_decompositions(decomp_table, decompose_custom_triton_ops)
        return decomposed


def program_of(traced: GraphModule, examples: Sequence[Tensor]) -> ExportedProgram:
    """Return a traced graph as a program.

    Args:
        traced: The graph.
        examples: Example inputs, whose shapes are fixed.
    """
    graph_module = GraphModule(traced, copy.deepcopy(traced.graph))
    constants = _lift(graph_module)
    inputs = [value.detach() for value in (*constants.values(), *examples)]
    try:
        with Views() as views:
            FakeTensorProp(graph_module, FakeTensorMode()).propagate(*inputs)
    except DynamicOutputShapeException:
        # A constant mask selects: the shape follows from values, which one trace does not have.
        return torch.export.export(traced, tuple(examples), strict=False)
    program = _plain(graph_module, constants, examples)
    return program.run_decompositions({}) if views.num_copies else program


def _plain(graph_module: GraphModule, constants: Mapping[Node, Tensor], examples: Sequence[Tensor]) -> PlainProgram:
    """Return a graph whose constants are its first inputs, and whose nodes know their shapes, as a program."""
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    specs = [
        InputSpec(
            kind=InputKind.BUFFER if node in constants else InputKind.USER_INPUT,
            arg=TensorArgument(name=node.name),
            target=node.name if node in constants else None,
            persistent=True if node in constants else None,
        )
        for node in placeholders
    ]
    outputs = _outputs(graph)
    layout = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=tree_structure((tuple(examples), {})),
        out_spec=tree_structure(tuple(range(len(outputs)))),
    )
    return PlainProgram(
        root=graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs=specs, output_specs=[_output_spec(node) for node in outputs]),
        state_dict={node.name: value for node, value in constants.items()},
        range_constraints={},
        module_call_graph=[ModuleCallEntry(fqn="", signature=layout)],
        example_inputs=(tuple(examples), {}),
        verifiers=[TrainingIRVerifier],
    )


def _lift(graph_module: GraphModule) -> dict[Node, Tensor]:
    """Turn the constants of a graph that are used into inputs before the others, and return their values."""
    graph = graph_module.graph
    graph.eliminate_dead_code()
    lifted: dict[str, Node] = {}
    values: dict[Node, Tensor] = {}
    first = next(iter(graph.nodes))
    attributes = [node for node in graph.nodes if node.op == "get_attr"]
    for node in attributes:
        path = str(node.target)
        if path not in lifted:
            with graph.inserting_before(first):
                lifted[path] = graph.placeholder(path.replace(".", "_"))
            # The name is an argument in Python code; a path such as `0.weight` is none.
            lifted[path].target = lifted[path].name
            values[lifted[path]] = _attribute(graph_module, path)
        node.replace_all_uses_with(lifted[path])
    for node in attributes:
        graph.erase_node(node)
    graph_module.recompile()
    return values


def _attribute(graph_module: GraphModule, path: str) -> Tensor:
    attribute: object = graph_module
    for name in path.split("."):
        attribute = getattr(attribute, name)
    assert isinstance(attribute, Tensor), "attributes of a graph are tensors"
    # The converter to TFLite would read the memory of a view as if it were contiguous.
    return attribute.detach().contiguous()


def _retraced(program: PlainProgram, table: Mapping[OperatorBase, Form]) -> PlainProgram | None:
    """Return the decomposed program; None if its graph or the result needs more than one trace."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta.get("val") for node in placeholders]
    if not all(isinstance(value, FakeTensor) for value in inputs):
        return None
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return None
    forms: dict[OpOverload, Form] = {target: form for target, form in table.items() if isinstance(target, OpOverload)}
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)}
    composite = program.wrapped | {target for target in targets if _is_preservable_cia_op(target)}
    run = Interpreter(program.graph_module).run
    with (
        inputs[0].fake_mode,
        _override_composite_implicit_decomp(
            {target: table.get(target, _special_op_to_preserve_cia) for target in composite}
        ),
        enable_python_dispatcher(),
        torch.no_grad(),
        # A composite operator such as an LSTM would choose a fused kernel.
        plain_kernels(),
        preserve_node_meta(),
    ):
        try:
            graph = _recorded(run, placeholders, Recorder(forms))
        except (NotRecorded, NotImplementedError):
            # Some graphs and some forms change a view in place. Operators with functions as inputs are not recorded.
            function = dispatch_functionalize(run, FunctionalTensorMode(export=True))
            plain = {torch.ops.aten.view.default: view_of_rows, **forms}
            graph = _renamed(make_fx(function, decomposition_table=plain)(*inputs).graph, placeholders)
    graph.eliminate_dead_code()
    if any(node.op == "get_attr" or is_write(node) for node in graph.nodes):
        return None
    outputs = [_output_spec(node) for node in _outputs(graph)]
    decomposed = PlainProgram(
        root=GraphModule(torch.nn.Module(), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            input_specs=list(program.graph_signature.input_specs), output_specs=outputs
        ),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
    )
    decomposed.wrapped = composite
    return decomposed


def is_write(node: Node) -> bool:
    """Return whether the operator of a node changes one of its inputs."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _recorded(run: Callable[..., Argument], placeholders: Sequence[Node], recorder: Recorder) -> Graph:
    """Return the operators of a call with the values of the placeholders. Raises NotRecorded."""
    for node in placeholders:
        recorder.input(node.name, node.meta["val"], node.meta)
    with recorder:
        results = run(*(node.meta["val"] for node in placeholders))
    recorder.output(results)
    return recorder.graph


def _renamed(traced: Graph, placeholders: Sequence[Node]) -> Graph:
    """Return a copy of a graph whose inputs have the names of other ones."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node, named in zip([node for node in traced.nodes if node.op == "placeholder"], placeholders, strict=True):
        copies[node] = graph.placeholder(named.name)
        copies[node].meta = dict(node.meta)
    graph.output(graph.graph_copy(traced, copies))
    return graph


def _outputs(graph: Graph) -> list[Node]:
    """Return the nodes of the outputs."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "a traced function returns a tuple"
    return [node for node in outputs if isinstance(node, Node)]


def _output_spec(node: Node) -> OutputSpec:
    return OutputSpec(kind=OutputKind.USER_OUTPUT, arg=TensorArgument(name=node.name), target=None)

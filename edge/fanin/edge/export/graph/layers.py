"""A single layer as a graph, with its gradient or without, to test whether a graph format has a form of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fanin.edge.export.app.decompositions import Decompositions
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.decompositions.tables import Forms
from fanin.edge.export.graph.reading import FixedShapes, NoReading
from fanin.edge.export.graph.traced import FlatInputs, Traced, gradients_of, trace_flat
from fanin.edge.export.module.draws import constant
from fanin.edge.export.module.norms import TrackedNorms, running_statistics
from fanin.edge.export.module.places import call_with
from fanin.edge.export.quiet import quiet_torch


def trace_layer(
    layer: torch.nn.Module, inputs: Sequence[Tensor], forms: Forms, what: str, own: Decompositions
) -> Traced:
    """Trace the gradients of the sum of a layer's output.

    Args:
        layer: The layer.
        inputs: Its inputs in the model.
        forms: The decompositions of a graph format.
        what: Name of the layer in error messages.
        own: The App's own decompositions.

    Returns:
        The graph of the gradients of all parameters that learn and of all float inputs.

    Raises:
        UnsupportedModel: The layer cannot be traced.
    """
    learned = {name: value.detach().clone() for name, value in layer.named_parameters() if value.requires_grad}
    arguments = {f"in.{index}": value for index, value in enumerate(inputs)}
    moved = [name for name, value in arguments.items() if value.is_floating_point()]
    flat_inputs = FlatInputs(learned | arguments, {})

    def back(*flat: Tensor) -> tuple[Tensor, ...]:
        values, _ = flat_inputs.named(flat)

        def total(parameters: Tensors) -> tuple[Tensor, Tensors]:
            weights = {name: parameters[name] for name in learned}
            norms = TrackedNorms(running_statistics(layer), torch.ones(len(inputs[0]) if inputs[0].dim() else 1))
            with constant(), norms, NoReading(), FixedShapes():
                output = call_with(layer, weights, [(values | parameters)[name] for name in arguments])
            first = output[0] if isinstance(output, tuple) else output
            assert isinstance(first, Tensor), "a layer returns a tensor, or a tuple that begins with one"
            # The gradient of a plain sum is 1 everywhere, and operators on a constant would be folded away.
            weighted_sum: Tensor = (first * first.detach()).sum()
            return weighted_sum, {}

        gradients, *_ = gradients_of(total, {name: values[name] for name in (*learned, *moved)})
        return tuple(gradients.values())

    return Traced(
        program=trace_flat(
            f"{what}: the layer for {forms.graph_format}",
            layer,
            back,
            flat_inputs,
            forms.for_training(own),
        ),
        examples=flat_inputs.examples,
        inputs=flat_inputs.names,
        outputs=[f"gradient.{name}" for name in (*learned, *moved)],
    )


def trace_forward(layer: torch.nn.Module, inputs: Sequence[Tensor], forms: Forms, own: Decompositions) -> Traced:
    """Trace a layer without its gradient. Raises RuntimeError, TypeError or ValueError of torch."""
    with torch.no_grad(), quiet_torch():
        program = torch.export.export(layer, tuple(inputs), strict=False)
        if own:
            program = program.run_decompositions(forms.for_inference(own))
    names = [f"in.{index}" for index in range(len(inputs))]
    outputs = [f"out.{index}" for index in range(len(program.graph_signature.user_outputs))]
    return Traced(program=program, examples=list(inputs), inputs=names, outputs=outputs)

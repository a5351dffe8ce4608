"""The graphs that only run forward, ``evaluate`` and ``infer``, and the calls of module and loss that all share."""

import builtins
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.inputs.named import arguments_of
from fanin.edge.export.app.inputs.outputs import Output, picked
from fanin.edge.export.app.losses import sum_of
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.attention import with_plain_attention
from fanin.edge.export.graph.decompositions.tables import Forms
from fanin.edge.export.graph.examples import (
    MIN_TRACE_BATCH,
    check_output,
    constant_batch,
    example_batch,
    loss_values_of,
)
from fanin.edge.export.graph.reading import FixedShapes, NoReading
from fanin.edge.export.graph.traced import FlatInputs, Traced, trace_flat, without_writes
from fanin.edge.export.module.draws import refused
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.export.module.origins import recorded_origins
from fanin.edge.export.module.places import call_with
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.quiet import quiet_weights
from fanin.edge.export.refusals import FixedBatch
from fanin.edge.runtimes.graphs import parameter_port

Module = TypeVar("Module", bound=torch.nn.Module)


def trace_evaluate(prepared: Prepared, forms: Forms) -> Traced:
    """Trace the summed loss over the unmasked samples of one batch, and the prediction and logits of each sample."""
    examples, y, mask = example_batch(prepared)
    ports = {parameter_port(name): value for name, value in prepared.parameters.items()}
    inputs = FlatInputs({**ports, **examples, "y": y, "mask": mask}, dict(prepared.frozen))

    def evaluate(*flat: Tensor) -> tuple[Tensor, ...]:
        values, frozen = inputs.named(flat)
        parameters = {name: values[parameter_port(name)] for name in prepared.parameters}
        with prepared.norms(values["mask"], {name: parameters[name] for name in prepared.tracked}):
            output = model_output(prepared, {**frozen, **parameters}, inputs_among(prepared, values))
        loss_sum = summed_loss(prepared, output, values["y"], values["mask"])
        logits = prepared.app.predicted(output)
        if not prepared.app.num_classes:
            return loss_sum, logits
        return loss_sum, logits.argmax(dim=-1).to(torch.int32), logits

    with _evaluating(prepared.module):
        program = trace_flat(
            f"{prepared.what}: the evaluation for {forms.graph_format}",
            prepared.module,
            evaluate,
            inputs,
            forms.for_training(prepared.app.decompositions),
        )
    outputs = ["loss_sum", "predicted", *(["logits"] if prepared.app.num_classes else [])]
    return Traced(program=program, examples=inputs.examples, inputs=inputs.names, outputs=outputs)


def trace_infer(prepared: Prepared, batch_size: int = 0) -> Traced:
    """Trace the module for ``batch_size`` samples, or for any number of them (0).

    Parameters stay inputs, so that nothing is folded into them. Raises UnsupportedModel.
    """
    names = list(prepared.parameters)
    num = batch_size or max(prepared.app.batch_size, MIN_TRACE_BATCH)
    inputs = prepared.app.examples(num)
    examples = [*prepared.parameters.values(), *inputs.values()]
    batch = None if batch_size else {0: Dim("batch")}
    dynamic = ((*(None for _ in names), *(batch for _ in inputs)),)
    what = f"{prepared.what}: the inference"
    with (
        _evaluating(_Infer(prepared, names)) as infer,
        torch.no_grad(),
        quiet_weights(),
        recorded_origins(prepared.module),
    ):

        def export(dynamic_shapes: tuple[object, ...] | None) -> ExportedProgram:
            program = torch.export.export(infer, tuple(examples), dynamic_shapes=dynamic_shapes, strict=False)
            return without_writes(with_plain_attention(program))

        try:
            program = guarded(what, prepared.module, lambda: export(dynamic))
        except FixedBatch:
            try:
                with free_lengths():
                    program = guarded(what, prepared.module, lambda: export(dynamic))
            except FixedBatch as exc:
                raise constant_batch(what, num, exc) from exc
    return Traced(program=program, examples=examples, inputs=[*names, *inputs], outputs=["logits"])


@contextmanager
def free_lengths() -> Iterator[None]:
    """Let ``len(x)`` be the size of a tensor in a trace whose number of samples is free; Python accepts an int only."""
    length = builtins.len

    def free(value: Sized) -> int:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else length(value)

    builtins.len = free
    try:
        yield
    finally:
        builtins.len = length


@contextmanager
def _evaluating(module: Module) -> Iterator[Module]:
    """Set evaluation mode, and restore the modes afterwards: the module is traced again for another format."""
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        with plain_kernels(), refused():
            yield module
    finally:
        for layer, training in modes.items():
            layer.training = training


class _Infer(torch.nn.Module):
    """The module with its parameters as arguments."""

    def __init__(self, prepared: Prepared, names: Sequence[str]) -> None:
        super().__init__()
        self._prepared, self._names = prepared, names
        self._inner = prepared.module

    def forward(self, *flat: Tensor) -> Tensor:
        num = len(self._names)
        inputs = dict(zip(self._prepared.app.inputs, flat[num:], strict=True))
        values = dict(zip(self._names, flat[:num], strict=True))
        with self._prepared.norms(torch.ones(1), {name: values[name] for name in self._prepared.tracked}):
            output = model_output(self._prepared, values, inputs)
        return self._prepared.app.predicted(output)


def inputs_among(prepared: Prepared, values: Tensors) -> Tensors:
    """Return the model's inputs among the inputs of a graph."""
    return {name: values[name] for name in prepared.app.inputs}


def model_output(prepared: Prepared, values: Tensors, inputs: Tensors) -> Output:
    """Call the module with these parameters. Raises Untraceable if its output has another form than logits."""
    app = prepared.app
    with NoReading(), FixedShapes():
        output = call_with(prepared.module, values, *arguments_of(prepared.module, inputs))
    return check_output(app, picked(f"App {app.name}", app.place(), output, app.output))


def summed_loss(prepared: Prepared, output: Output, y: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the loss over the unmasked samples. Raises Untraceable if the loss has another shape."""
    with NoReading(), FixedShapes():
        return sum_of(prepared.app.loss, mask, loss_values_of(prepared, output, y, mask))

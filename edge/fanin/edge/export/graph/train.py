"""The train step as one functional graph: forward, loss, backward and optimizer, with every input and output named.

Autograd is traced too (``make_fx`` over ``torch.autograd``). The result is one list of plain operators without state,
so any inference runtime can train. It is traced once for each graph format, because the runtimes of one format have
operators that those of the other lack.
"""

import torch
from torch import Tensor

from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors, clipped, setting_tensors
from fanin.edge.export.graph.attention import PlainAttention
from fanin.edge.export.graph.decompositions.tables import Forms
from fanin.edge.export.graph.examples import example_batch
from fanin.edge.export.graph.forward import inputs_among, model_output, summed_loss
from fanin.edge.export.graph.traced import FlatInputs, Traced, disable_inplace, gradients_of, trace_flat
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.export.module.frozen_norms import FoldedNorms
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.runtimes.graphs import PROXIMAL_WEIGHT, SETTING_PREFIX, STEP, next_port, parameter_port, state_port


def trace_train(prepared: Prepared, forms: Forms) -> Traced:
    """Trace the train step: one optimizer step on one masked batch.

    Args:
        prepared: The App.
        forms: The decompositions of a graph format.

    Raises:
        UnsupportedModel: The step cannot be traced.
    """
    draws = prepared.draws
    disable_inplace(prepared.module)
    recipe, learned = prepared.app.recipe, prepared.learned
    names = list(prepared.parameters)
    states = [(state, name) for state in recipe.optimizer.states for name in learned]
    kept_ports = [*map(parameter_port, names), *(state_port(*pair) for pair in states)]
    random = dict(zip([port.name for port in draws], values_of(draws, 0, 0), strict=True))
    inputs = FlatInputs(_train_inputs(prepared) | random, dict(prepared.frozen))

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        values, frozen = inputs.named(flat)
        with fixed_draws(draws, [values[port.name] for port in draws]):
            loss, gradients, tracked = _gradients(prepared, values, frozen)
        # A norm that the forward did not call keeps its statistics.
        moved = {name: values[parameter_port(name)] for name in prepared.tracked} | tracked
        following: Tensors = {}
        for name in learned:
            parameter = values[parameter_port(name)]
            if name in prepared.unused:
                moved[name] = parameter
                following |= {
                    port: values[port] for state in recipe.optimizer.states for port in [state_port(state, name)]
                }
                continue
            value, kept = recipe.optimizer.move(
                _flat(parameter),
                _flat(gradients[name]),
                {state: _flat(values[state_port(state, name)]) for state in recipe.optimizer.states},
                StepInputs(
                    learning_rate=_scaled(values["learning_rate"], prepared.rates[name]),
                    step=values.get(STEP),
                    settings={each: values[SETTING_PREFIX + each] for each in recipe.optimizer.setting_inputs},
                ),
            )
            moved[name] = _shaped(value, parameter.shape)
            following |= {state_port(state, name): _shaped(tensor, parameter.shape) for state, tensor in kept.items()}
        return (*(moved[name] for name in names), *(following[state_port(*pair)] for pair in states), loss)

    return Traced(
        program=trace_flat(
            f"{prepared.what}: the train step for {forms.graph_format}",
            prepared.module,
            step,
            inputs,
            forms.for_training(prepared.app.decompositions),
        ),
        examples=inputs.examples,
        inputs=inputs.names,
        outputs=[*map(next_port, kept_ports), "loss"],
    )


def _flat(value: Tensor) -> Tensor:
    """Flatten a tensor whose last dimension is 1: runtimes broadcast the learning rate over it value by value."""
    return value.flatten() if value.dim() > 1 and value.shape[-1] == 1 else value


def _scaled(rate: Tensor, factor: float) -> Tensor:
    return rate if factor == 1.0 else rate * factor


def _shaped(value: Tensor, shape: torch.Size) -> Tensor:
    return value if value.shape == shape else value.reshape(shape)


def _train_inputs(prepared: Prepared) -> Tensors:
    """Return example inputs of the train step by name."""
    recipe, learned = prepared.app.recipe, prepared.learned
    examples, y, mask = example_batch(prepared)
    inputs = {parameter_port(name): value for name, value in prepared.parameters.items()}
    for state in recipe.optimizer.states:
        inputs |= {state_port(state, name): torch.zeros_like(value) for name, value in learned.items()}
    if recipe.proximal:
        inputs |= {state_port("anchor", name): value.clone() for name, value in learned.items()}
    if recipe.scaffold:
        inputs |= {state_port("control", name): torch.zeros_like(value) for name, value in learned.items()}
    inputs |= {**examples, "y": y, "mask": mask, "learning_rate": torch.tensor(0.1)}
    if recipe.optimizer.counts_steps:
        inputs[STEP] = torch.tensor(1.0)
    if recipe.proximal:
        inputs[PROXIMAL_WEIGHT] = torch.tensor(0.0)
    return inputs | {SETTING_PREFIX + name: value for name, value in setting_tensors(recipe.optimizer).items()}


def _gradients(prepared: Prepared, inputs: Tensors, frozen: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    """Return (mean loss, gradients, next running statistics) of one masked batch."""
    recipe, mask = prepared.app.recipe, inputs["mask"]
    statistics = {name: inputs[parameter_port(name)] for name in prepared.tracked}

    def mean_loss(values: Tensors) -> tuple[Tensor, Tensors]:
        with FoldedNorms(), PlainAttention(), prepared.norms(mask, statistics) as norms:
            output = model_output(prepared, {**frozen, **statistics, **values}, inputs_among(prepared, inputs))
        total = summed_loss(prepared, output, inputs["y"], mask)
        return total / mask.sum().clamp(min=1.0), norms.following

    learned = {name: inputs[parameter_port(name)] for name in prepared.learned}
    gradients, loss, tracked = gradients_of(mean_loss, learned)
    if recipe.proximal:
        pull = inputs[PROXIMAL_WEIGHT]
        gradients = {
            name: gradient + pull * (learned[name] - inputs[state_port("anchor", name)])
            for name, gradient in gradients.items()
        }
    gradients = clipped(gradients, recipe.clip_norm)
    if recipe.scaffold:
        gradients = {name: gradient + inputs[state_port("control", name)] for name, gradient in gradients.items()}
    return loss, gradients, tracked

"""The passes of a training: what each of them trains, from which parameters, and towards which anchor.

Most trainings have one pass. With ``training.personal_epochs`` there is another one before it, for what stays:

    FedRep    1. personal parameters, the shared ones fixed       2. shared parameters, the personal ones fixed
    Ditto     1. the device's copy v of all parameters, on        2. all parameters w, as without Ditto
                 loss + lambda / 2 ||v - w||^2

where w are the parameters of the Version. Each pass begins with a new state of the optimizer. The draws of the first
pass have a seed of their own, so that Ditto's second one has the same bits as without it.

Reference:
    FedRep: Collins et al. 2021, arXiv 2102.07078, algorithm 1.
    Ditto: Li et al. 2021, arXiv 2012.04221, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fanin.clients.device.models import OpenedModel, keeps_copy
from fanin.clients.device.training.resuming import NO_STATE, PartialTraining
from fanin.clients.device.training.work import PlannedWork
from fanin.edge.runtimes.base import PERSONAL, SHARED, StepSettings, TrainStep
from fanin.edge.runtimes.graphs import CONTROL, control_ports
from fanin.edge.runtimes.randomness import random_key
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput

PERSONAL_STREAM: Final = 0x706572736F6E616C
"""Separates the draws of the first pass from those of the training of the Update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """One pass of a training.

    Attributes:
        assignment: The Assignment, with the epochs, the seed and the proximal weight of the pass.
        settings: The settings of its first step.
        start: The parameters that it starts from (num_model_values,); None for those after the pass before.
    """

    assignment: m.Assignment
    settings: StepSettings
    start: Float32s | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The steps of a pass, and where they are among those of all passes.

    Attributes:
        num_steps: Steps of the pass that the device does.
        planned: Steps of all its epochs.
        per_epoch: Steps of an epoch.
        before: Steps of the passes before.
        total: Steps of all passes.
        num_epochs: Epochs of all passes.
    """

    num_steps: int
    planned: int
    per_epoch: int
    before: int
    total: int
    num_epochs: int

    def progress(self, num_steps: int) -> m.TrainingProgress:
        """Return the progress after this number of steps of the pass."""
        done = self.before + num_steps
        return m.TrainingProgress(
            step=done,
            num_steps=max(self.total, done),
            epoch=min(done // self.per_epoch + 1, self.num_epochs),
            num_epochs=self.num_epochs,
        )


def extents_of(works: Sequence[PlannedWork], num_steps: int) -> tuple[Extent, ...]:
    """Return the steps of each pass. A device does the same share of each, and at least one step.

    Args:
        works: The complete work of each pass.
        num_steps: Steps of the last pass that the device does.
    """
    last = works[-1].num_steps
    # The nearest whole number, halves up.
    steps = [max((2 * work.num_steps * num_steps + last) // (2 * last), 1) for work in works]
    return tuple(
        Extent(
            num_steps=steps[number],
            planned=work.num_steps,
            per_epoch=work.num_steps // work.num_epochs,
            before=sum(steps[:number]),
            total=sum(steps),
            num_epochs=sum(each.num_epochs for each in works),
        )
        for number, work in enumerate(works)
    )


def begin_pass(step: TrainStep, part: TrainingPass, number: int, before: PartialTraining) -> PartialTraining:
    """Return the training at the begin of a pass, or within it if it resumes.

    Args:
        step: The train step.
        part: The pass.
        number: The number of passes before it.
        before: The training as it was saved, or at the end of the pass before.
    """
    start = part.start
    if before.num_passes == number:
        if before.state is not NO_STATE:
            return before
        assert start is not None, "the first pass has a start"
        return replace(before, state=step.begin(start))
    parameters = before.state.parameters
    return replace(
        before,
        state=step.begin(parameters if start is None else start),
        loss_sum=0.0,
        num_passes=number,
        own=NO_STATE.parameters if start is None else parameters,
    )


def passes_of(model: OpenedModel, assignment: m.Assignment, partition: int) -> tuple[TrainingPass, ...]:
    """Return the passes of an Assignment, in their order. The last one trains what the Update sends.

    Raises:
        InvalidInput: The stages set other inputs than those of the train graph.
    """
    initial, training = model.values(), assignment.training
    settings = StepSettings(
        learning_rate=training.learning_rate,
        proximal_weight=training.proximal_weight,
        anchor=initial,
        control=control_of(model),
        random_key=random_key(training.seed, partition, assignment.round),
        optimizer=training.optimizer,
    )
    has_copy = keeps_copy(model.bundle, training)
    if not training.personal_epochs or (model.bundle.manifest.local is None and not has_copy):
        return (TrainingPass(assignment=assignment, settings=settings, start=initial),)
    own = replace(
        training,
        epochs=training.personal_epochs,
        seed=training.seed ^ PERSONAL_STREAM,
        proximal_weight=training.ditto_weight if has_copy else training.proximal_weight,
    )
    first = TrainingPass(
        assignment=replace(assignment, training=own),
        settings=replace(
            settings,
            proximal_weight=own.proximal_weight,
            # It corrects the drift of the parameters that are averaged.
            control=None,
            random_key=random_key(own.seed, partition, assignment.round),
            group="" if has_copy else PERSONAL,
        ),
        start=model.kept_values(training) if has_copy else initial,
    )
    if has_copy:
        return first, TrainingPass(assignment=assignment, settings=settings, start=initial)
    return first, TrainingPass(assignment=assignment, settings=replace(settings, group=SHARED), start=None)


def control_of(model: OpenedModel) -> Float32s | None:
    """Return the values that the stages add to the gradient; None without such a stage. Raises InvalidInput."""
    if set(model.inputs) - {CONTROL}:
        raise InvalidInput(
            f"stages: got the inputs {sorted(model.inputs)} for the train graph, expected at most {CONTROL!r}; correct "
            "the stage",
            code="FN-0839",
        )
    manifest = model.bundle.manifest
    if model.inputs and not control_ports(manifest.table, manifest.signatures["train"].inputs):
        raise InvalidInput(
            f"stages: got the input {CONTROL!r}, but the bundle's train graph has no inputs {CONTROL}.<p>; export the "
            "App with Recipe(scaffold=True)",
            code="FN-0840",
        )
    control, local = model.inputs.get(CONTROL), manifest.local
    if control is None or local is None:
        return control
    # No other device has personal parameters like these, so nothing corrects their gradients.
    return manifest.join(control, np.zeros(local.table.num_values, np.float32))

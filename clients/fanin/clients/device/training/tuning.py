"""Fine-tuning: a device trains the last Version of a Run for itself, and sends nothing.

    last Version -> train graph, some epochs over the device's own examples -> parameters of this device alone

With Ditto it starts from the device's copy of all parameters.

It is a training like that of a Round, with the Plan's optimizer and without stages, a proximal term and a schedule of
the learning rate. So it resumes after a kill, and runs in every runtime and engine. The seed of its draws is (seed,
partition, Round), where the Round is the number of the Version plus one.

Reference:
    Wang et al. 2019, Federated Evaluation of On-device Personalization, arXiv 1910.10252, section 3. Yu et al. 2020,
    Salvaging Federated Learning by Local Adaptation, arXiv 2002.04758, section 3.1 (FT).
"""

from dataclasses import dataclass, replace

import numpy as np

from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.protos.numbers import is_number
from fanin.protos.plans import MAX_EPOCHS, MAX_RATE, CodecSpec, Training
from fanin.protos.plans.sections import MIN_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """How a device fine-tunes the last Version.

    Attributes:
        epochs: Epochs over its training examples, at least 1.
        learning_rate: Learning rate of all steps; None: that of the Plan.

    Raises:
        InvalidInput: A value is out of its range.
    """

    epochs: int
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        epochs: object = self.epochs
        if not isinstance(epochs, int) or isinstance(epochs, bool) or not 1 <= epochs <= MAX_EPOCHS:
            raise InvalidInput(
                f"fine-tuning: got {self.epochs!r} epochs, expected a whole number from 1 to {MAX_EPOCHS}",
                code="FN-1836",
            )
        rate = self.learning_rate
        if rate is not None and not (is_number(rate) and MIN_RATE <= rate <= MAX_RATE):
            raise InvalidInput(
                f"fine-tuning: got the learning rate {rate!r}, expected a number above 0, or none for the plan's",
                code="FN-1836",
            )

    def training(self, plan: Training) -> Training:
        """Return the settings of this fine-tuning from those of a Plan. Raises InvalidInput without a learning rate."""
        rate = plan.learning_rate if self.learning_rate is None else self.learning_rate
        if not rate:
            raise InvalidInput(
                "fine-tuning: got no learning rate, and the plan has none, expected one; set it",
                code="FN-1836",
            )
        return replace(
            plan,
            epochs=self.epochs,
            learning_rate=float(rate),
            proximal_weight=0.0,
            personal_epochs=0,
            ditto_weight=0.0,
            warmup_steps=0,
            step_decay="",
            min_work=0.0,
            schedule_rounds=0,
        )

    def assignment(self, publication: m.Publication, plan: Training) -> m.Assignment:
        """Return the work of this fine-tuning from a Version. No coordinator knows this Assignment.

        Args:
            publication: Names the Version.
            plan: The settings of the Plan.
        """
        version = publication.version
        return m.Assignment(
            assignment_id=f"fine-tuning.{version.epoch}.{version.number}",
            run_id=publication.run_id,
            round=version.number + 1,
            bundle=publication.bundle,
            version=version,
            grid=(),
            codec=CodecSpec(name="fixed32", max_shift=0),
            training=self.training(plan),
        )


def start_of(model: OpenedModel) -> OpenedModel:
    """Return the model that a fine-tuning trains: with Ditto, the device's copy is in the place of the Version."""
    if model.local is None or model.bundle.manifest.local is not None:
        return model
    return replace(model, parameters=model.local, local=None)


def tuned(model: OpenedModel, change: Change) -> OpenedModel:
    """Return the model of a device after its training: the Version plus the change, and the new personal parameters."""
    parameters = np.add(model.parameters, change.values, dtype=np.float32)
    return replace(model, parameters=parameters, local=change.local, inputs={}, saved=None)

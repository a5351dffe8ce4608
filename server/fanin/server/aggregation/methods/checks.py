"""The parts of a Plan that belong together, and those that an algorithm excludes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from fanin.edge.codecs.methods.feddyn import FEDDYN
from fanin.edge.codecs.methods.fednova import FEDNOVA
from fanin.edge.codecs.methods.qfedavg import QFEDAVG
from fanin.edge.codecs.scaffold import SCAFFOLD
from fanin.edge.codecs.stage import Stage, WeighingStage
from fanin.edge.codecs.stages import EVALUATE_ONLY
from fanin.edge.runtimes.evaluations import OF_MODELS
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import BY_EXAMPLES, Plan
from fanin.protos.plans.keys import shown

PARTS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        FEDNOVA: MappingProxyType({"rule": FEDNOVA}),
        QFEDAVG: MappingProxyType({"rule": QFEDAVG, "outer_optimizer": "fedavg"}),
        FEDDYN: MappingProxyType({"rule": "weighted_mean", "outer_optimizer": FEDDYN}),
    }
)
"""The keys of ``[aggregation]`` that the stage of an algorithm needs."""
EXCLUDED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        FEDNOVA: (SCAFFOLD, FEDDYN, QFEDAVG),
        QFEDAVG: (SCAFFOLD, FEDDYN, FEDNOVA),
        FEDDYN: (SCAFFOLD, FEDNOVA, QFEDAVG),
    }
)
"""The stages that the stage of an algorithm excludes: they would read the change that it has scaled, or both would set
the control input of the train graph."""


def check_methods(plan: Plan) -> None:
    """Raise InvalidPlan for parts of an algorithm without the others, and for stages that exclude each other."""
    names = [stage.name for stage in plan.stages]
    for stage, keys in PARTS.items():
        for key, expected in keys.items():
            value = getattr(plan.aggregation, key)
            if stage in names and value != expected:
                raise InvalidPlan(
                    f"plan: got the stage {shown(stage)} with aggregation.{key} {shown(value)}, expected "
                    f"{shown(expected)}: both are parts of one algorithm; change the key, or remove the stage",
                    code="FN-1813",
                )
            if stage not in names and value == stage:
                raise InvalidPlan(
                    f"plan: got aggregation.{key} {shown(value)} without the stage {shown(stage)}, expected both: they "
                    "are parts of one algorithm; add the stage, or change the key",
                    code="FN-1813",
                )
        others = [name for name in names if name in EXCLUDED[stage]]
        if stage in names and others:
            raise InvalidPlan(
                f"plan: stages: got {shown(stage)} with {shown(others[0])}, expected one of them: both change the same "
                "numbers; remove one",
                code="FN-1814",
            )
    if FEDDYN in names:
        _check_alpha(plan, [change.proximal_weight for change in plan.schedule])


def check_weights(plan: Plan, stages: Mapping[str, Stage]) -> None:
    """Raise InvalidPlan for weights of the Plan with a stage whose algorithm weighs the Updates itself.

    FedNova scales the mean by the devices' norms, which are weighted by examples. A stage with a weighting has the same
    weight for each device, so the weights of the Plan would not count.
    """
    weighing = [name for name, stage in stages.items() if name in PARTS or isinstance(stage, WeighingStage)]
    if weighing and plan.aggregation.weights != BY_EXAMPLES:
        raise InvalidPlan(
            f"plan: got aggregation.weights {shown(plan.aggregation.weights)} with the stage {shown(weighing[0])}, "
            f"expected {shown(BY_EXAMPLES)}: the algorithm defines the weight of each device itself; remove "
            "aggregation.weights, or the stage",
            code="FN-1817",
        )


def _check_alpha(plan: Plan, changes: Sequence[float | None]) -> None:
    """Raise InvalidPlan unless FedDyn's alpha is above 0, and the same in all Rounds."""
    weight = plan.training.proximal_weight
    if not weight or {*changes} - {None, weight}:
        raise InvalidPlan(
            f"plan: got the stage {shown(FEDDYN)} with training.proximal_weight {weight:g} and the changes "
            f"{[each for each in changes if each is not None]}, expected one weight above 0 in all Rounds: it is "
            "alpha, by which all states are scaled; set training.proximal_weight",
            code="FN-1815",
        )


def check_personal(what: str, plan: Plan, *, has_local: bool, has_proximal: bool) -> None:
    """Raise InvalidPlan if devices have nothing of their own to train or to measure, or two such things.

    Args:
        what: The Run or the command, for errors.
        plan: The Plan.
        has_local: Whether the Bundle has personal parameters.
        has_proximal: Whether its train graph has FedProx's inputs.
    """
    training = plan.training
    check_measured(what, plan, has_own=has_local or training.ditto_weight > 0.0)
    if training.personal_epochs and not (has_local or training.ditto_weight):
        raise InvalidPlan(
            f"{what}: got training.personal_epochs {training.personal_epochs}, but the bundle has no personal "
            "parameters, and the plan no training.ditto_weight, expected one of them; export the App with "
            "Recipe(local=[...]) for FedRep, or set training.ditto_weight for Ditto",
            code="FN-1830",
        )
    if training.ditto_weight and has_local:
        raise InvalidPlan(
            f"{what}: got training.ditto_weight {training.ditto_weight:g} with a bundle that has personal parameters, "
            "expected one of them: Ditto's copy has all parameters; remove the key, or export the App without "
            "Recipe(local=...)",
            code="FN-1832",
        )
    if training.ditto_weight and not has_proximal:
        raise InvalidPlan(
            f"{what}: got training.ditto_weight {training.ditto_weight:g}, but the train graph has no input for it; "
            "export the App with Recipe(proximal=True)",
            code="FN-1833",
        )


def check_measured(what: str, plan: Plan, *, has_own: bool) -> None:
    """Raise InvalidPlan if statistics compare the Version with models that devices do not have.

    Args:
        what: The Run or the command, for errors.
        plan: The Plan.
        has_own: Whether each device has a model of its own.
    """
    names = [each.name for each in plan.statistics if each.name.startswith(OF_MODELS)]
    if names and (not has_own or EVALUATE_ONLY in {stage.name for stage in plan.stages}):
        raise InvalidPlan(
            f"{what}: got the statistic {shown(names[0])}, but devices have no model of their own in this run, "
            "expected personal parameters in the bundle or training.ditto_weight, and a run that trains; remove the "
            "statistic, or export the App with Recipe(local=[...])",
            code="FN-1818",
        )

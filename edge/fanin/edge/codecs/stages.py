"""The stages that a Plan may name, and the layout of the vectors that they make; the stage ``error_feedback``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.methods.feddyn import FEDDYN, FedDyn
from fanin.edge.codecs.methods.fednova import FEDNOVA, FedNova
from fanin.edge.codecs.methods.qfedavg import QFEDAVG, QFedAvg
from fanin.edge.codecs.pipeline import check_mapping, read_only
from fanin.edge.codecs.scaffold import SCAFFOLD, Scaffold
from fanin.edge.codecs.stage import CountingStage, GroupStage, Stage, StageContext, State, WeighingStage
from fanin.edge.codecs.vector import MAIN, PARAMETERS, Group, Vector, VectorLayout
from fanin.edge.ranges import RANGES
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages.versions import MAX_AUXILIARY
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans import StageSpec
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import Choice, blamed, check_names, created, wrong_object

RESIDUAL: Final = "residual"
NUM_TRIED: Final = 4
"""Parameters with which a stage is asked for the inputs that it sets."""


class ErrorFeedback:
    """The stage ``error_feedback``: the codec's error in an Update is added to the next one.

    Without it, a coarse codec loses every part of a change that stays below its step. With it, such parts add up on the
    device until the codec sends them. The state is the residual: the accumulated error of the codec.

    Reference:
        Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, arXiv 1901.09847,
        algorithm 2. Seide et al. 2014, 1-Bit Stochastic Gradient Descent, section 2.
    """

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``."""
        return (RESIDUAL,)

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        target = (vector[PARAMETERS].astype(np.float64) + state[RESIDUAL]).astype(np.float32)
        decoded = context.send({**vector, PARAMETERS: target})
        return {RESIDUAL: (target - decoded[PARAMETERS]).astype(np.float32)}


EVALUATE_ONLY: Final = "evaluate_only"


class EvaluateOnly:
    """The stage ``evaluate_only``: no change leaves the device, whatever its trainer made. So each Version of the Run
    has the parameters of Version 0, and its statistics are those of one Version on the devices of a Round.

    A trainer over graphs evaluates and does not train.
    """

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``."""
        return ()

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        context.send({name: np.zeros_like(values) for name, values in vector.items()})
        return state


FIRST: Final = (GroupStage, CountingStage)
"""Kinds of stages that read the change as the training left it."""
GROUP: Final = "fanin.stages"
"""The entry point group of stages in other distributions. An entry is a function of options."""
StageFactory = Callable[..., Stage]
"""Returns a stage for the options of the Plan."""
STAGES: Final[Mapping[str, StageFactory]] = MappingProxyType(
    {
        "error_feedback": ErrorFeedback,
        SCAFFOLD: Scaffold,
        FEDNOVA: FedNova,
        QFEDAVG: QFedAvg,
        FEDDYN: FedDyn,
        EVALUATE_ONLY: EvaluateOnly,
    }
)
"""The stages of fanin, by name."""


def stages_of(specs: Sequence[StageSpec]) -> Mapping[str, Stage]:
    """Return the stages of a Plan or an Assignment by name, in their order.

    Raises:
        InvalidPlan: A stage is not installed or is no stage, its options are wrong, or the order is.
    """
    stages: dict[str, Stage] = {}
    for spec in specs:
        stage = _stage_of(spec)
        if isinstance(stage, FIRST) and not all(isinstance(each, FIRST) for each in stages.values()):
            raise InvalidPlan(
                f"plan: stages: got {spec.name!r} after {next(reversed(stages))!r}, expected it before: it reads the "
                "change as the training left it; move it to the front",
                code="FN-0221",
            )
        stages[spec.name] = stage
    return stages


def _stage_of(spec: StageSpec) -> Stage:
    """Return one stage. Its factory may be the code of another package. Raises InvalidPlan."""
    where = f"stages: {spec.name}"
    choice = Choice(key="stages", name=spec.name, options_key=f"{where}: options", options=spec.options)

    def checked(stage: Stage, _where: str) -> Stage:
        check_members(stage, f"plan: {where}")
        return stage

    return created(choice, STAGES, GROUP, checked=checked)


def check_members(stage: object, where: str) -> None:
    """Check the members of a stage that name something.

    Args:
        stage: The stage.
        where: Begins the error message.

    Raises:
        InvalidPlan: This is no instance of a stage, or ``tensors`` or ``groups`` have another form.
    """
    if isinstance(stage, type) or not isinstance(stage, Stage):
        raise wrong_object(where, stage, "an object with the members of Stage")
    check_names(f"{where}: tensors", stage.tensors)
    if isinstance(stage, GroupStage):
        groups: object = stage.groups
        if not isinstance(groups, tuple | list) or not all(isinstance(each, Group) for each in groups):
            raise InvalidPlan(
                f"{where}: groups: got {shown(groups)}, expected a tuple of Group; correct it", code="FN-0214"
            )


def added_groups(stages: Mapping[str, Stage]) -> tuple[Group, ...]:
    """Return the groups that stages add to a vector, in their order. Each has an auxiliary tensor of its name."""
    return tuple(group for stage in stages.values() if isinstance(stage, GroupStage) for group in stage.groups)


def inputs_of(stages: Mapping[str, Stage]) -> Mapping[str, str]:
    """Return the stage that sets each input of the train graph, by the kind of the input.

    A stage is asked for the inputs of a few parameters at zero. The name of a group says nothing about them.

    Raises:
        InvalidPlan: A stage raised an error, or returned no mapping.
    """
    zeros = np.zeros(NUM_TRIED, np.float32)
    downlink = read_only({group.name: zeros for group in added_groups(stages)})
    owners: dict[str, str] = {}
    for name, stage in stages.items():
        if not isinstance(stage, GroupStage):
            continue
        with blamed(f"plan: stages: {name!r}: prepare", "correct it"):
            inputs: object = stage.prepare(read_only(dict.fromkeys(stage.tensors, zeros)), downlink)
            check_mapping(name, "returned", inputs, "a mapping of the inputs of the train graph")
        owners |= dict.fromkeys(inputs if isinstance(inputs, Mapping) else (), name)
    return owners


def added_statistics(stages: Mapping[str, Stage]) -> tuple[str, ...]:
    """Return the names of the statistics that stages add to an Update, in their order."""
    return tuple(name for stage in stages.values() if isinstance(stage, CountingStage) for name in stage.statistics)


def layout_of(table: TensorTable, stages: Mapping[str, Stage]) -> VectorLayout:
    """Return the layout of the vectors of a Run.

    Raises:
        InvalidPlan: Two stages add a group of the same name, there are too many, or a name has another form.
    """
    names = [group.name for group in added_groups(stages)]
    if len(names) >= MAX_AUXILIARY or not all(map(is_name, names)) or RANGES in names:
        raise InvalidPlan(
            f"plan: stages: got the groups {names}, expected at most {MAX_AUXILIARY - 1}, each {NAME_FORM}, and none "
            f"with the name {RANGES!r}; remove a stage",
            code="FN-0221",
        )
    try:
        weightings = [stage.weighting for stage in stages.values() if isinstance(stage, WeighingStage)]
        main = replace(MAIN, weighting=weightings[0]) if weightings else MAIN
        return VectorLayout(table=table, groups=(main, *added_groups(stages)))
    except ValueError as exc:
        raise InvalidPlan(f"plan: stages: {exc}; remove a stage", code="FN-0221") from exc

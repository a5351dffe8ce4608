"""Evaluation of a Version on devices, before it is used: a canary.

An evaluation Run has the Bundle of another Run and one of its Versions as Version 0. Its Plan has the stage
``evaluate_only``, so devices measure this Version on their validation parts and send no change. The other Run is not
changed, and the Versions of this one have the parameters of the canary, to the last bit.

A metric of a Plan is the mean over the validation examples of the devices that determine it. The recall of a class that
a device lacks is None, and leaves that device out. If it is None on each device, so is the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fanin.clients.operator import Operator
from fanin.clients.planfile import Override, parse_plan
from fanin.clients.versions import fetch_version
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.codecs.stages import EVALUATE_ONLY
from fanin.edge.metrics.metric import INT8
from fanin.edge.runtimes.evaluations import METRIC_UNIT, OF_VALIDATION
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunInfo, VersionPublished
from fanin.protos.plans import Plan

CANARY_PLAN: Final = f"""\
name = "evaluation"
bundle = "of the version"
stages = [{{{{ name = "{EVALUATE_ONLY}" }}}}]
statistics = [{{statistics}}]

[cohort]
concurrency = {{num_devices}}

[codec]
name = "int8"
max_shift = 0

[aggregation]
max_examples = 16777216

[stop]
max_rounds = 1
"""
"""The Plan of an evaluation. Its Updates are zero, so a small payload is enough. Masks need the limit of examples."""
MAX_BITS: Final = 56
SUM_BITS: Final = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The evaluation of a Version by devices.

    Attributes:
        run_id: The evaluation Run.
        num_devices: Devices whose Updates are in it.
        num_examples: Their validation examples.
        values: The metrics by name; None for one that no device determines.
        examples: The validation examples of the devices that determine each declared metric.
    """

    run_id: str
    num_devices: int
    num_examples: int
    values: dict[str, float | None]
    examples: dict[str, int]


def evaluation_plan(num_devices: int, metrics: Sequence[str] = (), overrides: Sequence[str | Override] = ()) -> Plan:
    """Return the Plan of an evaluation.

    Args:
        num_devices: Devices that evaluate.
        metrics: Metrics of devices, such as ``macro_f1`` or ``recall_3``. Each is computed of both models.
        overrides: Keys that replace those of ``CANARY_PLAN``.

    Raises:
        InvalidPlan: A key is unknown or has a wrong value.
    """
    bound = min(1 << MAX_BITS, (1 << SUM_BITS) // max(num_devices, 1))
    names = [f"{OF_VALIDATION}{name}{suffix}" for name in metrics for suffix in ("", INT8)]
    rows = ", ".join(f'{{ name = "{name}", unit = "2^-16", bound = {bound} }}' for name in names)
    text = CANARY_PLAN.format(statistics=rows, num_devices=num_devices)
    return parse_plan(text, "the plan of the evaluation", overrides).plan


def start_evaluation(
    operator: Operator, run_id: str, source: tuple[str, int | None], plan: Plan, publisher: SigningKey
) -> RunInfo:
    """Start the evaluation of a Version. A repeated call with the same arguments starts no second Run.

    Args:
        operator: The connection.
        run_id: The id of the evaluation Run.
        source: The Run and the number of the Version; None for its newest.
        plan: The Plan (``evaluation_plan``).
        publisher: The key that signed the Bundle.
    """
    fetched = fetch_version(operator, *source, publisher.public)
    return operator.start_run(run_id, plan, fetched.bundle, publisher, fetched.version.parameters)


def read_evaluation(operator: Operator, run_id: str) -> CanaryResult:
    """Return the evaluation by the devices of an evaluation Run's last Round, once the Run rests.

    Raises:
        InvalidInput: No Round has closed, or no device has a validation part.
        NotFound: There is no such Run.
    """
    events = [entry.event for entry in operator.watch(run_id)]
    rounds = [event for event in events if isinstance(event, VersionPublished) and event.evaluation is not None]
    info = operator.run(run_id)
    if not rounds or info.plan is None:
        raise InvalidInput(
            f"run {run_id}: got no evaluation by devices ({info.state.value} {info.reason}), expected a closed round; "
            "join devices with --validation above 0",
            code="FN-1871",
        )
    last = rounds[-1]
    quality = last.evaluation
    assert quality is not None, "these Rounds have one"
    values: dict[str, float | None] = {"loss": quality.loss}
    if quality.has_labels:
        values |= {"accuracy": quality.accuracy_float, "accuracy_int8": quality.accuracy_int8}
    examples = {}
    for statistic in info.plan.statistics:
        name, num = statistic.name.removeprefix(OF_VALIDATION), last.statistics_examples.get(statistic.name, 0)
        values[name] = last.statistics[statistic.name] / METRIC_UNIT / num if num else None
        examples[name] = num
    return CanaryResult(
        run_id=run_id,
        num_devices=sum(last.runtimes.values()),
        num_examples=quality.num_examples,
        values=values,
        examples=examples,
    )

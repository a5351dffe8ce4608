"""What leaves the machine of a device, and what never does: sentences for its owner.

The sentences are generated from the messages that a device can send and from the Assignment. A test compares the fields
of the messages with those that are described here, so a new field cannot leave without a sentence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Final

from fanin.clients.device.site.record import Leaving
from fanin.protos import messages as m
from fanin.protos.plans import Statistic

UPDATE_FIELDS: Final[Mapping[str, str]] = {
    "payload": "the change of the trained parameters",
    "statistics": "sums over the examples",
    "ranges": "counts of the ranges of activations",
    "telemetry": "facts about the work",
    "shifts": "the scale of the encoded change",
    "codec": "its encoding",
    "format": "its encoding",
    "version_sha256": "the Version that it starts from",
    "assignment_id": "the Assignment",
    "run_id": "the Run",
    "round": "the Round",
}
"""The meaning of each field of an Update."""
STAYS: Final = (
    "The examples and their labels; they are read from {data}",
    "Predictions, and the outputs of each layer",
    "Personal parameters of the model, if it has any",
    "The private key (device.key) and the secret (device.secret) of this device",
)


def names_of(kind: type) -> str:
    """Return the names of the fields of a message."""
    return ", ".join(each.name for each in fields(kind))


def leaving(data: str, assignment: m.Assignment | None) -> Leaving:
    """Return what leaves the machine.

    Args:
        data: Where the examples are, for people.
        assignment: The Assignment under way or the last one; None if there was none yet.
    """
    leaves = [
        "At the enrollment: the token, and the public key of this device",
        f"With each check-in: {names_of(m.CheckIn)}, of which capabilities are {names_of(m.Capabilities)}",
        "With every connection: the network address of this machine",
    ]
    if assignment is None:
        leaves.append("Nothing about the examples until the first Assignment")
    else:
        leaves += _of_assignment(assignment)
    return Leaving(leaves=tuple(leaves), stays=tuple(each.format(data=data or "the app") for each in STAYS))


def _of_assignment(assignment: m.Assignment) -> Iterable[str]:
    stages = ", ".join(stage.name for stage in assignment.stages)
    yield (
        f"Each Update of run {assignment.run_id}: {UPDATE_FIELDS['payload']}, encoded by {assignment.codec.name}"
        f"{f' after the stages {stages}' if stages else ''}. It is computed from the examples and can reveal something "
        "about them (docs/explanation/privacy.md)"
    )
    if assignment.statistics:
        yield f"With it, {UPDATE_FIELDS['statistics']}: {', '.join(map(_statistic, assignment.statistics))}"
    if assignment.range_examples:
        yield f"With it, {UPDATE_FIELDS['ranges']} on at most {assignment.range_examples} examples"
    yield f"With it, {UPDATE_FIELDS['telemetry']}: {names_of(m.Telemetry)}"
    if assignment.progress_s:
        yield f"Every {assignment.progress_s:g} s of a training: {names_of(m.TrainingProgress)}"
    yield f"If the training fails: the text of the error, at most {m.MAX_FAILURE_CHARS} characters"


def _statistic(statistic: Statistic) -> str:
    return f"{statistic.name}{f' ({statistic.unit})' if statistic.unit else ''}"

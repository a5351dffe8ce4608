"""What leaves the machine of a device, and what never does: sentences for its owner.

The sentences are generated from the messages that a device can send and from the Assignment. A test compares the fields
of the messages with those that are described here, so a new field cannot leave without a sentence.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from fanin.clients.device.site.record import Leaving
from fanin.protos import messages as m
from fanin.protos.plans import SECAGG_PROTOCOL, Statistic

UPDATE_FIELDS: Final[Mapping[str, str]] = {
    "payload": "the change of the trained parameters, or the counts that a statistics run asks for",
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
    "Personal parameters of the model, if it has any, and the model that this device fine-tunes, with its quality",
    "The private key (device.key) and the secret (device.secret) of this device",
)


FIELDS: Final[Mapping[type, Mapping[str, str]]] = {
    m.CheckIn: {
        "protocol": "the version of the protocol",
        "fanin_version": "the version of fanin",
        "capabilities": "what this device can run",
        "wait_s": "how long it waits for an answer",
        "served": "the Version that it serves",
        "awaits_end": "whether it waits for the end of a Run to fine-tune",
        "condition": "battery and network (unless fanin join has --no-condition)",
    },
    m.Capabilities: {
        "codecs": "codecs",
        "runtimes": "runtimes with their versions",
        "graph_formats": "formats of graphs",
        "max_download_bytes": "the largest download",
        "stages": "stages of Updates",
        "round_protocols": "protocols of Rounds",
        "reports_progress": "whether it reports progress",
    },
    m.Telemetry: {
        "runtime": "the runtime",
        "train_s": "the seconds of the training",
        "num_steps": "the number of its steps",
        "bytes_downloaded": "the bytes of downloads",
        "bytes_resumed": "those of downloads that were resumed",
        "fanin_version": "the version of fanin",
        "partition": "the number of its part of the data, if it has one",
    },
    m.TrainingProgress: {
        "step": "the step",
        "num_steps": "the number of steps",
        "epoch": "the epoch",
        "num_epochs": "the number of epochs",
    },
}
"""The meaning of each field of the other messages."""
SUMS: Final[Mapping[str, str]] = {
    m.EXAMPLES: "the number of examples",
    m.TRAINED: "those in the training",
    m.TRAIN_LOSS: "their loss",
    m.ROUNDED: "values that encoding rounded to zero",
    m.SATURATED: "values at the end of the range",
    m.EVAL_EXAMPLES: "the number of validation examples",
    m.EVAL_LOSS: "their loss",
    m.EVAL_PREDICTIONS: "their predictions",
    m.EVAL_CORRECT_FLOAT: "the correct ones in float",
    m.EVAL_CORRECT_INT8: "the correct ones in int8",
    m.EVAL_AGREE: "those on which both agree",
}
"""The meaning of the sums of fanin; those of a Plan have their names."""


def fields_text(kind: type) -> str:
    """Return the fields of a message in words."""
    return ", ".join(FIELDS[kind].values())


def leaving(data: str, assignment: m.Assignment | None) -> Leaving:
    """Return what leaves the machine.

    Args:
        data: Where the examples are, for people.
        assignment: The Assignment under way or the last one; None if there was none yet.
    """
    leaves = [
        "At the enrollment: the token, and the public key of this device",
        f"With each check-in: {fields_text(m.CheckIn)}",
        f"What it can run: {fields_text(m.Capabilities)}",
        "With every connection: the network address of this machine",
    ]
    if assignment is None:
        leaves.append("Nothing about the examples until the first Assignment")
    else:
        leaves += _of_assignment(assignment)
    return Leaving(leaves=tuple(leaves), stays=tuple(each.format(data=data or "the app") for each in STAYS))


def _of_assignment(assignment: m.Assignment) -> Iterable[str]:
    if assignment.round_protocol.protocol == SECAGG_PROTOCOL:
        yield from _under_masks(assignment)
        return
    if assignment.privacy is not None:
        yield from _clipped(assignment, assignment.privacy)
        return
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
    yield f"With it, {UPDATE_FIELDS['telemetry']}: {fields_text(m.Telemetry)}"
    if assignment.progress_s:
        yield f"Every {assignment.progress_s:g} s of a training: {fields_text(m.TrainingProgress)}"
    yield "If this device refuses a run by its policy: the values of its floor that the run does not meet"
    yield f"If the training fails: the text of the error, at most {m.MAX_FAILURE_CHARS} characters"


def _under_masks(assignment: m.Assignment) -> Iterable[str]:
    """Yield what leaves in a Round of secure aggregation: docs/howto/secure-aggregation.md lists each field."""
    statistics = ", ".join(map(_statistic, assignment.statistics))
    yield (
        f"Each Update of run {assignment.run_id}, under masks: the coordinator learns the sum of all devices of a "
        "Round, which can reveal something about the examples (docs/explanation/secure-aggregation.md)"
    )
    yield f"With it, under masks: {statistics}"
    yield "Before and after it: keys, sealed shares of secrets, and shares for the sum, which depend on no example"
    yield "With it, in the clear: the runtime and the version of fanin"
    if assignment.progress_s:
        yield f"Every {assignment.progress_s:g} s of a training: that this device works"
    yield "If this device refuses a run by its policy: the values of its floor that the run does not meet"
    yield "If the training fails: the code of the error"


def _clipped(assignment: m.Assignment, terms: m.PrivacyTerms) -> Iterable[str]:
    """Yield what leaves in a Round with differential privacy, where nothing but the change depends on examples."""
    yield (
        f"Each Update of run {assignment.run_id}: {UPDATE_FIELDS['payload']}, clipped to the norm {terms.clip_norm:g}. "
        "The coordinator sees it, and adds noise to the sum of all devices before it publishes anything "
        "(docs/explanation/differential-privacy.md)"
    )
    yield "With it: the weight 1, the runtime, the bytes of downloads, and the version of fanin"
    if terms.bits_noise:
        yield (
            "With it: whether the change was within the norm. The coordinator adds noise to the number of devices that "
            "were, before the norm of the next Round shows it"
        )
    if assignment.progress_s:
        yield f"Every {assignment.progress_s:g} s of a training: that this device works"
    yield "If the training fails: the code of the error"


def _statistic(statistic: Statistic) -> str:
    if statistic.name in SUMS:
        return SUMS[statistic.name]
    return f"{statistic.name}{f' ({statistic.unit})' if statistic.unit else ''}"

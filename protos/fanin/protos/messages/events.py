"""Events in the life of a Run. The coordinator stores them in their wire form and numbers them from 1 on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.fields import OneOf
from fanin.protos.messages.audit import SpentPrivacy
from fanin.protos.messages.principals import Principal
from fanin.protos.messages.runs import Coverage, LiveRound, RunState, RunWarned, SaturatedDevices

MAX_LISTED_DEVICES: Final = 1000
"""Devices that an event lists: 34 kB, of the 4 MiB that gRPC allows for one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    """A Round opened, and devices can be assigned to it."""

    round: int
    base_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """A Round closed: its set of Updates is final.

    ``accepted`` lists the first ``MAX_LISTED_DEVICES`` of the ``num_accepted`` devices, in the order of acceptance,
    because one message must hold the event. ``AcceptedDevices`` has all of them.
    """

    round: int
    num_accepted: int
    accepted: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.accepted) > self.num_accepted:
            raise InvalidInput(
                f"round {self.round}: got {len(self.accepted)} accepted devices, expected at most {self.num_accepted}",
                code="FN-0157",
            )

    @classmethod
    def of_message(cls, *, num_accepted: int, accepted: tuple[str, ...], **number: int) -> "RoundClosed":
        """Return the event of a message. One of an older release lacks ``num_accepted`` and lists all devices."""
        return cls(num_accepted=num_accepted or len(accepted), accepted=accepted[:MAX_LISTED_DEVICES], **number)


def round_closed(round_number: int, accepted: Sequence[str]) -> RoundClosed:
    """Return the event of a Round that accepted the Updates of these devices, in this order."""
    return RoundClosed(round=round_number, num_accepted=len(accepted), accepted=tuple(accepted[:MAX_LISTED_DEVICES]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """A Round ended without a Version.

    ``others_wait``: Updates were missing, but enough other devices for a quorum waited. Such a failure does not count
    towards the failure of the Run.
    """

    round: int
    reason: str
    others_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesGone:
    """Devices were silent for so long that the Round no longer waits for them.

    ``device_ids`` lists the first ``MAX_LISTED_DEVICES`` of them.
    """

    round: int
    num_devices: int
    device_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.device_ids) > self.num_devices:
            raise InvalidInput(
                f"round {self.round}: got {len(self.device_ids)} devices, expected at most {self.num_devices}",
                code="FN-0157",
            )


def devices_gone(round_number: int, devices: Sequence[str]) -> DevicesGone:
    """Return the event of a Round that no longer waits for these devices."""
    return DevicesGone(round=round_number, num_devices=len(devices), device_ids=tuple(devices[:MAX_LISTED_DEVICES]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundExtended:
    """The deadline of a Round moved, because devices at work report progress.

    Attributes:
        round: The Round.
        extension_s: Seconds by which it has moved in all.
        num_devices: The devices that made progress.
        device_ids: The first ``MAX_LISTED_DEVICES`` of them.
    """

    round: int
    extension_s: float
    num_devices: int
    device_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.device_ids) > self.num_devices:
            raise InvalidInput(
                f"round {self.round}: got {len(self.device_ids)} devices, expected at most {self.num_devices}",
                code="FN-0157",
            )


def round_extended(round_number: int, extension_s: float, devices: Sequence[str]) -> RoundExtended:
    """Return the event of a Round whose deadline moved for these devices, by ``extension_s`` in all."""
    listed = tuple(devices[:MAX_LISTED_DEVICES])
    return RoundExtended(round=round_number, extension_s=extension_s, num_devices=len(devices), device_ids=listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLacks:
    """A Round lacks required participants at its deadline, and waits for them.

    Attributes:
        round: The Round.
        missing: The missing number of devices or examples, by the Plan's entry or key.
        text: The same for operators.
    """

    round: int
    missing: Mapping[str, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Quality of a Version on the devices' validation data.

    Attributes:
        num_examples: Examples of all devices.
        loss: Mean loss in nats.
        accuracy_float: Share of the labels that the float model predicts correctly; 0.0 for regression.
        accuracy_int8: The same for the int8 model.
        int8_agreement: Share of the labels for which both predict the same class; 0.0 for regression.
        num_labels: Labels of these examples that were predicted; 0 for regression.
        int8_rise_percent: The cost of int8 in percent: of the squared error, or the difference from the float model if
            the targets have another form than the output. None for classification.
    """

    num_examples: int
    loss: float
    accuracy_float: float
    accuracy_int8: float
    int8_agreement: float
    num_labels: int = 0
    int8_rise_percent: float | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the devices predicted labels.

        They did not if the model returns values, or if there is no int8 model, as for clients of Flower. The float and
        int8 models of a classifier agree on some label.
        """
        return self.int8_rise_percent is None and self.int8_agreement > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpread:
    """Distribution of a metric over the devices of a Round. Each device counts once.

    Attributes:
        num_devices: Devices that report the metric.
        mean: The mean over these devices, whatever their numbers of examples.
        min: The smallest value.
        p10: The value below which 10 % of the devices are, interpolated.
        median: The same of half of the devices.
        p90: The same of 90 %.
        max: The largest value.
    """

    num_devices: int
    mean: float
    min: float
    p10: float
    median: float
    p90: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """The parts of a Round's duration in seconds: the mean over the devices whose Updates it accepted.

    Their sum is the duration of the Round.

    Attributes:
        num_devices: Devices whose times the coordinator knows.
        wait_s: Until the device got its Assignment, and after its Update until the Round closed.
        download_s: From the Assignment to the upload, without the training.
        train_s: The training, as the device reports it.
        upload_s: From the first call of the upload to the commit.
        fold_s: From the closed set to the Version.
    """

    num_devices: int = 0
    wait_s: float = 0.0
    download_s: float = 0.0
    train_s: float = 0.0
    upload_s: float = 0.0
    fold_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A new Version.

    It has one of three origins: a Round, a publication from outside, or the adoption of Version ``adopted_number`` of
    ``adopted_run_id``. ``round`` is above 0 for the first, and 0 for the other two.

    Attributes:
        number: The Version's number.
        version_sha256: Digest of its parameters.
        parent: Number of the Version from which it was computed.
        round: The Round that published it, or 0.
        round_s: Duration of the Round.
        bytes_down: Bytes that devices downloaded for the Round.
        bytes_up: Bytes that devices uploaded.
        bytes_down_resumed: Bytes that arrived before a download broke and were not sent again.
        bytes_up_resumed: The same for uploads, as far as the publishing process knows them.
        num_saturated: Values that exceeded the largest encoded value.
        saturated: The devices that lost many of their values so.
        num_clamped: Values of the Version that were out of the range of their tensor by at most one step of the grid,
            and were set to the end of the range.
        num_rounded: Values that were not on the grid.
        train_loss: Mean training loss over ``train_loss_examples``; 0.0 if no device reports one.
        train_loss_examples: Examples of the devices that report a training loss.
        total_examples: Examples on which the devices trained.
        evaluation: Quality of the parent. None if no device validated it.
        runtimes: Number of Updates by the runtime that trained them.
        adopted_run_id: The Run from which the Version was adopted; "" for none.
        adopted_number: Its number there.
        num_stale: Updates that were trained from an older Version than the parent.
        rounds: Rounds to run from a Version that no Round published; 0 for none.
        new_epoch: The epoch that begins with it; 0 for none.
        statistics: Sums of the statistics that the Plan declares, by name.
        statistics_examples: Of the sums over examples among them, the examples of the devices that report each.
        device_spreads: Those of ``train_loss``, and of the parent's ``validation_loss`` and ``validation_accuracy``.
        not_reproducible: Whether a Flower strategy made the parameters that is not declared pure.
        strategy_metrics: The metrics that a Flower strategy returned, as ``train.NAME`` and ``evaluate.NAME``.
        times: The parts of the Round's duration. None without a Round, or if the coordinator was restarted during it.
        by: The principal that published it; None for a Round.
        coverage: How much of the population the Round covers; None without a Round.
        privacy: What its population has spent after the Round, None without a mechanism of privacy.
    """

    number: int
    version_sha256: str
    parent: int
    round: int = 0
    round_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_down_resumed: int = 0
    bytes_up_resumed: int = 0
    num_saturated: int = 0
    saturated: SaturatedDevices = field(default_factory=SaturatedDevices)
    num_clamped: int = 0
    num_rounded: int = 0
    train_loss: float = 0.0
    train_loss_examples: int = 0
    total_examples: int = 0
    evaluation: Evaluation | None = None
    runtimes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    adopted_run_id: str = ""
    adopted_number: int = 0
    num_stale: int = 0
    rounds: int = 0
    new_epoch: int = 0
    statistics: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    statistics_examples: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    device_spreads: Mapping[str, DeviceSpread] = field(default_factory=lambda: MappingProxyType({}))
    not_reproducible: bool = False
    strategy_metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    times: RoundTimes | None = None
    by: Principal | None = None
    coverage: Coverage | None = None
    privacy: SpentPrivacy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRested:
    """The Run opens no more Rounds until it is resumed. ``by`` is the principal that ended or paused it, if one did."""

    state: RunState
    reason: str
    by: Principal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """The Run continues for ``rounds`` Rounds. With 0, it continues for the Rounds that were left.

    ``by`` is the principal that resumed it.
    """

    rounds: int = 0
    by: Principal | None = None


RunEvent = (
    RoundOpened
    | RoundClosed
    | RoundFailed
    | RoundExtended
    | RoundLacks
    | DevicesGone
    | VersionPublished
    | RunRested
    | RunResumed
    | RunWarned
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """An event with its position in the Run's event log. ``time`` is in seconds since the Unix epoch."""

    sequence: int
    time: float
    event: Annotated[
        RunEvent, OneOf(unknown="event: got {}, expected a kind that this fanin knows; install a newer one")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchReply:
    """A message of the stream of a Run: an event, or the Round under way after a change."""

    what: Annotated[
        LoggedEvent | LiveRound,
        OneOf(unknown="watch: got {}, expected an event or the round under way; install a newer fanin"),
    ]

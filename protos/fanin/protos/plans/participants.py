"""The section ``participants`` of a Plan: who must take part in each Round.

An entry of ``required`` names one device, ``id:DEVICE``, or all devices with a tag, ``tag:NAME=VALUE``. Operators give
tags to devices. No Round publishes a Version without the required participants.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import MAX_NAME_CHARS, is_name
from fanin.protos.plans.cohort import MAX_COHORT
from fanin.protos.plans.entries import EntryKind
from fanin.protos.plans.keys import Key, range_problem, shown
from fanin.protos.plans.sections import MAX_COUNT

PAGE: Final = "../howto/operate.md#devices-that-must-take-part"
ID: Final = "id:"
TAG: Final = "tag:"
FAIL: Final = "fail"
WAIT: Final = "wait"
MAX_REQUIRED: Final = 256
"""Entries of ``required``. Each place of a Round is compared with all of them."""
_DEVICE: Final = re.compile(r"id:[0-9a-f]{32}", re.ASCII)


def is_participant(text: str) -> bool:
    """Return whether a text names participants: ``id:DEVICE`` or ``tag:NAME=VALUE``."""
    name, equals, value = text.removeprefix(TAG).partition("=")
    is_tag = text.startswith(TAG) and is_name(name) and bool(equals) and 0 < len(value) <= MAX_NAME_CHARS
    return _DEVICE.fullmatch(text) is not None or (is_tag and value.isprintable())


PARTICIPANTS: Final = EntryKind(
    text=f"a number of devices from 1 to {MAX_COHORT}",
    plural="numbers of devices",
    accepts=lambda value: type(value) is int and 1 <= value <= MAX_COHORT,
    read=lambda value: value,
    name_form='"id:" and the 32 hexadecimal digits of a device, or "tag:NAME=VALUE"',
    has_form=is_participant,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantsPlan:
    """Who must take part in each Round. A Round without them publishes no Version."""

    required: Annotated[
        dict[str, int],
        Key(
            text='The least number of devices by who they are: `"id:DEVICE" = 1` for one device, '
            '`"tag:site=charite" = 2` for two devices with this tag.',
            entries=PARTICIPANTS,
            see=PAGE,
        ),
    ] = field(default_factory=dict)
    min_devices: Annotated[
        int,
        Key(text="Least number of devices.", unit="devices", at_least=0, at_most=MAX_COHORT, see=PAGE),
    ] = 0
    min_examples: Annotated[
        int,
        Key(
            text="Least number of examples on which the devices of a Round trained together.",
            unit="examples",
            at_least=0,
            at_most=MAX_COUNT,
            see=PAGE,
        ),
    ] = 0
    on_missing: Annotated[
        str,
        Key(
            text="What a Round does that lacks them at its deadline. `fail`: it fails, and another one opens. `wait`: "
            "it waits until they come, or an operator stops the Run.",
            choices=(FAIL, WAIT),
            see=PAGE,
        ),
    ] = FAIL

    def __post_init__(self) -> None:
        if problem := range_problem(self, "participants"):
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        if len(self.required) > MAX_REQUIRED:
            raise InvalidPlan(
                f"plan: participants.required: got {len(self.required)} entries, expected at most {MAX_REQUIRED}; give "
                "the devices a common tag",
                code="FN-1500",
            )
        for name, number in self.required.items():
            if name.startswith(ID) and number != 1:
                raise InvalidPlan(
                    f"plan: participants.required: got {number} for the device {shown(name)}, expected 1; name other "
                    "devices by an entry each, or by a tag",
                    code="FN-1500",
                )
        if self.on_missing == WAIT and not self.is_used:
            raise InvalidPlan(
                "plan: participants.on_missing: got 'wait' and nothing to wait for, expected required, min_devices or "
                "min_examples; add one of them, or remove the key",
                code="FN-1501",
            )

    @property
    def is_used(self) -> bool:
        """Whether a Round must have anybody in particular, or a least coverage."""
        return bool(self.required or self.min_devices or self.min_examples)

    @property
    def tags(self) -> tuple[tuple[str, str], ...]:
        """The tags in ``required``, as pairs of name and value."""
        pairs = (name.removeprefix(TAG).partition("=") for name in self.required if name.startswith(TAG))
        return tuple((name, value) for name, _, value in pairs)

    @property
    def most(self) -> int:
        """The devices that a Round has at least. A device has one value of each tag, and may have several tags."""
        groups: dict[str, int] = {}
        for entry, number in self.required.items():
            group = ID if entry.startswith(ID) else entry.partition("=")[0]
            groups[group] = groups.get(group, 0) + number
        return max((self.min_devices, *groups.values()))

"""Events and states in words. The texts of peers in them are escaped where a template writes them."""

from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos.messages import (
    DevicesGone,
    RoundClosed,
    RoundExtended,
    RoundFailed,
    RoundLacks,
    RoundOpened,
    RunEvent,
    RunRested,
    RunResumed,
    RunWarned,
    VersionPublished,
)
from fanin.protos.texts import counted

KINDS: Final = MappingProxyType(
    {
        RoundOpened: "Round opened",
        RoundClosed: "Round closed",
        RoundFailed: "Round failed",
        VersionPublished: "Version published",
        RunRested: "Run rests",
        RunResumed: "Run resumed",
        RunWarned: "Warning",
        DevicesGone: "Devices silent",
        RoundExtended: "Deadline moved",
        RoundLacks: "Devices missing",
    }
)


def event_kind(event: RunEvent) -> str:
    """Return the kind of an event in words."""
    return KINDS[type(event)]


def is_bad(event: RunEvent) -> bool:
    """Return whether an operator should look at an event."""
    return isinstance(event, RunWarned | RoundFailed | RoundLacks | DevicesGone)


def event_text(event: RunEvent) -> str:
    """Return an event as a sentence without its kind."""
    match event:
        case RoundOpened():
            return f"Round {event.round} trains from Version {event.base_version}."
        case RoundClosed():
            return f"Round {event.round} accepted {counted(event.num_accepted, 'Update')}."
        case RoundFailed():
            return f"Round {event.round}: {event.reason}"
        case VersionPublished():
            return _publication_text(event)
        case RunRested():
            by = "" if event.by is None else f" by {event.by}"
            return f"{event.state.value}{by}" + (f": {event.reason}" if event.reason else "")
        case RunResumed():
            by = "" if event.by is None else f" by {event.by}"
            return f"For {counted(event.rounds, 'more Round')}{by}." if event.rounds else f"For the Rounds left{by}."
        case RoundExtended():
            devices = counted(event.num_devices, "device")
            return (
                f"Round {event.round}: its deadline is {event.extension_s:g} s later, because {devices} make progress."
            )
        case RoundLacks():
            return f"Round {event.round} waits: {event.text}"
        case RunWarned():
            return event.text
        case DevicesGone():
            return f"Round {event.round} no longer waits for {counted(event.num_devices, 'silent device')}."
        case _:
            assert_never(event)


def _publication_text(event: VersionPublished) -> str:
    by = "" if event.by is None else f" by {event.by}"
    if event.round:
        text = f"Version {event.number} of Round {event.round}."
    elif event.adopted_run_id:
        source = f"Version {event.adopted_number} of {event.adopted_run_id}"
        text = f"Version {event.number} has the parameters of {source}{by}."
    else:
        text = f"Version {event.number} from outside{by}."
    if event.new_epoch:
        text += f" It begins epoch {event.new_epoch}."
    if event.evaluation is not None:
        text += f" Loss of Version {event.parent}: {event.evaluation.loss:.4f}."
    return text

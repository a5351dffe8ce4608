"""Why an open Round waits for devices: the texts for operators. They follow from the state of the Run alone."""

from typing import Final

from fanin.protos.plans.participants import ID, TAG
from fanin.protos.texts import counted
from fanin.server.runs.driving.course import Course

SHOWN_DIGITS: Final = 12
"""Digits of a device's id in a text. Commands accept the complete id."""


def starvation_of(course: Course) -> str:
    """Return the text while the selection policy chooses none of the waiting devices; empty otherwise."""
    num_waiting = len(course.passed_over)
    if not num_waiting or not course.num_places:
        return ""
    kept = course.open_lack
    if course.num_places <= kept.num_places:
        names = ", ".join(shown_entry(entry) for entry in kept.missing if entry.startswith((ID, TAG)))
        waiting = f"{counted(num_waiting, 'device')} {'waits' if num_waiting == 1 else 'wait'}"
        return f"{waiting}, because the free places are kept for {names} (participants.required)"
    name = course.setup.plan.cohort.selection
    return f"selection policy {name} chose none of {counted(num_waiting, 'waiting device')}"


def storage_trouble_of(course: Course) -> str:
    """Return the text while uploads of the Round cannot be stored; empty otherwise."""
    return f"uploads wait: {course.storage.problem}" if course.storage.problem else ""


def failures_of(course: Course) -> str:
    """Return the text about the devices that gave up or were refused in the open Round; empty without one."""
    num_refused = len(course.refused)
    by_policy = f" ({course.failures.num_by_policy} by policy)" if course.failures.num_by_policy else ""
    parts = [f"{counted(course.num_gave_up, 'device')} gave up{by_policy}"] if course.num_gave_up else []
    parts += [f"{counted(num_refused, 'device')} {'was' if num_refused == 1 else 'were'} refused"] * bool(num_refused)
    # Quoted, because it may be a peer's text.
    return f"{' and '.join(parts)}, the last with: {course.failures.newest!r}" if parts else ""


def shown_entry(entry: str) -> str:
    """Return an entry of required participants for operators: the id of a device cut."""
    return entry[: len(ID) + SHOWN_DIGITS] if entry.startswith(ID) else entry


def shortage_of(course: Course) -> str:
    """Return the text about an open Round that waits for devices for a known cause; empty otherwise."""
    machine, work, starvation, failures = course.round, course.work, starvation_of(course), failures_of(course)
    # Before the deadline, the participants may have come since.
    is_overdue = machine is not None and machine.overdue_at is not None
    if course.lack_text and work is not None and (is_overdue or course.open_lack):
        return f"round {work.record.round} waits: {course.lack_text}"
    if starvation or machine is None or work is None or not machine.assigns:
        return starvation
    cohort = machine.cohort
    # A device that gave up and tries again will probably give up again.
    num_again = sum(device in cohort.at_work for device in cohort.gave_up)
    if not failures or cohort.num_taken - num_again >= machine.rules.quorum:
        return ""
    return f"round {work.record.round} waits: {failures}"

"""The state diagram of a Round, generated from its transition table for docs/rounds.md."""

from fanin.protos.control import RoundPhase
from fanin.server.rounds.machine import TRANSITIONS


def diagram() -> str:
    """Return the state diagram of ``TRANSITIONS`` as Mermaid text."""
    lines = ["stateDiagram-v2", f"    [*] --> {RoundPhase.SELECTING.value}"]
    for (phase, event), row in TRANSITIONS.items():
        for target in sorted(row.targets, key=lambda phase: list(RoundPhase).index(phase)):
            if target is not phase:
                lines.append(f"    {phase.value} --> {target.value}: {event.__name__}")
    lines += [f"    {phase.value} --> [*]" for phase in (RoundPhase.PUBLISHED, RoundPhase.FAILED)]
    return "\n".join(lines) + "\n"

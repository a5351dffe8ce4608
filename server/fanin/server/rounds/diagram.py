"""The state diagram of a Round, generated from its transition table for docs/rounds.md."""

from fanin.server.rounds.machine import TRANSITIONS, Phase


def diagram() -> str:
    """Return the state diagram of ``TRANSITIONS`` as Mermaid text."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.SELECTING.value}"]
    for (phase, event), row in TRANSITIONS.items():
        for target in sorted(row.targets, key=lambda phase: list(Phase).index(phase)):
            if target is not phase:
                lines.append(f"    {phase.value} --> {target.value}: {event.__name__}")
    lines += [f"    {phase.value} --> [*]" for phase in (Phase.PUBLISHED, Phase.FAILED)]
    return "\n".join(lines) + "\n"

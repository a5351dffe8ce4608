"""The state diagram of a Round, drawn from its table; docs/rounds.md shows it."""

from fanin.server.rounds.machine import TRANSITIONS, Phase


def diagram() -> str:
    """The state diagram of ``TRANSITIONS`` as Mermaid text."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.SELECTING.value}"]
    for (phase, event), row in TRANSITIONS.items():
        for target in sorted(row.targets, key=lambda found: list(Phase).index(found)):
            if target is not phase:
                lines.append(f"    {phase.value} --> {target.value}: {event.__name__}")
    lines += [f"    {phase.value} --> [*]" for phase in (Phase.PUBLISHED, Phase.FAILED)]
    return "\n".join(lines) + "\n"

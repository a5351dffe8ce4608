"""The state diagram of a round protocol, generated from its transition table for docs/explanation/rounds.md."""

from fanin.protos.messages import RoundPhase
from fanin.server.rounds.machine import RoundProtocol


def diagram(protocol: RoundProtocol) -> str:
    """Return the state diagram of a protocol as Mermaid text."""
    order = list(RoundPhase).index
    lines = ["stateDiagram-v2", f"    [*] --> {protocol.first.value}"]
    for (phase, event), row in sorted(protocol.rows.items(), key=lambda item: order(item[0][0])):
        for target in sorted(row.targets, key=order):
            if target is not phase:
                lines.append(f"    {phase.value} --> {target.value}: {event.__name__}")
    lines += [f"    {phase.value} --> [*]" for phase in (RoundPhase.PUBLISHED, RoundPhase.FAILED)]
    return "\n".join(lines) + "\n"

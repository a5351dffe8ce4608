"""The report of the demo: a table for people, and an object with the same results for programs."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from fanin.commands.console.tables import print_tables
from fanin.commands.demo.processes import DeviceEnvironment
from fanin.edge.runtimes.quality import Quality
from fanin.protos.chunks import short
from fanin.protos.messages import RoundClosed, RunEvent, VersionPublished
from fanin.protos.texts import lasted, sized


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of the demo."""

    measured: Mapping[str, Quality]
    events: Sequence[RunEvent]
    device_names: Mapping[str, str]
    environments: Sequence[DeviceEnvironment]
    noun: str
    num_public: int
    num_devices: int
    seconds_total: float

    @property
    def rounds(self) -> list[VersionPublished]:
        """The Versions that Rounds published."""
        return [event for event in self.events if isinstance(event, VersionPublished) and event.round]


def json_row(findings: Findings) -> dict[str, object]:
    """Return the results as a JSON row; the keys are part of the command's contract."""
    rounds = findings.rounds
    closed = [event for event in findings.events if isinstance(event, RoundClosed)]
    return {
        "accuracy": {
            name: {"float": part.accuracy_float, "int8": part.accuracy_int8} for name, part in findings.measured.items()
        },
        "int8_agreement": findings.measured["final"].agreement,
        "version_sha256": rounds[-1].version_sha256,
        "acceptance_order": [[findings.device_names.get(one, one) for one in event.accepted] for event in closed],
        "devices": findings.num_devices,
        "rounds": len(rounds),
        "seconds_per_round": statistics.median(event.round_s for event in rounds),
        "bytes_down_per_round": statistics.median(event.bytes_down for event in rounds),
        "bytes_up_per_round": statistics.median(event.bytes_up for event in rounds),
        "bytes_down_first_round": rounds[0].bytes_down,
        "seconds_total": findings.seconds_total,
        "runtimes": dict(_runtimes(findings)),
        "environments": {
            part.name: {
                "runtime": part.runtime,
                "packages": list(part.packages),
                "import_torch": part.import_torch,
                "import_onnx": part.import_onnx,
            }
            for part in findings.environments
        },
    }


def print_table(findings: Findings) -> None:
    """Print the results as tables."""
    row = json_row(findings)
    num_test = findings.measured["final"].num_examples
    accuracy = Table(
        *("model", Column("float", justify="right"), Column("int8", justify="right")),
        title=f"Top-1 accuracy on {num_test} test {findings.noun}",
        box=SIMPLE_HEAD,
    )
    names = {
        "pretrained": f"pre-trained in the datacenter ({findings.num_public} {findings.noun})",
        "federated": "after the federation",
        "final": "after datacenter and one more round",
        "centralised": "bound: all data in one place",
    }
    for key, name in names.items():
        part = findings.measured[key]
        accuracy.add_row(name, f"{part.accuracy_float:.4f}", f"{part.accuracy_int8:.4f}")
    facts = Table(show_header=False, title="The run", box=SIMPLE_HEAD)
    facts.add_column()
    facts.add_column(overflow="fold")
    down, up, first = (_median(findings, name) for name in ("bytes_down", "bytes_up", "bytes_down_first"))
    facts.add_row(
        "rounds", f"{row['rounds']}, with {row['devices']} devices, {lasted(_median(findings, 'round_s'))} each"
    )
    facts.add_row("bytes of a round", f"{sized(down)} down, {sized(up)} up (the first: {sized(first)} down)")
    facts.add_row("updates", ", ".join(f"{count} by {name}" for name, count in _runtimes(findings).items()))
    facts.add_row("int8 agrees with float", f"{findings.measured['final'].agreement:.4f}")
    facts.add_row("final version", short(str(row["version_sha256"])))
    facts.add_row("in all", lasted(findings.seconds_total))
    print_tables(accuracy, facts)


def _median(findings: Findings, name: str) -> float:
    """Return the median of a number over the Rounds; ``bytes_down_first`` is that of the first one."""
    if name == "bytes_down_first":
        return findings.rounds[0].bytes_down
    return float(statistics.median(getattr(event, name) for event in findings.rounds))


def _runtimes(findings: Findings) -> Counter[str]:
    """Count the Updates of each runtime."""
    total: Counter[str] = Counter()
    for event in findings.rounds:
        total.update(event.runtimes)
    return total

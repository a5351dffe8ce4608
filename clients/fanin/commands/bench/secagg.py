"""``fanin bench secagg``: processor seconds of a device and of the coordinator in each phase of a secure aggregation.

All devices and the coordinator are in this process, without a network: the time is that of the computation. Devices
that drop out do so after their shares arrived, which costs the coordinator most. The sum is compared with the plain
one.
"""

import secrets
import statistics
from collections.abc import Sequence
from typing import Annotated, Final

import click
import numpy as np
import typer

from fanin.commands.bench.harness.masked import MaskedAttempt, PlainUpdate, masked_attempt, pieces_of
from fanin.commands.bench.harness.report import write_report
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.edge.masking.coordinator import Confirming
from fanin.edge.masking.parameters import MILLION, Assumptions, Threat
from fanin.edge.masking.terms import LEAST_SURVIVORS, MaskTerms
from fanin.edge.rings import RingVector, smallest_ring
from fanin.protos.errors import Conflict

CODEC_BITS: Final = 8
PIECE_VALUES: Final = 1 << 18
TAIL: Final = (1, 0, 0)
THREATS: Final = tuple(threat.title for threat in Threat)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench secagg``."""
    return run_command(secagg, argv, "bench secagg")


def secagg(
    clients: Annotated[int, typer.Option("--clients", min=LEAST_SURVIVORS, help="Number of devices.")] = 16,
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="Values of an Update.")] = 1_000_000,
    drop: Annotated[float, typer.Option("--drop", help="Fraction that drops out after its shares.")] = 0.0,
    adversarial: Annotated[float, typer.Option("--adversarial", help="Fraction that may be adversarial.")] = 0.33,
    threat: Annotated[str, typer.Option("--threat", help=f"Threat model: {', '.join(THREATS)}.")] = "curious",
    json: JsonOption = "",
) -> None:
    """Measure a secure aggregation of int8 Updates on this machine, without a network."""
    if threat not in THREATS or not 0 <= drop < 1 or not 0 <= adversarial < 1:
        raise click.UsageError(
            f"--threat, --drop, --adversarial: got {threat}, {drop} and {adversarial}, expected one of "
            f"{', '.join(THREATS)}, and fractions from 0 on below 1"
        )
    assumptions = Assumptions(
        threat=Threat(1 + THREATS.index(threat)),
        adversarial_ppm=round(adversarial * MILLION),
        dropout_ppm=round(drop * MILLION),
    )
    attempt = masked_attempt(bench_terms(clients, parameters, assumptions), clients, secrets.token_bytes)
    write_report(measure(attempt, round(drop * clients)), json)


def bench_terms(clients: int, parameters: int, assumptions: Assumptions) -> MaskTerms:
    """Return terms for int8 Updates of weight 1."""
    layout = RingVector(ring=smallest_ring(CODEC_BITS, clients), num_values=parameters, num_tail=len(TAIL))
    return MaskTerms(
        run_id="bench",
        lineage=0,
        round=1,
        attempt=1,
        max_devices=clients,
        min_survivors=LEAST_SURVIVORS,
        assumptions=assumptions,
        layout=layout,
        version_sha256=bytes(32),
        meaning_sha256=bytes(32),
    )


def measure(attempt: MaskedAttempt, num_drops: int) -> dict[str, object]:
    """Run an attempt and return its row. Raises Conflict unless the unmasked sum is the plain one."""
    layout = attempt.terms.layout
    values = np.random.default_rng(1).integers(-127, 128, layout.num_values, dtype=np.int8)
    update = PlainUpdate(pieces=pieces_of(values, layout, PIECE_VALUES), weight=1, tail=TAIL)
    roster = attempt.advertise().roster
    attempt.share()
    confirming = attempt.mask(lambda index: update, range(num_drops))
    if isinstance(confirming, Confirming):
        attempt.confirm()
    attempt.unmask()
    num_survivors = len(attempt.devices) - num_drops
    expected = values.astype(np.int64) * num_survivors
    if not np.array_equal(layout.ring.signed(attempt.total), expected) or int(attempt.tail[0]) != num_survivors:
        raise Conflict("the unmasked sum is not the plain one", code="FN-1045")
    survivors = attempt.devices[num_drops:]
    phases = {phase: statistics.median(each.seconds[phase] for each in survivors) for phase in survivors[0].seconds}
    return {
        "clients": len(attempt.devices),
        "parameters": layout.num_values,
        "dropped": num_drops,
        "threat": attempt.terms.assumptions.threat.title,
        "degree": roster.parameters.degree,
        "threshold": roster.parameters.threshold,
        "ring_bits": layout.ring.bits,
        "payload_bytes": layout.size_bytes,
        "client_seconds": sum(phases.values()),
        "client_seconds_by_phase": phases,
        "server_seconds": sum(attempt.seconds.values()),
        "server_seconds_by_phase": attempt.seconds,
    }

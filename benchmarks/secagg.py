"""Client time of a secure aggregation, compared with Flower's SecAgg+ in the same process and with the same graph.

    python benchmarks/secagg.py --json FILE

Both sides have graphs of the same degree and the same threshold, and a client does all of its work: keys, shares,
encoding, masks, the answer that unmasks. Flower's side are the functions of its own client (``secaggplus_mod``): its
22-bit quantization modulo 2^32, its ``pseudo_rand_gen``, its shares. Its generator is not cryptographic, and it has no
signatures. fanin's side is ``fanin.edge.masking``, with the codec int8, and with the codec fixed32 besides. ``--threat
active`` compares the complete graph, with certificates and confirmations on fanin's side. Seconds are processor time.
"""

import argparse
import importlib
import json
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key

from fanin.commands.bench.harness.masked import PlainUpdate, masked_attempt, pieces_of, timed
from fanin.commands.bench.harness.report import machine
from fanin.commands.bench.secagg import PIECE_VALUES, TAIL, bench_terms
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.masking.coordinator import Confirming
from fanin.edge.masking.parameters import Assumptions, GraphParameters, Threat, parameters
from fanin.edge.rings import RingVector, smallest_ring
from fanin.edge.tensors import Float32s, TensorSpec, TensorTable

FLOWER: Final = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
THREATS: Final = {"curious": Threat.CURIOUS, "active": Threat.ACTIVE}
GATE: Final = 10.0
GOAL: Final = 20.0
EXPONENT: Final = {"int8": -4, "fixed32": -22}
"""Grids on which no value is cut."""


def main() -> None:
    """Print the row, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threat", choices=sorted(THREATS), default="curious")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    update = np.random.default_rng(1).standard_normal(options.parameters).astype(np.float32)
    rows: dict[str, list[dict[str, float]]] = {"flower": [], "int8": [], "fixed32": []}
    assumptions = Assumptions(threat=THREATS[options.threat], adversarial_ppm=330_000, dropout_ppm=100_000)
    chosen = parameters(options.clients, assumptions)
    # Taken in turns, so that a busy moment of the machine is not one side's.
    for _ in range(options.repeats):
        rows["flower"].append(flower(options.clients, update, chosen))
        for codec in EXPONENT:
            rows[codec].append(fanin(options.clients, update, codec, assumptions))
    best = {side: min(samples, key=lambda phases: sum(phases.values())) for side, samples in rows.items()}
    totals = {side: sum(phases.values()) for side, phases in best.items()}
    row = {
        "clients": options.clients,
        "parameters": options.parameters,
        "threat": options.threat,
        "degree": chosen.degree,
        "threshold": chosen.threshold,
        "client_seconds": totals,
        "client_seconds_by_phase": best,
        "client_seconds_samples": {side: [sum(each.values()) for each in samples] for side, samples in rows.items()},
        "added_seconds": {side: added(phases) for side, phases in best.items()},
        "ratio_added_int8": added(best["flower"]) / added(best["int8"]),
        "ratio_added_fixed32": added(best["flower"]) / added(best["fixed32"]),
        "ratio_whole_int8": totals["flower"] / totals["int8"],
        "ratio_whole_fixed32": totals["flower"] / totals["fixed32"],
        "gate_ratio": GATE,
        "goal_ratio": GOAL,
        "machine": machine(),
    }
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


def fanin(clients: int, update: Float32s, codec: str, assumptions: Assumptions) -> dict[str, float]:
    """Return the median seconds of a client in each phase."""
    terms = bench_terms(clients, update.size, assumptions)
    layout = RingVector(ring=smallest_ring(CODECS[codec].bits, clients), num_values=update.size, num_tail=len(TAIL))
    attempt = masked_attempt(replace(terms, layout=layout), clients, secrets.token_bytes)
    table = TensorTable(specs=(TensorSpec(name="w", shape=(update.size,)),))

    def encoded(index: int) -> PlainUpdate:
        with timed(attempt.devices[index].seconds, "encode"):
            payload = CODECS[codec].encode(table, update, [EXPONENT[codec]], 0, np.random.default_rng(index)).payload
            values = CODECS[codec].decode(memoryview(payload))
        return PlainUpdate(pieces=pieces_of(values, layout, PIECE_VALUES), weight=1, tail=TAIL)

    attempt.advertise()
    attempt.share()
    if isinstance(attempt.mask(encoded), Confirming):
        attempt.confirm()
    attempt.unmask()
    return medians([each.seconds for each in attempt.devices])


def flower(clients: int, update: Float32s, chosen: GraphParameters) -> dict[str, float]:
    """Return the median seconds of a client in each stage of Flower's SecAgg+."""
    seconds: list[dict[str, float]] = [{} for _ in range(clients)]
    settings = {
        Key.SAMPLE_NUMBER: clients,
        Key.SHARE_NUMBER: chosen.degree + 1,
        Key.THRESHOLD: chosen.threshold,
        Key.CLIPPING_RANGE: 8.0,
        Key.TARGET_RANGE: 1 << 22,
        Key.MOD_RANGE: 1 << 32,
        Key.MAX_WEIGHT: 1000.0,
    }
    states = [FLOWER.SecAggPlusState() for _ in range(clients)]
    for number, state in enumerate(states, start=1):
        state.nid = number
    keys = [_timed(seconds[index], "setup", "_setup", state, settings) for index, state in enumerate(states)]
    rows = [(key[Key.PUBLIC_KEY_1], key[Key.PUBLIC_KEY_2]) for key in keys]
    rosters = [{str(peer + 1): rows[peer] for peer in around(index, clients, chosen)} for index in range(clients)]
    sealed = [
        _timed(seconds[index], "share", "_share_keys", state, rosters[index]) for index, state in enumerate(states)
    ]
    values = ndarrays_to_parameters([update])
    for index, state in enumerate(states):
        peers = [peer for peer in around(index, clients, chosen) if peer != index]
        received = {
            Key.SOURCE_LIST: [peer + 1 for peer in peers],
            Key.CIPHERTEXT_LIST: [_sealed_for(sealed[peer], index + 1) for peer in peers],
        }
        _timed(seconds[index], "mask", "_collect_masked_vectors", state, received, 100, values)
        alive = {
            Key.ACTIVE_NODE_ID_LIST: [peer + 1 for peer in around(index, clients, chosen)],
            Key.DEAD_NODE_ID_LIST: [],
        }
        _timed(seconds[index], "unmask", "_unmask", state, alive)
    return medians(seconds)


def around(index: int, clients: int, chosen: GraphParameters) -> list[int]:
    """Return a device and its neighbors on a circle, or all devices."""
    half = chosen.degree // 2
    if chosen.degree == clients - 1:
        return list(range(clients))
    return sorted((index + step) % clients for step in range(-half, half + 1))


def added(phases: Mapping[str, float]) -> float:
    """Return the seconds that secure aggregation adds to a Round of a client.

    Without it fanin encodes and hashes an Update, too, and Flower sends floats.
    """
    return sum(seconds for phase, seconds in phases.items() if phase not in ("encode", "hash"))


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase."""
    return {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}


def _sealed_for(message: Mapping[Any, Any], receiver: int) -> bytes:
    data: bytes = message[Key.CIPHERTEXT_LIST][message[Key.DESTINATION_LIST].index(receiver)]
    return data


def _timed(seconds: dict[str, float], phase: str, name: str, *arguments: Any) -> Any:
    started_s = time.process_time()
    result = getattr(FLOWER, name)(*arguments)
    seconds[phase] = time.process_time() - started_s
    return result


if __name__ == "__main__":
    main()

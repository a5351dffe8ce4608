"""Rounds of fanin and of its peers: the same work in one run on one machine, and the ratios.

    python benchmarks/peers/compare.py --clients 4 --megabytes 16 --rounds 5 --json FILE

N client processes receive a model of M megabytes and send fresh random values of the same size, without training. fanin
runs with TLS and durability = host (``fanin bench rounds``), Flower as SuperLink and SuperNodes with TLS, and NVFlare
as a POC with mutual TLS. Neither peer writes an update to disk before it acknowledges it. The virtual environments of
the peers are created on first use, next to that of this repository.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from environments import environment, installed
from peer_flower import flower_seconds
from peer_nvflare import nvflare_seconds
from work import Work, row_of

ROOT: Final = Path(__file__).parents[2]
PEERS: Final[dict[str, Callable[[Path, Path, Work], list[float]]]] = {
    "flower": flower_seconds,
    "nvflare": nvflare_seconds,
}
PACKAGES: Final = {"flower": "flwr", "nvflare": "nvflare"}
GATES: Final = {(4, 16.0): {"flower": 20.0, "nvflare": 8.0}, (16, 1.0): {"flower": 100.0}}
"""The gates: the least ratio of a peer's round time to that of fanin, by load."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if a gate is missed."""
    options = _parser().parse_args(argv)
    work = Work(num_clients=options.clients, megabytes=options.megabytes, num_rounds=options.rounds)
    row: dict[str, object] = {"clients": work.num_clients, "megabytes": work.megabytes, "rounds": work.num_rounds}
    gates = GATES.get((work.num_clients, work.megabytes), {})
    bins = {name: environment(name, options.environments) for name in PEERS if options.only in ("", name)}
    ours = _ours(work)
    row["fanin"] = ours
    seconds = float(str(ours["seconds_per_round"]))
    sys.stdout.write(f"{'fanin':8} {seconds:8.3f} s a round\n")
    passes = True
    for name, bin_folder in bins.items():
        with tempfile.TemporaryDirectory(prefix=f"fanin-peer-{name}-", ignore_cleanup_errors=True) as folder:
            result = row_of(PEERS[name](bin_folder, Path(folder), work))
        ratio = float(str(result["seconds_per_round"])) / seconds
        gate = gates.get(name)
        version = installed(bin_folder)[PACKAGES[name]]
        row[name] = result | {"version": version, "ratio_to_fanin": ratio, "gate_ratio_to_fanin": gate}
        gate_text = "" if gate is None else f", gate {gate:g} {'kept' if ratio >= gate else 'MISSED'}"
        sys.stdout.write(f"{name:8} {result['seconds_per_round']:8.3f} s a round, {ratio:.1f} x{gate_text}\n")
        sys.stdout.flush()
        passes = passes and (gate is None or ratio >= gate)
    if options.json:
        Path(options.json).write_text(json.dumps(row, indent=2) + "\n")
    return int(not passes)


def _ours(work: Work) -> dict[str, object]:
    words = ["--clients", str(work.num_clients), "--megabytes", str(work.megabytes), "--rounds", str(work.num_rounds)]
    command = [sys.executable, "-m", "fanin.commands.main", "bench", "rounds", *words, "--no-baseline", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"fanin bench rounds: {completed.stderr}")
    return dict(json.loads(completed.stdout))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Rounds of fanin and of its peers, and the ratios.")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=16.0, help="of 2^20 bytes (16)")
    parser.add_argument("--rounds", type=int, default=5, help="how many to time; one more warms up (5)")
    parser.add_argument("--only", choices=tuple(PEERS), default="", help="compare with this peer only")
    parser.add_argument("--environments", type=Path, default=ROOT, help="where the peers' venvs are created")
    parser.add_argument("--json", metavar="FILE", help="all samples")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

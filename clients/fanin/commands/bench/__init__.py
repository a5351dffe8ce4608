"""``fanin bench``: measurements of a coordinator against its budgets, and of the traffic between ranks.

Each benchmark is a module with ``main(argv) -> int``, imported when it is called. A benchmark starts modules of this
package as processes, so each module imports only the libraries that it uses.

Reading order:

- ``rounds``, ``memory``, ``restart``, ``checkins``: benchmarks of a coordinator
- ``fold``: the fold of one Update
- ``machine``: the events of a Round with many devices
- ``collectives``: the collectives between ranks
- ``harness/``: the parts that they share
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

Benchmark = Callable[[Sequence[str]], int]

BENCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rounds": "seconds a round, compared with a bare gRPC stream",
        "fold": "the fold of updates, compared with numpy's addition",
        "machine": "the cost of an event of a round with 100,000 devices",
        "memory": "the coordinator's memory while all devices upload at once",
        "restart": "seconds from SIGKILL to serving, with a round open",
        "checkins": "check-ins a second, with many devices registered",
        "collectives": "correctness and speed of the collectives between ranks",
    }
)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench``."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES)) + 2
        lines = ["usage: fanin bench BENCHMARK [OPTIONS]", "", "Measure a coordinator, or ranks, on this machine.", ""]
        lines += [f"  {name:{width}}{summary}" for name, summary in BENCHES.items()]
        sys.stdout.write("\n".join([*lines, "", "fanin bench BENCHMARK --help lists the options.", ""]))
        return 0
    if argv[0] not in BENCHES:
        sys.stderr.write(f"fanin bench: got {argv[0]!r}, expected one of {', '.join(BENCHES)}\n")
        return 2
    run: Benchmark = import_module(f"{__name__}.{argv[0]}").main
    return run(argv[1:])

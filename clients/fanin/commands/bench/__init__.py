"""``fanin bench``: measurements of a coordinator on the operator's machine, against its budgets.

Each benchmark is a module with ``main(argv) -> int``, imported when it is called. A benchmark starts modules of this
package as processes, so each module imports only the libraries that it uses.

Reading order:

- ``rounds``, ``memory``, ``checkins``, ``secagg``: the benchmarks
- ``harness/``: the parts that they share, also with those in ``benchmarks/`` of the repository
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
        "memory": "the coordinator's memory while all devices upload at once",
        "checkins": "check-ins a second, with many devices registered",
        "secagg": "seconds of a device and of the coordinator in a secure aggregation",
    }
)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench``."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES)) + 2
        lines = ["usage: fanin bench BENCHMARK [OPTIONS]", "", "Measure a coordinator on this machine.", ""]
        lines += [f"  {name:{width}}{summary}" for name, summary in BENCHES.items()]
        sys.stdout.write("\n".join([*lines, "", "fanin bench BENCHMARK --help lists the options.", ""]))
        return 0
    if argv[0] not in BENCHES:
        sys.stderr.write(f"fanin bench: got {argv[0]!r}, expected one of {', '.join(BENCHES)}\n")
        return 2
    run: Benchmark = import_module(f"{__name__}.{argv[0]}").main
    return run(argv[1:])

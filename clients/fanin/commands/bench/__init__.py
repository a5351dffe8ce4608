"""``fanin bench``: a coordinator measured on this machine, against its budgets, and what ranks send each other.

Each benchmark is a module with ``main(argv) -> int``, imported when it is called: the processes that a benchmark
starts are modules of this package too, and load nothing but what they use. ``site`` is the coordinator and its Run,
``device``, ``crowd``, ``callers`` and ``bare`` are processes, ``report`` says how it ends, ``rss`` what memory was
taken.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final

Main = Callable[[Sequence[str]], int]

BENCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rounds": "seconds a round, against a bare gRPC stream of the same bytes",
        "fold": "the fold of updates, against numpy's addition",
        "memory": "the coordinator's memory while all devices upload at once",
        "restart": "from SIGKILL to serving, with a round open",
        "checkins": "check-ins a second, with many devices registered",
        "collectives": "what ranks send each other: right, and how fast",
    }
)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench``."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES)) + 2
        lines = ["usage: fanin bench BENCHMARK [OPTIONS]", "", "Measure a coordinator, or ranks, on this machine.", ""]
        lines += [f"  {name:{width}}{summary}" for name, summary in BENCHES.items()]
        sys.stdout.write("\n".join([*lines, "", "fanin bench BENCHMARK --help says more.", ""]))
        return 0
    if argv[0] not in BENCHES:
        sys.stderr.write(f"fanin bench: got {argv[0]!r}, expected one of {', '.join(BENCHES)}\n")
        return 2
    run: Main = import_module(f"{__name__}.{argv[0]}").main
    return run(argv[1:])

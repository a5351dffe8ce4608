"""``fanin``: finds the subcommand and runs it.

Each subcommand is a module with ``main(argv) -> int``, imported only when it is called, so ``fanin join`` runs
where nothing but the core is installed. Others add theirs by an entry point in the group ``fanin.commands``
whose name is the subcommand and whose object is such a ``main``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.protos.errors import FaninError
from fanin.protos.release import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Main = Callable[[Sequence[str]], int]

SUBCOMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "train one model across a datacenter and devices, all on this machine",
        "serve": "run a coordinator",
        "join": "take part as a device",
        "export": "turn a torch module into a signed bundle, or check that it can be",
        "assemble": "make a signed bundle of graphs that another exporter made",
        "plan": "rank the ways to spread a model over a datacenter's ranks",
        "run": "start a run from a plan",
        "runs": "list the runs of a coordinator",
        "describe": "show a run: plan, state, devices at work, last rounds",
        "watch": "follow a run",
        "fetch": "download a version of a run, verified",
        "pause": "let a run wait",
        "resume": "let a run go on",
        "stop": "end a run",
        "rollback": "make an older version of a run its newest",
        "promote": "make a version of one run the newest of another",
        "verify": "compute the versions of a run again from the record",
        "infer": "ask a model: a bundle, or any .onnx or .tflite file",
        "inspect": "verify a bundle, or open a model file, and show what is in it",
        "train": "train a model in the datacenter, on any mesh of processes",
        "bench": "measure a coordinator, or ranks, on this machine",
    }
)
GROUP: Final = "fanin.commands"
EXTRAS_OF: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "typer": ("server",),
        "click": ("server",),
        "rich": ("server",),
        "sqlalchemy": ("server",),
        "alembic": ("server",),
        "grpc_health": ("server",),
        "grpc_reflection": ("server",),
        "torch": ("export", "datacenter"),
        "safetensors": ("datacenter",),
        "onnx": ("export",),
        "onnxscript": ("export",),
        "litert_torch": ("export",),
        "flatbuffers": ("export",),
        "ai_edge_litert": ("litert", "export"),
        "onnxruntime": ("onnx", "export"),
    }
)
"""Which extras install a library that a subcommand may miss: each of them does."""
NEEDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "demo": ("server", "export", "datacenter", "onnx"),
        "export": ("server", "export"),
        "plan": ("server", "datacenter"),
        "train": ("server", "export", "datacenter"),
    }
)
"""All extras that a subcommand needs, where that is more than its own library's: what is lacking is told at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status: 0 done, 1 our error, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help(sorted(_others())))
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"fanin {__version__}\n")
        return 0
    name = words[0]
    others = {} if name in SUBCOMMANDS else _others()
    if name not in SUBCOMMANDS and name not in others:
        sys.stderr.write(f"fanin: got subcommand {name!r}, expected one of {', '.join([*SUBCOMMANDS, *others])}\n")
        return 2
    try:
        run: Main = import_module(f"fanin.commands.{name}").main if name in SUBCOMMANDS else others[name].load()
        return run(words[1:])
    except FaninError as exc:
        sys.stderr.write(f"fanin {name}: {exc}\n")
        return 1
    except OSError as exc:
        # A file or a folder that the user named and that is none, or a disk that is full.
        where = f"{exc.filename}: " if exc.filename else ""
        sys.stderr.write(f"fanin {name}: {where}{exc.strerror or exc}\n")
        return 1
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in EXTRAS_OF:
            raise
        extras = ",".join(extras_for(name, library))
        # Only the Plan says whether its App is to be exported.
        more = ", or 'fanin[server,export]' for a plan with an App" if (name, extras) == ("run", "server") else ""
        sys.stderr.write(f"fanin {name}: {library} is not installed here; pip install 'fanin[{extras}]'{more}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def extras_for(subcommand: str, library: str) -> tuple[str, ...]:
    """What to install for a subcommand that lacks a library: all that it needs, this among it."""
    needed, bringing = NEEDS.get(subcommand, ()), EXTRAS_OF[library]
    return needed if set(needed) & set(bringing) else (*needed, bringing[0])


def _others() -> "dict[str, EntryPoint]":
    """What other packages add. To look for it takes a device 3 MB: it is done where it is asked for."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def _help(others: Sequence[str]) -> str:
    width = max(map(len, [*SUBCOMMANDS, *others])) + 2
    lines = ["usage: fanin SUBCOMMAND [OPTIONS]", "", "Train one model across a datacenter and a million devices.", ""]
    lines += [f"  {name:{width}}{summary}" for name, summary in SUBCOMMANDS.items()]
    lines += [f"  {name:{width}}(installed by another package)" for name in others]
    lines += ["", "fanin SUBCOMMAND --help says more; fanin --version tells the version.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

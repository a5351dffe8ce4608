"""The entry point of ``fanin``: it looks the subcommand up in a table and runs it.

A subcommand is a function ``(argv) -> exit status``. Its module is imported only when it is called, so ``fanin join``
runs on the core install. Other packages add subcommands by an entry point in the group ``fanin.commands``: its name is
the subcommand, its object is such a function.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.commands.console.others import load_other, other_commands
from fanin.commands.console.streams import escaped_output
from fanin.commands.console.usage import WRONG_USAGE, WRONG_USAGE_CODE, CommandFailure, WrongUsage, report, report_usage
from fanin.protos.errors import FaninError
from fanin.protos.release import __version__

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """A subcommand of ``fanin``.

    ``module`` is below ``fanin.commands``; ``function`` is the function in it. ``extras`` are all extras that the
    subcommand needs, if it needs more than the extra of the missing library. An error then names all of them.
    """

    summary: str
    module: str
    function: str = "main"
    extras: tuple[str, ...] = ()


LIFECYCLE: Final = "control.lifecycle"
SUBCOMMANDS: Final[Mapping[str, Subcommand]] = MappingProxyType(
    {
        "demo": Subcommand(
            summary="run the whole loop on this machine: datacenter, coordinator and devices",
            module="demo",
            extras=("server", "export", "datacenter", "onnx"),
        ),
        "init": Subcommand(
            summary="write a project that runs: an App, a plan, a split, a test and a README",
            module="project.creation",
        ),
        "serve": Subcommand(summary="run a coordinator", module="serve.command"),
        "config": Subcommand(
            summary="show the effective configuration of a coordinator, or its schema",
            module="serve.command",
            function="config",
        ),
        "join": Subcommand(summary="take part in federated training as a device", module="join"),
        "status": Subcommand(summary="show the state of a device on this machine", module="site.status"),
        "policy": Subcommand(summary="show or set the privacy floor of a device on this machine", module="site.policy"),
        "doctor": Subcommand(summary="find out why a device or a coordinator cannot be reached", module="site.doctor"),
        "export": Subcommand(
            summary="export a torch module as a signed bundle, or check that it can be exported",
            module="export",
            extras=("server", "export"),
        ),
        "assemble": Subcommand(summary="create a signed bundle from graphs of another exporter", module="assemble"),
        "bundle": Subcommand(
            summary="create a signed bundle of arrays without graphs, for Flower apps", module="bundle"
        ),
        "plan": Subcommand(
            summary="rank the layouts of a model over a datacenter's ranks by step time",
            module="plan",
            extras=("server", "datacenter"),
        ),
        "run": Subcommand(summary="start a run from a plan", module="control.run"),
        "runs": Subcommand(summary="list the runs of a coordinator", module="control.runs"),
        "describe": Subcommand(
            summary="show a run: its plan, state, active devices and last rounds", module="control.describe"
        ),
        "watch": Subcommand(summary="follow a run until it ends", module="control.watch"),
        "evaluations": Subcommand(
            summary="show the metrics of a run's versions on held-out data", module="control.evaluations"
        ),
        "stats": Subcommand(
            summary="ask devices for statistics of their examples, without training", module="fleet.stats"
        ),
        "evaluate": Subcommand(
            summary="evaluate a version of a run on devices, without training", module="fleet.evaluate"
        ),
        "fetch": Subcommand(summary="download and verify a version of a run", module="control.fetch"),
        "publish": Subcommand(
            summary="publish trained parameters as the next version of a run",
            module="control.publish",
            extras=("server", "datacenter"),
        ),
        "pause": Subcommand(summary="pause a run", module=LIFECYCLE, function="pause"),
        "resume": Subcommand(summary="resume a run", module=LIFECYCLE, function="resume"),
        "stop": Subcommand(summary="end a run", module=LIFECYCLE, function="stop"),
        "rollback": Subcommand(
            summary="make an older version of a run its newest", module=LIFECYCLE, function="rollback"
        ),
        "promote": Subcommand(
            summary="make a version of one run the newest of another", module=LIFECYCLE, function="promote"
        ),
        "reclaim": Subcommand(
            summary="take a run back with its publisher's key: revoke its run key, and publish a version again",
            module=LIFECYCLE,
            function="reclaim",
        ),
        "token": Subcommand(
            summary="create, list, replace and revoke tokens of people and of new devices",
            module="administration.token",
        ),
        "device": Subcommand(
            summary="list, label, tag, ban and remove the devices of a coordinator", module="administration.device"
        ),
        "audit": Subcommand(
            summary="read and verify the log of the changes at a coordinator", module="administration.audit"
        ),
        "privacy": Subcommand(
            summary="find the noise that a privacy budget needs", module="privacy", extras=("server", "privacy")
        ),
        "prune": Subcommand(summary="remove what a run no longer needs, or show what would go", module="care.prune"),
        "backup": Subcommand(summary="back up a coordinator's folder while it serves", module="care.backup"),
        "restore": Subcommand(
            summary="write a new coordinator's folder from a backup", module="care.backup", function="restore_main"
        ),
        "report": Subcommand(
            summary="write a run or a simulation as one HTML file with curves and tables", module="report.command"
        ),
        "verify": Subcommand(summary="recompute the versions of a run from its record", module="control.verify"),
        "infer": Subcommand(summary="run a model: a bundle, or any .onnx or .tflite file", module="infer"),
        "explain": Subcommand(summary="show meaning, cause and remedy of an error by its code", module="site.explain"),
        "inspect": Subcommand(summary="verify and show a bundle, or show a model file", module="inspect"),
        "train": Subcommand(
            summary="train a model in the datacenter, on any mesh of processes",
            module="train",
            extras=("server", "export", "datacenter"),
        ),
        "simulate": Subcommand(
            summary="train an App on simulated clients of this machine",
            module="simulation",
            function="simulate",
            extras=("server", "export"),
        ),
        "study": Subcommand(
            summary="run a grid of simulations of a TOML file, and print the best of each method",
            module="studies.command",
            extras=("server", "export"),
        ),
        "partition": Subcommand(
            summary="spread a data set over clients, and draw it", module="simulation", function="draw"
        ),
        "bench": Subcommand(summary="measure a coordinator, or ranks, on this machine", module="bench"),
        "completion": Subcommand(
            summary="print a script that completes subcommands, options and names in a shell",
            module="main",
            function="complete",
        ),
    }
)
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
        "matplotlib": ("plots",),
        "PIL": ("images",),
        "loky": ("simulation",),
        "flwr": ("flower",),
    }
)
"""The extras that install a library; any one of them is enough."""

_PERMISSIONS: Final = "; expected a path that this user may read and write: change its owner or mode, or pass another"
REMEDIES: Final = MappingProxyType(
    {
        errno.EACCES: _PERMISSIONS,
        errno.EPERM: _PERMISSIONS,
        errno.EEXIST: "; expected a folder or no file there: move the file away, or pass another path",
        errno.ENOTDIR: "; expected a folder in the path, got a file: move the file away, or pass another path",
        errno.EROFS: "; expected a file system that can be written: mount it so, or pass another path",
    }
)
"""The next step after an error of the operating system, by number."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name.

    Returns:
        The process's exit status: 0 for success, 1 for an error of ours, 2 for wrong usage, 130 after an interrupt.
    """
    # gRPC prints its own view of a failed connection on standard error. Our errors have the cause (``clients.probe``).
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with escaped_output():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help(sorted(other_commands())))
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"fanin {__version__}\n")
        return 0
    name = words[0]
    others = {} if name in SUBCOMMANDS else other_commands()
    if name not in SUBCOMMANDS and name not in others:
        report(
            "fanin",
            CommandFailure(_unknown(name, [*SUBCOMMANDS, *others]), code=WRONG_USAGE_CODE, kind="WrongUsage"),
            words,
        )
        return WRONG_USAGE
    try:
        run: Main = _load(SUBCOMMANDS[name]) if name in SUBCOMMANDS else load_other(others[name])
        return run(words[1:])
    except WrongUsage as exc:
        return report_usage(name, exc, words)
    except FaninError as exc:
        failure = CommandFailure(str(exc), code=exc.code, kind=type(exc).__name__)
    except OSError as exc:
        # A path on the command line that does not exist or cannot be opened, or a full disk.
        prefix = f"{exc.filename}: " if exc.filename else ""
        text = f"{prefix}{exc.strerror or exc}{_owner(exc)}{REMEDIES.get(exc.errno or 0, '')}"
        failure = CommandFailure(text, code="FN-0024")
    except UnicodeEncodeError as exc:
        # Python encodes the name of a file in the locale's encoding.
        failure = CommandFailure(
            f"{exc.object!a}: the encoding of this locale ({exc.encoding}) lacks a character of it, expected UTF-8; "
            "set LC_ALL=C.UTF-8",
            code="FN-1467",
        )
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in EXTRAS_OF:
            raise
        extras = ",".join(extras_for(name, library))
        # Only the Plan's file determines whether an App must be exported.
        more = ", or 'fanin[server,export]' for a plan with an App" if (name, extras) == ("run", "server") else ""
        failure = CommandFailure(
            f"{library} is not installed here; pip install 'fanin[{extras}]'{more}", code="FN-0025"
        )
    except KeyboardInterrupt:
        return 130
    report(f"fanin {name}", failure, words)
    return 1


def _owner(error: OSError) -> str:
    """Return who owns the path of an error of permissions, if that is another user than this one."""
    if REMEDIES.get(error.errno or 0) != _PERMISSIONS or not isinstance(error.filename, str | Path):
        return ""
    path = Path(error.filename)
    for each in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = each.stat().st_uid
            return (
                "" if owner == os.geteuid() else f" ({each} belongs to user {owner}, and this is user {os.geteuid()})"
            )
    return ""


def complete(argv: Sequence[str]) -> int:
    """Run ``fanin completion``."""
    from fanin.commands.shell.completion import print_script

    summaries = {name: subcommand.summary for name, subcommand in SUBCOMMANDS.items()}
    return print_script(argv, summaries | dict.fromkeys(other_commands(), "(installed by another package)"), _run)


def extras_for(subcommand: str, library: str) -> tuple[str, ...]:
    """Return the extras to install for a subcommand that lacks ``library``: everything that the subcommand needs."""
    entry = SUBCOMMANDS.get(subcommand)
    needed = () if entry is None else entry.extras
    providers = EXTRAS_OF[library]
    return needed if set(needed) & set(providers) else (*needed, providers[0])


def _load(subcommand: Subcommand) -> Main:
    function: Main = getattr(import_module(f"fanin.commands.{subcommand.module}"), subcommand.function)
    return function


def _unknown(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"got subcommand {name!r}, expected one of {', '.join(known)}{hint}"


def _help(others: Sequence[str]) -> str:
    width = max(map(len, [*SUBCOMMANDS, *others])) + 2
    lines = ["usage: fanin SUBCOMMAND [OPTIONS]", "", "Train one model across a datacenter and a million devices.", ""]
    lines += [f"  {name:{width}}{subcommand.summary}" for name, subcommand in SUBCOMMANDS.items()]
    lines += [f"  {name:{width}}(installed by another package)" for name in others]
    lines += ["", "fanin SUBCOMMAND --help lists the options; fanin --version prints the version.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

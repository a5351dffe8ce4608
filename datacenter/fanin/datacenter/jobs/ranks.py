"""Start of torchrun's agent and of its ranks. Run it as ``python -m fanin.datacenter.jobs.ranks`` with torchrun's
arguments, of which the last ones are a program and the program's arguments.

    launcher
      agent (this module imports torch and the engine, then ``jobs.agent``)
        fork server: forked from it before it has threads; computes nothing
          rank, rank, ...: forked from the server, in each attempt

An import of torch and of fanin's engine takes seconds of a processor. With a fork server a machine imports them once
for each job, instead of once for each rank and attempt. So a job starts and restarts sooner. It is torchrun's own start
method ``forkserver``, which needs a function instead of a command: ``run_program``.

A program is a module, or a file, with a function ``main(arguments) -> status``. This module imports no torch, because
each rank runs it again.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Final, NoReturn

FORK_SERVER: Final = "forkserver"
SPAWN: Final = "spawn"
"""Start method where a process that has imported torch cannot be forked safely, as on macOS."""
ENGINE: Final = "fanin.datacenter.jobs.job"
"""The module whose imports every program shares."""
SIGNALS: Final = frozenset({signal.SIGTERM})


def run_program(program: str, *arguments: str) -> NoReturn:
    """Run a program as this rank, and end the process with its status; with 1 if it raises.

    Args:
        program: A module's name, or a file that ends with ``.py``.
        arguments: The arguments of its ``main``.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = 1
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).resolve().parent))
            main = runpy.run_path(program)["main"]
        else:
            main = import_module(program).main
        status = main(arguments)
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            # torch would report it to the agent alone; the launcher reads the log of the rank.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # As in jobs/job.py: gloo's threads may outlive the static objects that they use.
        os._exit(status)


def start_server(modules: Sequence[str]) -> str:
    """Import modules, fork this process as the fork server of ranks, and return the start method of ranks.

    The imported modules are exempt from garbage collection. Otherwise each full collection of a rank would visit
    300,000 objects and copy their pages.

    The server keeps SIGTERM blocked. A scheduler may send it to all processes of a job, and a server that ended would
    take its ranks along before they have saved. ``run_program`` unblocks it.

    Args:
        modules: Modules to import before the fork. They must not start threads.
    """
    if sys.platform != "linux":
        return SPAWN
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()
    multiprocessing.set_forkserver_preload([])
    # Its start unblocks SIGTERM, so it comes first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    start_interpreter = util.spawnv_passfds
    # The standard library has no parameter for it: its server is a new interpreter, which would import all again.
    util.spawnv_passfds = _fork_interpreter
    try:
        forkserver.ensure_running()
    except OSError:
        # The path of its socket is longer than a socket's may be: TMPDIR is.
        return SPAWN
    finally:
        util.spawnv_passfds = start_interpreter
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return FORK_SERVER


def _fork_interpreter(path: bytes, args: Sequence[object], passfds: Sequence[int]) -> int:
    """Run the last argument, Python code, in a fork of this process, instead of in a new interpreter at ``path``.

    Other files than ``passfds`` are closed, as in a new interpreter. Among them are the locks of the job's folder, and
    the pipe by whose end the server notices that this process has ended.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for file in _open_files() - set(passfds):
            os.close(file)
        exec(str(args[-1]), {})
    finally:
        os._exit(0)


def _open_files() -> frozenset[int]:
    """Return the open files of this process, without standard input, output and error."""
    files = {int(path.name): path for path in Path("/proc/self/fd").iterdir()}
    # The file that lists the folder is closed again.
    return frozenset(file for file, path in files.items() if file > 2 and path.exists())


if __name__ == "__main__":
    start_method = start_server((ENGINE,))
    # It imports torch, so it comes after the start: where ranks are spawned, each of them runs this module.
    from fanin.datacenter.jobs import agent

    agent.main(["--start-method", start_method, *sys.argv[1:]], run_program)

"""Agent: torchrun with four changes. ``jobs.ranks`` starts it.

- It ends with its launcher. A launcher that is killed cannot end its torchrun, which would continue to train unnoticed,
  or act for a machine that was given up. The agent instead stops itself with SIGTERM, so its ranks save and end.
- When a machine joins, the running ranks have the full shutdown timeout to save before they restart. torch allows 30 s.
- One endpoint serves one job. The first machine writes the job's id into the rendezvous store, and a machine with
  another id ends with status ``OTHER_JOB``. Plain torchrun would start a second job in the same folder.
- Ranks are forked from a process that has imported torch. Plain torchrun starts an interpreter for each.
"""

import os
import signal
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, parse_args

from fanin.datacenter.ranks.elastic import OTHER_JOB, RENDEZVOUS, end_with_parent


class Agent(LocalElasticAgent):
    """torch's agent, which also applies the shutdown timeout when it restarts ranks."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)


class RankProcesses(MultiprocessContext):
    """torch's context of forked ranks, of which one is done when its process has ended with status 0.

    torch waits for the result of a function instead, and a rank waits until all results were read. A rank that saves
    and ends on SIGTERM would then be killed after the shutdown timeout.
    """

    def _poll(self) -> RunProcsResult | None:
        if self._pc is None or any(process.exitcode != 0 for process in self._pc.processes):
            return super()._poll()
        self.close()
        results = dict.fromkeys(range(self.nprocs))
        return RunProcsResult(return_values=results, stdouts=self.stdouts, stderrs=self.stderrs)


class RendezvousBackend(C10dRendezvousBackend):
    """torch's rendezvous backend, registered under our name."""

    @property
    def name(self) -> str:
        """The name for ``--rdzv-backend``."""
        return RENDEZVOUS


def belongs_to_job(store: Store, job: str) -> bool:
    """Return whether a rendezvous store belongs to this job. The first job to call this owns the store."""
    return bool(store.compare_set("fanin.job", "", job) == job.encode())


def create_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return torch's rendezvous handler. End the process if the store belongs to another job."""
    _, store = create_backend(parameters)
    if not belongs_to_job(store, parameters.run_id):
        os._exit(OTHER_JOB)
    return create_handler(store, RendezvousBackend(store, parameters.run_id), parameters)


@record
def main(arguments: Sequence[str], run_program: Callable[..., None]) -> None:
    """Run the ranks of this machine until the job ends.

    Args:
        arguments: torchrun's arguments, the last ones a program and the program's own.
        run_program: Function that a rank calls with the program and its arguments.
    """
    # torch has no parameters for these classes.
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    multiprocessing.MultiprocessContext = RankProcesses  # type: ignore[misc]
    rendezvous_handler_registry.register(RENDEZVOUS, create_rendezvous)
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    parsed = parse_args(list(arguments))  # type: ignore[no-untyped-call]  # torch's own
    config, _, _ = config_from_args(parsed)
    api.elastic_launch(config, run_program)(parsed.training_script, *parsed.training_script_args)

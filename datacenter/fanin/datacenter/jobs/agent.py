"""Agent: torchrun with three changes. Run it as ``python -m fanin.datacenter.jobs.agent`` with torchrun's arguments.

- It ends with its launcher. A launcher that is killed cannot end its torchrun, which would continue to train unnoticed,
  or act for a machine that was given up. The agent instead stops itself with SIGTERM, so its ranks save and end.
- When a machine joins, the running ranks get the full shutdown timeout to save before they restart. torch allows 30 s.
- One endpoint serves one job. The first machine writes the job's id into the rendezvous store, and a machine with
  another id ends with status ``OTHER_JOB``. Plain torchrun would start a second job in the same folder.
"""

import os
import signal

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher import api
from torch.distributed.run import main

from fanin.datacenter.ranks.elastic import OTHER_JOB, PARENT, RENDEZVOUS, end_with_parent


class Agent(LocalElasticAgent):
    """torch's agent, which also applies the shutdown timeout when it restarts ranks."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)


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


if __name__ == "__main__":
    # torch has no parameter for the class of its agent.
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    rendezvous_handler_registry.register(RENDEZVOUS, create_rendezvous)
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    # The ranks watch this process.
    os.environ[PARENT] = str(os.getpid())
    main()

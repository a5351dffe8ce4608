"""torchrun that ends with its launcher: ``python -m fanin.datacenter.jobs.agent`` and torchrun's own arguments.

A launcher that is killed cannot end its torchrun, which then would train on unseen, and of several machines stand in
for one that was given up. It is told to stop instead, as its launcher would have told it: its ranks save, and end.

Two more things torchrun does not do. Ranks that make way for a machine that comes get the time that it was given for
those that are stopped, where torch has 30 s. And one endpoint is for one job: the first machine leaves the job's id in
the store where they meet, and one with another id ends with status ``OTHER_JOB``; by itself torchrun would have it
begin a second job beside the first, in the same folder.
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

from fanin.datacenter.jobs.elastic import MEETING, OTHER_JOB, PARENT, end_with_parent


class Agent(LocalElasticAgent):
    """torch's own, which knows how long ranks may take to save."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)


class Meeting(C10dRendezvousBackend):
    """torch's own under our name, by which torchrun asks for it."""

    @property
    def name(self) -> str:
        """As it is registered."""
        return MEETING


def is_of_job(store: Store, job: str) -> bool:
    """Whether those who meet in this store are of this job; whoever comes first says."""
    return bool(store.compare_set("fanin.job", "", job) == job.encode())


def meet(parameters: RendezvousParameters) -> RendezvousHandler:
    """torch's own meeting, of one job."""
    _, store = create_backend(parameters)
    if not is_of_job(store, parameters.run_id):
        os._exit(OTHER_JOB)
    return create_handler(store, Meeting(store, parameters.run_id), parameters)


if __name__ == "__main__":
    # torch has no other place to say so.
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    rendezvous_handler_registry.register(MEETING, meet)
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    # For its ranks.
    os.environ[PARENT] = str(os.getpid())
    main()

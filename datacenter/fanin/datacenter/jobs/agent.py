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
from contextlib import ExitStack

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from fanin.datacenter.ranks.elastic import OTHER_JOB, end_with_parent


class Agent(LocalElasticAgent):
    """torch's agent of this machine, for ranks that end their processes by themselves.

    It overrides two of the methods by which torch's agents differ.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report success when all ranks have ended with status 0.

        torch waits for the result of a function instead, and a rank waits until all results were read. A rank that
        saves and ends on SIGTERM would then be killed after the shutdown timeout.
        """
        ranks = self._pcontext
        assert isinstance(ranks, MultiprocessContext) and ranks._pc is not None, "the ranks were started"
        if any(process.exitcode != 0 for process in ranks._pc.processes):
            return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]  # its decorator
        results = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=results)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks before a restart, within the shutdown timeout."""
        self._shutdown(timeout=self._shutdown_timeout)


def belongs_to_job(store: Store, job: str) -> bool:
    """Return whether a rendezvous store belongs to this job. The first job to call this owns the store."""
    return bool(store.compare_set("fanin.job", "", job) == job.encode())


def join_rendezvous(config: LaunchConfig) -> RendezvousHandler:
    """Return torch's handler of a rendezvous. End the process if the store belongs to another job."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    backend, store = create_backend(parameters)
    if not belongs_to_job(store, parameters.run_id):
        os._exit(OTHER_JOB)
    return create_handler(store, backend, parameters)


@record
def main(arguments: Sequence[str], run_program: Callable[..., None]) -> None:
    """Run the ranks of this machine until the job ends.

    Args:
        arguments: torchrun's arguments, the last ones a program and the program's own.
        run_program: Function that a rank calls with the program and its arguments.

    Raises:
        ChildFailedError: A rank has failed, and no restart is left.
    """
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    parsed = parse_args(list(arguments))  # type: ignore[no-untyped-call]  # torch's own
    config, _, _ = config_from_args(parsed)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=run_program,
        args=(parsed.training_script, *parsed.training_script_args),
        rdzv_handler=join_rendezvous(config),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
    )
    assert config.logs_specs is not None and config.shutdown_timeout is not None, "torchrun's arguments have defaults"
    agent = Agent(spec, config.logs_specs, config.start_method, shutdown_timeout=config.shutdown_timeout)
    with ExitStack() as rendezvous:
        rendezvous.callback(spec.rdzv_handler.shutdown)
        try:
            result = agent.run()
        except SignalException:
            # The rendezvous stays open: other machines continue, and this one may join again.
            rendezvous.pop_all()
            raise
    if result.is_failed():
        raise ChildFailedError(parsed.training_script, result.failures)

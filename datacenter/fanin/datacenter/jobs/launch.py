"""Launcher of training jobs: checks a job, runs its ranks, and returns its result or one clear error.

``train`` is the public function behind ``fanin train`` and ``fanin.datacenter.train``. ``launch`` is its core, for
callers that choose every argument. The files in the job's folder decide about success, because torchrun exits with
status 1 even after an orderly stop.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.config.communication import check_checkpointable
from fanin.datacenter.config.train_config import TrainConfig, check_config, fit_config, read_train_config
from fanin.datacenter.files.folders import check_folder, check_renamed, locked_folders
from fanin.datacenter.files.jobfiles import (
    MACHINES,
    ROWS_FILE,
    SEED_FILE,
    TrainResult,
    clear,
    is_complete,
    outcome_files,
    read_error,
    read_result,
    write_config,
    write_result,
)
from fanin.datacenter.jobs.job import train_alone
from fanin.datacenter.jobs.torchrun import (
    ONE_MACHINE,
    STOP_S,
    Elastic,
    check_processes,
    failure_reason,
    folders_to_lock,
    run_locked,
)
from fanin.datacenter.observers.observer import TrainingObserver
from fanin.datacenter.ranks.devices import device_type
from fanin.datacenter.ranks.elastic import OTHER_JOB
from fanin.protos.errors import Conflict, FaninError, InvalidInput


def train(
    config: TrainConfig | Path | str,
    *,
    num_processes: int | None = None,
    folder: Path | None = None,
    elastic: Elastic = ONE_MACHINE,
    observers: Sequence[TrainingObserver] = (),
) -> TrainResult:
    """Train a model in the datacenter: data, tensor and pipeline parallel in any mix, with one process's numbers.

    The ranks are processes of their own. With ``observers`` the one rank is this process.

    Args:
        config: The job, or the path of its TOML file.
        num_processes: Ranks on each machine; by default the ranks of the mesh, divided by the number of machines.
        folder: Folder for the job's files and logs, which several machines share; by default a temporary one.
        elastic: The restarts and the machines.
        observers: Objects that receive the events of a job of one rank. A job of several ranks names its observers in
            ``[watch] observers``.

    Returns:
        The metrics of the job, and the parameters if the model is an App.

    Raises:
        InvalidInput: The job cannot run, and nothing was started; or an observer has failed.
        Conflict: The job failed; the message names the rank that hung, or has the end of the failed rank's log.
        Diverged: The loss or the gradients are not finite.
    """
    job = config if isinstance(config, TrainConfig) else read_train_config(Path(config))
    if elastic.multi_machine and folder is None:
        raise InvalidInput(
            f"machines: got {elastic.min_nodes} to {elastic.max_nodes} and no folder (--state), expected a "
            "folder that all machines share"
        )
    local = ranks_per_machine(job, elastic) if num_processes is None else num_processes
    # Without a folder, ``launch`` raises the error about the shared folder on several machines.
    needs_period = job.checkpoints.folder is not None or not elastic.multi_machine
    if elastic.max_restarts and not job.checkpoints.every and needs_period:
        raise InvalidInput(
            f"restarts (--restarts): got {elastic.max_restarts} and no checkpoints on the way, expected a folder "
            "and a period (--checkpoints FOLDER, --checkpoint-every STEPS, or those keys of the config): a job that "
            "lost a rank would start from its first step"
        )
    if observers and (local > 1 or elastic != ONE_MACHINE):
        raise InvalidInput(
            f"observers: got {len(observers)} objects for {local} ranks on {elastic.max_nodes} machines with "
            f"{elastic.max_restarts} restarts, expected one rank without restarts: objects cannot be sent to other "
            "processes; name their factories in [watch] observers"
        )
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fanin-train-")))
        return _train_here(job, folder, observers) if observers else launch(job, local, folder, elastic)


def _train_here(config: TrainConfig, folder: Path, observers: Sequence[TrainingObserver]) -> TrainResult:
    """Run a job of one rank in this process."""
    _check(config, 1, folder, ONE_MACHINE)
    with locked_folders(folders_to_lock(folder, config.checkpoints.folder, ONE_MACHINE), STOP_S):
        clear(folder)
        (folder / ROWS_FILE).unlink(missing_ok=True)
        result = train_alone(config, folder, observers)
        write_result(folder, result)
    if result.failure:
        raise InvalidInput(result.failure)
    return result


def ranks_per_machine(config: TrainConfig, elastic: Elastic = ONE_MACHINE) -> int:
    """Return the ranks on each machine if the config's mesh spans all machines. Raises InvalidInput."""
    mesh, num_nodes = config.parallel.mesh, elastic.max_nodes
    if mesh.num_ranks % num_nodes:
        raise InvalidInput(
            f"mesh: got {mesh} of {mesh.num_ranks} ranks for {num_nodes} machines, expected a number of ranks "
            f"that {num_nodes} divides; give the mesh of all machines, or set --nproc to the processes of each machine"
        )
    return mesh.num_ranks // num_nodes


def launch(config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> TrainResult:
    """Run a job and return its result.

    If the number of machines may change, the mesh is fitted to the present machines.

    Args:
        config: The job.
        num_processes: Ranks on each machine.
        folder: Folder for the job's files.
        elastic: The restarts and the machines.

    Raises:
        InvalidInput: The job cannot run. Nothing was started.
        Conflict: The job failed without reporting an error. The message names the rank that hung, or has the end of the
            failed rank's log.
        FaninError: The error that the job reported.
    """
    _check(config, num_processes, folder, elastic)
    with locked_folders(folders_to_lock(folder, config.checkpoints.folder, elastic), STOP_S) as locks:
        if not elastic.multi_machine:
            clear(folder)
            for name in (ROWS_FILE, SEED_FILE):
                (folder / name).unlink(missing_ok=True)
        # Files that exist already belong to an earlier job.
        before = outcome_files(folder)
        path = str(write_config(config, folder, shared=elastic.multi_machine))
        program = ["fanin.datacenter.jobs.job", *([MACHINES] if elastic.multi_machine else []), path]
        returncode = run_locked(program, num_processes, folder, elastic, locks)
        return outcome(folder, elastic, returncode, outcome_files(folder) - before)


def outcome(folder: Path, elastic: Elastic, returncode: int, new: set[tuple[str, int]]) -> TrainResult:
    """Return the result of ranks that have ended, or raise their error.

    Args:
        folder: The job's folder.
        elastic: The restarts and the machines.
        returncode: torchrun's exit status.
        new: The outcome files that the job has written, from ``outcome_files``.
    """
    error: FaninError | None = None
    if returncode == OTHER_JOB:
        # The files belong to the other job.
        pass
    elif is_complete(new):
        result = read_result(folder)
        if not (elastic.multi_machine and result.metrics.stopped):
            return result
        # The launcher on the machine that received the signal is interrupted, and does not reach this line.
        error = Conflict(
            f"datacenter job: another machine was stopped after {len(result.metrics.trained.losses)} steps, and the "
            "job could not continue without it; run the same command on all machines to resume from the checkpoint; "
            f"{failure_reason(folder, returncode)}"
        )
    elif new:
        error = read_error(folder)
    raise error or Conflict(f"datacenter job: {failure_reason(folder, returncode)}")


def _check(config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic) -> None:
    """Check a job and create its folders. Raises InvalidInput."""
    check_processes(num_processes)
    _check_machines(config, num_processes, elastic)
    device_type(config.parallel.device, num_processes)
    check_checkpointable(config.communication, config.checkpoints.folder)
    _check_resume(config)
    _check_writable(config, folder)


def _check_machines(config: TrainConfig, num_processes: int, elastic: Elastic) -> None:
    """Raise InvalidInput unless the job can run on every allowed number of machines."""
    if elastic.min_nodes == elastic.max_nodes:
        check_config(config, num_processes * elastic.max_nodes)
        return
    if config.checkpoints.folder is None:
        raise InvalidInput(
            f"datacenter job: got {elastic.min_nodes} to {elastic.max_nodes} nodes and no folder for checkpoints, "
            "expected a checkpoint folder that all machines share: the job resumes from it when a machine joins or "
            "leaves"
        )
    for num_nodes in range(elastic.min_nodes, elastic.max_nodes + 1):
        try:
            fit_config(config, num_nodes * num_processes)
        except InvalidInput as exc:
            raise InvalidInput(f"on {num_nodes} machines of {num_processes} processes: {exc}") from exc


def _check_writable(config: TrainConfig, folder: Path) -> None:
    """Create the folders that a job writes to. Raises InvalidInput if any file could not be written."""
    checkpoints, weights = config.checkpoints.folder, config.checkpoints.weights
    # The weights may go into a folder that is created below.
    created = {each.resolve() for each in (checkpoints, folder) if each is not None}
    if weights is not None and (weights.is_dir() or weights.parent.resolve() not in created):
        check_renamed(weights, f"checkpoints: got weights {weights}")
    if checkpoints is not None:
        check_folder(checkpoints, f"checkpoints: got folder {checkpoints}", create=True)
    check_folder(folder, f"datacenter job: got folder {folder}", create=True)


def _check_resume(config: TrainConfig) -> None:
    """Raise InvalidInput if the job is to resume from a folder without a checkpoint."""
    folder, resume = config.checkpoints.folder, config.checkpoints.resume
    # The job's own checkpoints have priority over those in ``resume``.
    marked = [each for each in (folder, resume) if each is not None and (each / MARKER).exists()]
    if resume is not None and resume != folder and not marked:
        raise InvalidInput(f"checkpoints: got resume {resume}, expected a folder with a whole checkpoint")

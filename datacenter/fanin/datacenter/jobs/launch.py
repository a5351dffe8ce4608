"""Launcher of training jobs: checks a job, runs its ranks, and returns its result or one clear error.

``train`` is the public function behind ``fanin train`` and ``fanin.datacenter.train``. ``launch`` is its core, for
callers that choose every argument. The files in the job's folder decide about success, because torchrun exits with
status 1 even after an orderly stop.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.config.train_config import TrainConfig, check_config, check_fitted, read_train_config
from fanin.datacenter.files.folders import check_folder, check_renamed, locked_folders
from fanin.datacenter.files.jobfiles import (
    CALLER_FILE,
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
from fanin.datacenter.jobs.calls import Ask, CallAfterStep, StepCalls, answered
from fanin.datacenter.jobs.initial import InitialParameters, write_initial
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.torchrun import (
    ONE_MACHINE,
    STOP_S,
    Elastic,
    failure_reason,
    folders_to_lock,
    run_locked,
)
from fanin.datacenter.observers.events import StepEnded
from fanin.datacenter.observers.loading import RankPlace, guest_of
from fanin.datacenter.observers.observer import TrainingObserver
from fanin.datacenter.ranks.devices import device_type
from fanin.datacenter.ranks.elastic import OTHER_JOB
from fanin.protos.errors import Conflict, FaninError, InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the ranks of a job run.

    Attributes:
        num_processes: Ranks on each machine; by default the ranks of the mesh, divided by the number of machines.
        folder: Folder for the job's files and logs, which several machines share; by default a temporary one.
        elastic: The restarts and the machines.
        observers: Objects that receive the events of a job of one rank, which then is this process. A job of several
            ranks names its observers in ``[watch] observers``.
    """

    num_processes: int | None = None
    folder: Path | None = None
    elastic: Elastic = ONE_MACHINE
    observers: Sequence[TrainingObserver] = ()


def train(
    config: TrainConfig | Path | str,
    *,
    initial: InitialParameters | None = None,
    should_continue: Callable[[], bool] | None = None,
    on_step: Callable[[StepEnded], None] | None = None,
    placement: Placement = Placement(),
) -> TrainResult:
    """Train a model in the datacenter: data, tensor and pipeline parallel in any mix, with one process's numbers.

    The ranks are processes of their own, except for the one rank of a ``placement`` with observers. The training waits
    while ``on_step`` and ``should_continue`` run, which is in another thread unless the rank is this process. An error
    of theirs ends the training as if ``should_continue`` had returned False, and is then raised here.

    Args:
        config: The job, or the path of its TOML file.
        initial: The parameters to start from instead of ``[model] initial``, as float32 arrays by name or as one flat
            array in the order of names, such as those of a Version. Checkpoints of the job have priority.
        should_continue: Called after each step. If it returns False, the training ends with a checkpoint alone, and
            ``metrics.stopped`` is True. The same call resumes it.
        on_step: Called after each step with its number, loss, and tokens or samples (``units``). After a restart the
            steps since the last checkpoint are repeated.
        placement: Where the ranks run.

    Returns:
        The metrics of the job, and the parameters if the model is an App.

    Raises:
        InvalidInput: The job cannot run, and nothing was started; or an observer has failed.
        Conflict: The job failed; the message names the rank that hung, or has the end of the failed rank's log.
        Diverged: The loss or the gradients are not finite.
    """
    job = config if isinstance(config, TrainConfig) else read_train_config(Path(config))
    calls = StepCalls(should_continue, on_step)
    elastic, observers = placement.elastic, placement.observers
    local = ranks_per_machine(job, elastic) if placement.num_processes is None else placement.num_processes
    _check_placement(job, local, placement, has_calls=bool(calls))
    with ExitStack() as stack:
        folder = placement.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fanin-train-")))
        if initial is not None:
            job = write_initial(job, initial, folder)
            if not elastic.multi_machine and job.model.initial is not None:
                stack.callback(job.model.initial.unlink)
        try:
            if observers:
                return _train_here(job, folder, observers, calls)
            return launch(job, local, folder, elastic, calls if calls else None)
        finally:
            if calls.error is not None:
                raise calls.error


def _check_placement(config: TrainConfig, num_processes: int, placement: Placement, *, has_calls: bool) -> None:
    """Raise InvalidInput unless a job can run in this place with these calls."""
    elastic, num_observers = placement.elastic, len(placement.observers)
    if elastic.multi_machine and placement.folder is None:
        raise InvalidInput(
            f"machines: got {elastic.min_nodes} to {elastic.max_nodes} and no folder (--state), expected a "
            "folder that all machines share",
            code="FN-1353",
        )
    # Without a folder, ``launch`` raises the error about the shared folder on several machines.
    needs_period = config.checkpoints.folder is not None or not elastic.multi_machine
    if elastic.max_restarts and not config.checkpoints.every and needs_period:
        raise InvalidInput(
            f"restarts (--restarts): got {elastic.max_restarts} and no checkpoints on the way, expected a folder "
            "and a period (--checkpoints FOLDER, --checkpoint-every STEPS, or those keys of the config): a job that "
            "lost a rank would start from its first step",
            code="FN-1354",
        )
    if num_observers and (num_processes > 1 or elastic != ONE_MACHINE):
        raise InvalidInput(
            f"observers: got {num_observers} objects for {num_processes} ranks on {elastic.max_nodes} machines with "
            f"{elastic.max_restarts} restarts, expected one rank without restarts: objects cannot be sent to other "
            "processes; name their factories in [watch] observers",
            code="FN-1355",
        )
    if has_calls and elastic.multi_machine:
        raise InvalidInput(
            f"should_continue, on_step: got functions for {elastic.max_nodes} machines, expected one machine: each "
            "machine has a caller of its own; name the factory of an observer in [watch] observers",
            code="FN-1355",
        )


def _train_here(
    config: TrainConfig, folder: Path, observers: Sequence[TrainingObserver], calls: StepCalls
) -> TrainResult:
    """Run a job of one rank in this process. SIGTERM keeps the handler of the caller."""
    _check(config, 1, folder, ONE_MACHINE)
    guests = [guest_of(f"{index} ({type(each).__name__})", each) for index, each in enumerate(observers)]
    with locked_folders(folders_to_lock(folder, config.checkpoints.folder, ONE_MACHINE), STOP_S):
        _clear(folder)
        result = train_rank(config, RankPlace(folder=folder), observers=[*guests, CallAfterStep(calls)])
        write_result(folder, result)
    if result.failure:
        raise InvalidInput(result.failure, code="FN-1362")
    return result


def _clear(folder: Path) -> None:
    """Remove the files of an earlier job of this machine."""
    clear(folder)
    for name in (ROWS_FILE, SEED_FILE, CALLER_FILE):
        (folder / name).unlink(missing_ok=True)


def ranks_per_machine(config: TrainConfig, elastic: Elastic = ONE_MACHINE) -> int:
    """Return the ranks on each machine if the config's mesh spans all machines. Raises InvalidInput."""
    mesh, num_nodes = config.parallel.mesh, elastic.max_nodes
    if mesh.num_ranks % num_nodes:
        raise InvalidInput(
            f"mesh: got {mesh} of {mesh.num_ranks} ranks for {num_nodes} machines, expected a number of ranks "
            f"that {num_nodes} divides; give the mesh of all machines, or set --nproc to the processes of each machine",
            code="FN-1266",
        )
    return mesh.num_ranks // num_nodes


def launch(
    config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE, ask: Ask | None = None
) -> TrainResult:
    """Run a job and return its result.

    If the number of machines may change, the mesh is fitted to the present machines.

    Args:
        config: The job.
        num_processes: Ranks on each machine.
        folder: Folder for the job's files.
        elastic: The restarts and the machines.
        ask: Function that the first rank calls after each step; None for none.

    Raises:
        InvalidInput: The job cannot run. Nothing was started.
        Conflict: The job failed without reporting an error. The message names the rank that hung, or has the end of the
            failed rank's log.
        FaninError: The error that the job reported.
    """
    _check(config, num_processes, folder, elastic)
    with locked_folders(folders_to_lock(folder, config.checkpoints.folder, elastic), STOP_S) as locks:
        if not elastic.multi_machine:
            _clear(folder)
        # Files that exist already belong to an earlier job.
        before = outcome_files(folder)
        path = str(write_config(config, folder, shared=elastic.multi_machine))
        program = ["fanin.datacenter.jobs.job", *([MACHINES] if elastic.multi_machine else []), path]
        with nullcontext() if ask is None else answered(ask, folder):
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
            f"{failure_reason(folder, returncode)}",
            code="FN-1357",
        )
    elif new:
        error = read_error(folder)
    raise error or Conflict(f"datacenter job: {failure_reason(folder, returncode)}", code="FN-1358")


def _check(config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic) -> None:
    """Check a job and create its folders. Raises InvalidInput."""
    _check_machines(config, num_processes, elastic)
    device_type(config.parallel.device, num_processes)
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
            "leaves",
            code="FN-1353",
        )
    for num_nodes in range(elastic.min_nodes, elastic.max_nodes + 1):
        try:
            check_fitted(config, num_nodes * num_processes)
        except InvalidInput as exc:
            raise InvalidInput(f"on {num_nodes} machines of {num_processes} processes: {exc}", code=exc.code) from exc


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
        raise InvalidInput(
            f"checkpoints: got resume {resume}, expected a folder with a complete checkpoint", code="FN-1341"
        )

"""The program of one rank: ``python -m torch.distributed.run --nproc-per-node N -m fanin.datacenter.job CONFIG.json``.

Every rank reads the same config and data, takes its part of each batch, and comes to the same parameters; rank 0
writes them. What is wrong with the config, the App or the data is found before the first collective, on every
rank alike, and is left in the job's folder as one of our own errors.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from fanin.clients.data import Examples, check_examples, hold_out, read_npz
from fanin.datacenter.jobfiles import TrainConfig, TrainResult, read_config, read_parameters, write_error, write_result
from fanin.datacenter.mesh import MeshShape, build_mesh
from fanin.datacenter.parameters import load_parameters, parameter_table, parameter_vector, trained_module
from fanin.datacenter.trainer import Trainer, fit
from fanin.edge.export.app import App, inputs_of, load_app
from fanin.protos.errors import FaninError, InvalidInput

COLLECTIVE_TIMEOUT: Final = timedelta(seconds=120)
"""A rank that hangs is found by its peers after this; a dead one at once."""
PARENT_POLL_S: Final = 0.5


def main(arguments: Sequence[str]) -> int:
    """Train as the config says; 0 if a result was written."""
    if len(arguments) != 1:
        sys.stderr.write(f"fanin.datacenter.job: got {len(arguments)} arguments, expected one: the config's path\n")
        return 2
    _end_with_parent()
    try:
        config = read_config(Path(arguments[0]))
    except InvalidInput as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return 2
    try:
        with _process_group() as (rank, world_size):
            result = train(config, rank, world_size)
    except FaninError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        write_error(config.folder, exc)
        return 1
    if rank == 0:
        write_result(config.folder, result)
    return 0


def train(config: TrainConfig, rank: int, world_size: int) -> TrainResult:
    """Train on this rank. Raises InvalidInput and the App's own errors."""
    shape = MeshShape(dp_replicate=world_size if config.dp_replicate is None else config.dp_replicate)
    shape.check(world_size)
    app = load_app(config.app)
    train_part, validation = _data(config, app)
    module = trained_module(app)
    if config.initial is not None:
        load_parameters(module, *read_parameters(config.initial))
    mesh = None if world_size == 1 else build_mesh(shape, world_size)
    trainer = Trainer(module, app.loss, config.training, mesh)
    started_s = time.monotonic()
    trained = fit(trainer, train_part, validation, config.training)
    return TrainResult(
        table=parameter_table(module),
        parameters=parameter_vector(module),
        trained=trained,
        num_ranks=world_size,
        train_s=time.monotonic() - started_s,
    )


def _data(config: TrainConfig, app: App) -> tuple[Examples, Examples]:
    found = read_npz(config.data)
    examples = Examples(x=inputs_of(app, torch.from_numpy(found.x)).numpy(), y=found.y)
    check_examples(examples, app.input_shape, app.num_classes)
    if config.num_validation >= len(examples):
        raise InvalidInput(
            f"{config.data}: got {len(examples)} examples, expected more than the {config.num_validation} "
            "that num_validation holds out"
        )
    return hold_out(examples, config.num_validation, np.random.default_rng(config.training.seed))


@contextmanager
def _process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size) of the group that torchrun's environment describes."""
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End at once when torchrun's agent is gone: a rank whose agent was killed would train on unseen."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch 2.13's gloo threads may still be there when C++ statics are destroyed, and then a rank
    # that has done all its work aborts ("terminate called without an active exception", 3 runs of 8).
    os._exit(status)

"""A coordinator to be measured: ``fanin serve`` in a process of its own, with a Run of a model that is no model.

The model has one tensor, its graphs are no graphs; the devices send fresh random values each Round, so every Version
differs from the one before.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import click
import typer

from fanin.clients.operator import Operator
from fanin.clients.testing import synthetic_bundle
from fanin.commands.console.terminal import DEFAULT_STATE, connect
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan

RUN_ID: Final = "bench"
PUBLISHER: Final = "publisher.pub"
MEGABYTE: Final = 1 << 20
VALUE_BYTES: Final = 4
MAX_MEGABYTES: Final = 1 << 16
"""64 GB: more than any machine that this is for has of memory."""
DEADLINE_S: Final = 3600.0
MAX_EXAMPLES: Final = 4096

ClientsOption = Annotated[int, typer.Option("--clients", min=1, help="How many devices.")]
MegabytesOption = Annotated[float, typer.Option("--megabytes", help="Size of the model, in units of 2^20 bytes.")]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", file_okay=False, help="An empty folder on the disk to measure; default: a temporary one."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the coordinator: so many devices, a model of so many values, so many Rounds."""

    num_clients: int
    num_values: int
    num_rounds: int

    @property
    def model_bytes(self) -> int:
        """What a Version or an Update of ``fixed32`` takes."""
        return self.num_values * VALUE_BYTES


def load_of(clients: int, megabytes: float, rounds: int) -> Load:
    """What the options say. Raises UsageError for a model of no size."""
    # Not a number is compared with none.
    num_values = int(megabytes * MEGABYTE) // VALUE_BYTES if 0 < megabytes <= MAX_MEGABYTES else 0
    if num_values < 1:
        raise click.UsageError(f"--megabytes: got {megabytes:g}, expected 4 bytes or more, up to {MAX_MEGABYTES}")
    return Load(num_clients=clients, num_values=num_values, num_rounds=rounds)


@contextlib.contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """Where a benchmark keeps its files. Raises UsageError for a folder that holds something."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="fanin-bench-") as made:
            yield Path(made)
        return
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"--folder: {folder} is not empty; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def state_of(folder: Path) -> Path:
    """The coordinator's folder."""
    return folder / DEFAULT_STATE


@contextlib.contextmanager
def operating(folder: Path) -> Iterator[Operator]:
    """The operator's side of the coordinator."""
    with connect(state_of(folder)) as operator:
        yield operator


def begin_run(folder: Path, load: Load) -> None:
    """Publish the model and start the Run, whose Rounds take every device."""
    publisher = SigningKey.generate()
    (folder / PUBLISHER).write_text(publisher.public)
    bundle = synthetic_bundle(folder / "bundle", publisher, {"weights": (load.num_values,)})
    plan = Plan(
        name=RUN_ID,
        cohort=CohortPlan(
            concurrency=load.num_clients, buffer=load.num_clients, quorum=load.num_clients, deadline_s=DEADLINE_S
        ),
        training=Training(epochs=1, learning_rate=0.1, seed=1),
        codec=CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(max_examples=MAX_EXAMPLES),
        stop=StopPlan(max_rounds=load.num_rounds),
    )
    with operating(folder) as operator:
        operator.publish_bundle(bundle)
        operator.start_run(RUN_ID, plan, bundle, publisher)

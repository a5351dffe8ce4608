"""The coordinator under test: ``fanin serve`` in its own process, with a Run of a synthetic model.

The model has one tensor and invalid graphs. The devices send fresh random values each Round, so all Versions differ.
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
from fanin.commands.console.terminal import DEFAULT_STATE, connect
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.simulation.federation.synthetic import synthetic_bundle

RUN_ID: Final = "bench"
PUBLISHER: Final = "publisher.pub"
MEGABYTE: Final = 1 << 20
VALUE_BYTES: Final = 4
MAX_MEGABYTES: Final = 1 << 16
"""64 GB: more than the memory of any machine that this benchmark is for."""
DEADLINE_S: Final = 3600.0
MAX_EXAMPLES: Final = 4096

ClientsOption = Annotated[int, typer.Option("--clients", min=1, help="Number of devices.")]
MegabytesOption = Annotated[float, typer.Option("--megabytes", help="Size of the model, in units of 2^20 bytes.")]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", file_okay=False, help="An empty folder on the disk to measure; default: a temporary one."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load on the coordinator: number of devices, size of the model, number of Rounds, aggregation rule."""

    num_clients: int
    num_values: int
    num_rounds: int
    rule: str = "weighted_mean"

    @property
    def model_bytes(self) -> int:
        """Bytes of a Version, or of an Update with the codec ``fixed32``."""
        return self.num_values * VALUE_BYTES


def load_of(clients: int, megabytes: float, rounds: int) -> Load:
    """Return the load of these options. Raises UsageError for an invalid size."""
    # The comparison is False for NaN.
    num_values = int(megabytes * MEGABYTE) // VALUE_BYTES if 0 < megabytes <= MAX_MEGABYTES else 0
    if num_values < 1:
        raise click.UsageError(f"--megabytes: got {megabytes:g}, expected 4 bytes or more, up to {MAX_MEGABYTES}")
    return Load(num_clients=clients, num_values=num_values, num_rounds=rounds)


@contextlib.contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """Provide the folder of a benchmark. Raises UsageError if it is not empty."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="fanin-bench-") as temporary:
            yield Path(temporary)
        return
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"--folder: {folder} is not empty; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def state_of(folder: Path) -> Path:
    """Return the coordinator's folder."""
    return folder / DEFAULT_STATE


@contextlib.contextmanager
def operating(folder: Path) -> Iterator[Operator]:
    """Connect to the coordinator as its operator."""
    with connect(state_of(folder)) as operator:
        yield operator


def begin_run(folder: Path, load: Load) -> None:
    """Publish the model and start a Run whose Rounds select every device."""
    publisher = SigningKey.generate()
    (folder / PUBLISHER).write_text(publisher.public, encoding="utf-8")
    bundle = synthetic_bundle(folder / "bundle", publisher, {"weights": (load.num_values,)})
    plan = Plan(
        name=RUN_ID,
        cohort=CohortPlan(
            concurrency=load.num_clients, buffer=load.num_clients, quorum=load.num_clients, deadline_s=DEADLINE_S
        ),
        training=Training(epochs=1, learning_rate=0.1, seed=1),
        codec=CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(max_examples=MAX_EXAMPLES, rule=load.rule),
        stop=StopPlan(max_rounds=load.num_rounds),
    )
    with operating(folder) as operator:
        operator.publish_bundle(bundle)
        operator.start_run(RUN_ID, plan, bundle, publisher)

"""``fanin simulate`` and ``fanin partition``: a federation on this machine, and how its data is spread."""

import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fanin.clients.flower.initial import read_initial
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.clients.planfile import parse_plan, read_plan
from fanin.commands.console.terminal import JsonOption, QuietOption, progress, run_command, write_json
from fanin.edge.tensors import Array
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.plans import Plan
from fanin.simulation import ClientFailed, LoadedData, Natural, Partition, Partitioner, load_data, partition
from fanin.simulation.setup.progress import line_of
from fanin.simulation.setup.termination import interrupted_by_sigterm

if TYPE_CHECKING:
    from fanin.simulation import RayCluster, Result, RoundRow, SimulationEvent

DataOption = Annotated[
    str,
    typer.Option("--data", help="digits, fashion-mnist, tinyshakespeare, an .npz, .csv or .parquet file, or a folder."),
]
ClientsOption = Annotated[int, typer.Option("--clients", min=1, help="Number of clients.")]
ByOption = Annotated[
    str,
    typer.Option(
        "--by",
        help="Partitioner: iid, dirichlet, label_skew, quantity, shards, pathological, feature_skew, natural, or an "
        "installed one.",
    ),
]
AlphaOption = Annotated[
    float | None, typer.Option("--alpha", help="Unevenness of dirichlet, label_skew and quantity; 0.1 is very uneven.")
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=NUMBER", help="An option of the partitioner, as in per_client=2."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random choices.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write a figure, for example FILE.png or FILE.svg.")]
DEFAULT_ALPHA = 0.3
INTERRUPTED = 130
"""Exit status after Ctrl-C. What has ended by then is written all the same."""
BACKENDS = ("processes", "ray")
WITH_ALPHA = ("dirichlet", "label_skew", "quantity")


def simulate(argv: Sequence[str]) -> int:
    """Run ``fanin simulate``."""
    return run_command(_simulate, argv, "simulate")


def draw(argv: Sequence[str]) -> int:
    """Run ``fanin partition``."""
    return run_command(_partition, argv, "partition")


def _partition(
    data: DataOption = "digits",
    clients: ClientsOption = 10,
    by: ByOption = "dirichlet",
    alpha: AlphaOption = None,
    options: OptionOption = None,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    json: JsonOption = "",
) -> None:
    """Show how a data set is spread over clients, and draw it."""
    split = load_data(data, seed=seed)
    parts = _parts(split, clients, _partitioner(split, by, alpha, options), seed)
    if plot is not None:
        parts.plot(plot)
    row = _partition_row(parts)
    if json:
        write_json(json, row)
        return
    sizes = parts.sizes
    sys.stdout.write(
        f"{len(split.train)} examples of {data} on {len(parts)} clients, {min(sizes)} to {max(sizes)} each\n"
    )


def _simulate(
    app: Annotated[
        str,
        typer.Argument(metavar="APP", help="package.module:name, or path/to/file.py:name; none with --flower."),
    ] = "",
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.toml]", help="A plan; default: plain FedAvg.")] = None,
    data: DataOption = "digits",
    clients: ClientsOption = 100,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients of a round; default: 10.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds to run; default: 20.")] = None,
    by: ByOption = "dirichlet",
    alpha: AlphaOption = None,
    options: OptionOption = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the plan, as in training.learning_rate=0.1."),
    ] = None,
    seed: SeedOption = 0,
    engine: Annotated[
        str, typer.Option("--engine", help="How clients train: graph, vmap, or auto for the faster one.")
    ] = "graph",
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes that train clients.")] = 1,
    backend: Annotated[
        str, typer.Option("--backend", help="processes of this machine, or ray: the tasks of a Ray cluster.")
    ] = "processes",
    ray_address: Annotated[
        str, typer.Option("--ray-address", help="HOST:PORT of the cluster; default: $RAY_ADDRESS, or this machine's.")
    ] = "",
    client_cpus: Annotated[float, typer.Option("--client-cpus", help="CPUs of one training on Ray.")] = 1.0,
    client_gpus: Annotated[float, typer.Option("--client-gpus", help="GPUs of one training on Ray, as in 0.25.")] = 0.0,
    devices: Annotated[
        Path | None, typer.Option("--devices", help="A device model in TOML; docs/simulation.md.")
    ] = None,
    events: Annotated[Path | None, typer.Option("--events", help="Write the event log as JSON lines.")] = None,
    flower: Annotated[
        str, typer.Option("--flower", metavar="MODULE:APP", help="Train by this Flower app, which loads its own data.")
    ] = "",
    initial: Annotated[
        str,
        typer.Option("--initial", metavar="FILE.npz|MODULE:NAME", help="With --flower: the arrays of version 0."),
    ] = "",
    node_config: Annotated[
        str, typer.Option("--node-config", help="With --flower: KEY=VALUE ... of all clients.")
    ] = "",
    run_config: Annotated[str, typer.Option("--run-config", help="With --flower: KEY=VALUE ... of the app.")] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="Several seeds instead of one, as in 0,1,2.")] = "",
    baseline: Annotated[bool, typer.Option("--baseline", help="Train on the pooled data as well.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Folder for the record of the trainings: resume from it.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for event files.")] = None,
    plot: PlotOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rounds to a CSV file.")] = None,
    clients_csv: Annotated[
        Path | None, typer.Option("--clients-csv", help="Write a row for each client and round to a CSV file.")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Train an App or a Flower app on simulated clients of this machine, and print each round."""
    from fanin.simulation import DeviceModel, RayCluster, SimulationSettings, read_devices
    from fanin.simulation import simulate as run_simulation

    _check_files(plot, {"--csv": csv, "--clients-csv": clients_csv, "--events": events})
    names = _FlowerNames(app=flower, initial=initial, node_config=node_config, run_config=run_config)
    app, plan = names.words(app, plan)
    limits = {"cohort.concurrency": cohort, "stop.max_rounds": rounds}
    wanted = _plan('bundle="flower"' if flower else f'app="{app}"', plan, limits, overrides or ())
    each_seed = _seeds(seeds)
    cluster = _cluster(backend, RayCluster(address=ray_address, cpus=client_cpus, gpus=client_gpus))
    model = DeviceModel() if devices is None else read_devices(devices)

    def show(row: "RoundRow") -> None:
        if not json:
            sys.stdout.write(f"{line_of(row)}\n")
            sys.stdout.flush()

    with (
        progress("simulate", quiet=quiet) as step,
        interrupted_by_sigterm(),
        _event_file(events) as on_event,
        _tracebacks(),
    ):
        settings = SimulationSettings(
            plan=wanted,
            engine=engine,
            seed=0 if seeds else seed,
            seeds=each_seed,
            baseline=baseline,
            resume=resume,
            processes=processes,
            cluster=cluster,
            devices=model,
            on_round=show,
            on_event=on_event,
            quiet=True,
        )
        if flower:
            result = run_simulation(names.settings, clients, settings=replace(settings, initial=names.arrays()))
        else:
            from fanin.edge.export import load_app

            split = load_data(data, seed=seed)
            parts = _parts(split, clients, _partitioner(split, by, alpha, options), seed)
            step(f"loading the App {app}")
            result = run_simulation(load_app(app), parts, settings=replace(settings, test=split.test))
    if csv is not None:
        result.write_spread_csv(csv) if seeds else result.write_csv(csv)
    if clients_csv is not None:
        result.write_clients_csv(clients_csv)
    if tensorboard is not None:
        result.tensorboard(tensorboard)
    if json:
        write_json(json, _result_row(result))
    if plot is not None:
        result.plot(plot)
    if not result.is_complete:
        sys.stderr.write(_stopped(result, (csv, clients_csv, tensorboard, plot, events)))
    return 0 if result.is_complete else INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlowerNames:
    """The options of a Flower app."""

    app: str
    initial: str
    node_config: str
    run_config: str

    def words(self, first: str, second: Path | None) -> tuple[str, Path | None]:
        """Return the App and the Plan that the words name: a Flower app takes the place of the App.

        Raises:
            InvalidInput: There is no app or two, or an option of Flower apps without one.
        """
        if not self.app:
            if self.initial or self.node_config or self.run_config:
                raise InvalidInput(
                    "--initial, --node-config, --run-config: got them without --flower, expected them for a Flower app "
                    "only"
                )
            if not first:
                raise InvalidInput("APP: got none, expected package.module:name, or a Flower app with --flower")
            return first, second
        if second is not None:
            raise InvalidInput(f"--flower: got it with the App {first}, expected a plan alone; remove the App")
        return "", Path(first) if first else None

    @property
    def settings(self) -> FlowerSettings:
        """The app, in the working directory."""
        return FlowerSettings(app=self.app, folder=Path.cwd(), node_config=self.node_config, run_config=self.run_config)

    def arrays(self) -> dict[str, Array] | None:
        """Return the initial arrays; None for those of the app. Raises InvalidInput."""
        return read_initial(self.initial, Path.cwd()) if self.initial else None


def _cluster(backend: str, cluster: "RayCluster") -> "RayCluster | None":
    """Return the Ray cluster of the options; None for the processes of this machine. Raises InvalidInput."""
    if backend not in BACKENDS:
        raise InvalidInput(f"--backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "ray":
        return cluster
    if cluster != type(cluster)():
        raise InvalidInput("--ray-address, --client-cpus, --client-gpus: got them without --backend ray")
    return None


def _seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of the command line. Raises InvalidInput."""
    words = text.split(",") if text else []
    if not all(word.strip().isdigit() for word in words):
        raise InvalidInput(f"--seeds {text}: expected integers of 0 or more, as in 0,1,2")
    return tuple(map(int, words))


def _stopped(result: "Result", files: Sequence[Path | None]) -> str:
    """Return the line of a simulation that was interrupted: where it stopped, and the files that have its result."""
    last = (result.repeats or (result,))[-1].rounds[-1].round
    seed = f" of seed {len(result.repeats)} in the list" if result.repeats else ""
    names = ", ".join(str(path) for path in files if path is not None)
    where = f"the result so far is in {names}" if names else "no file has the result; name one, as by --csv FILE"
    return f"fanin simulate: stopped after round {last}{seed}; {where}\n"


def _result_row(result: "Result") -> dict[str, object]:
    """Return the JSON object of a result."""
    rounds = [asdict(each) for each in result.rounds]
    row: dict[str, object] = {
        "engine": result.engine,
        "selection": result.selection,
        "rounds": rounds,
        "versions": list(result.digests),
    }
    if result.best is not None:
        row["best_round"] = result.best.row.round
    if result.baseline:
        row["baseline"] = [asdict(each) for each in result.baseline]
    if result.repeats:
        row["spread"] = [asdict(each) for each in result.spread]
    return row


@contextmanager
def _tracebacks() -> Iterator[None]:
    """Print the traceback of an error in the user's code once. Raises FaninError for the error of a client."""
    try:
        yield
    except ClientFailed as exc:
        sys.stderr.write(exc.failure.traceback)
        raise FaninError(str(exc).removeprefix("simulate: ")) from exc
    except AppFailed as exc:
        sys.stderr.write(exc.trace)
        raise


@contextmanager
def _event_file(path: Path | None) -> "Iterator[Callable[[SimulationEvent], None]]":
    """Yield a function that writes an event at once, so that the log of a simulation that fails is complete."""
    if path is None:
        yield lambda event: None
        return
    with path.open("w", buffering=1) as file:

        def write(event: "SimulationEvent") -> None:
            file.write(f"{event.line}\n")

        yield write


def _check_files(plot: Path | None, files: Mapping[str, Path | None]) -> None:
    """Raise InvalidInput unless the results can be written: a training may take long."""
    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(f"{option}: {path} cannot be written, {path.parent} is not a folder; create it")
    if plot is not None:
        from fanin.simulation.plots import check_figure_file

        check_figure_file(plot)


def _plan(model: str, path: Path | None, limits: dict[str, int | None], overrides: Sequence[str]) -> Plan:
    """Return the Plan: the file's, with the options of the command line. Raises InvalidPlan."""
    first = [f"{key}={value}" for key, value in limits.items() if value is not None]
    if path is None:
        defaults = ["cohort.concurrency=10", "stop.max_rounds=20", "training.learning_rate=0.01"]
        return parse_plan("", "plan", [*defaults, model, *first, *overrides]).plan
    return read_plan(path, [*([] if _names_model(path) else [model]), *first, *overrides]).plan


def _names_model(path: Path) -> bool:
    """Return whether a Plan file names an App or a Bundle. The command names what is trained instead of it."""
    try:
        return not {"app", "bundle"}.isdisjoint(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return False  # ``read_plan`` reports it.


def _partitioner(split: LoadedData, by: str, alpha: float | None, options: Sequence[str] | None) -> Partitioner:
    """Return the partitioner of the command line. Raises InvalidInput."""
    from fanin.simulation.data.partitioners import partitioner_of

    values = dict(map(_option, options or ()))
    if alpha is not None or (by in WITH_ALPHA and "alpha" not in values):
        values["alpha"] = DEFAULT_ALPHA if alpha is None else alpha
    if by == "natural" and split.ids is not None and not values:
        return Natural(ids=split.ids)
    return partitioner_of(by, values)


def _parts(split: LoadedData, num_clients: int, by: Partitioner, seed: int) -> Partition:
    """Return the partition. Options that leave clients without examples are wrong usage, with the exit status 2."""
    try:
        return partition(split.train, num_clients, by, seed=seed)
    except InvalidInput as exc:
        raise click.UsageError(str(exc)) from exc


def _option(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or not name or not math.isfinite(value):
        raise InvalidInput(f"--option {text}: expected NAME=NUMBER, for example --option per_client=2")
    return name, value


def _partition_row(parts: Partition) -> dict[str, object]:
    """Return the JSON row of a partition."""
    row: dict[str, object] = {"num_examples": len(parts.examples), "sizes": list(parts.sizes)}
    if parts.examples.y.ndim == 1 and parts.examples.y.dtype.kind == "i":
        row["label_counts"] = parts.label_counts().tolist()
    return row

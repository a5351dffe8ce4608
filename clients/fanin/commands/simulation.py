"""``fanin simulate`` and ``fanin partition``: a federation on this machine, and how its data is spread."""

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fanin.clients.flower.initial import read_initial
from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.clients.planfile import (
    Override,
    PlanFile,
    check_overrides,
    named_sources,
    override_of,
    parse_plan,
    read_plan,
)
from fanin.commands.console.result_files import ResultFiles
from fanin.commands.console.simulated import SimulationText
from fanin.commands.console.splits import SimulationData, with_tests
from fanin.commands.console.terminal import JsonOption, QuietOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.commands.display.screen import print_notes
from fanin.commands.display.steps import progress
from fanin.edge.codecs.grid import first_change_notes
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted
from fanin.simulation import ClientFailed, Partition, RunStopped
from fanin.simulation.host import interrupted_by_sigterm

if TYPE_CHECKING:
    from fanin.simulation import RayCluster, Result, SimulationSettings

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
INTERRUPTED = 130
"""Exit status after Ctrl-C. The Rounds that have ended are still written."""
OPTIONS = {"cohort.concurrency": "--cohort", "stop.max_rounds": "--rounds", "training.seed": "--seed"}
"""The option that sets a key of the Plan."""
BACKENDS = ("processes", "ray")


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
    split = SimulationData(data=data, num_clients=clients, by=by, alpha=alpha, options=options or ())
    parts = split.load(seed)[1]
    if plot is not None:
        parts.plot(plot)
    row = _partition_row(parts)
    if json:
        write_json(json, row)
    if prints_text(json):
        sizes = parts.sizes
        sys.stdout.write(
            f"{counted(len(parts.examples), 'example')} of {data} on {counted(len(parts), 'client')}, {min(sizes)} to "
            f"{max(sizes)} each\n"
        )


def _simulate(
    app: Annotated[
        str,
        typer.Argument(metavar="APP", help="package.module:name, or path/to/file.py:name; none with --flower."),
    ] = "",
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.toml]", help="A plan; default: plain FedAvg.")] = None,
    data: DataOption = "digits",
    clients: ClientsOption = 100,
    validation: Annotated[
        float, typer.Option("--validation", metavar="SHARE", help="Share that each client holds out; 0: none.")
    ] = 0.1,
    client_test: Annotated[
        float, typer.Option("--client-test", metavar="SHARE", help="Share of each client's own test examples.")
    ] = 0.0,
    tune: Annotated[
        int, typer.Option("--fine-tune", metavar="EPOCHS", min=0, help="Epochs of each client after the last round.")
    ] = 0,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients of a round; default: 10.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds to run; default: 20.")] = None,
    by: ByOption = "dirichlet",
    alpha: AlphaOption = None,
    options: OptionOption = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the plan, as in training.learning_rate=0.1."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of all random choices; default: the plan's, and 0.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="How clients train: graph, vmap, vmap:cuda, or auto for the fastest.")
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
    stop_on_failure: Annotated[
        bool, typer.Option("--stop-on-failure", help="End at the first error in the training of a client.")
    ] = False,
    devices: Annotated[
        Path | None, typer.Option("--devices", help="A device model in TOML; docs/howto/devices.md.")
    ] = None,
    events: Annotated[Path | None, typer.Option("--events", help="Write the event log as JSON lines.")] = None,
    flower: Annotated[
        str,
        typer.Option(
            "--flower",
            metavar="MODULE:APP|FOLDER",
            help="Train by this Flower app, or that of a project, which loads its own data.",
        ),
    ] = "",
    initial: Annotated[
        str,
        typer.Option("--initial", metavar="FILE|MODULE:NAME", help="With --flower: the arrays of version 0."),
    ] = "",
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="PATTERN", help="With --flower: arrays that stay on each client."),
    ] = None,
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
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.npz", help="Write the final arrays by name.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rounds to a CSV file.")] = None,
    clients_csv: Annotated[
        Path | None, typer.Option("--clients-csv", help="Write a row for each client and round to a CSV file.")
    ] = None,
    per_client_csv: Annotated[
        Path | None, typer.Option("--per-client-csv", help="With --client-test: write the quality for each client.")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Train an App or a Flower app on simulated clients of this machine, and print each round."""
    from fanin.server.runs.recorded_setup import check_names
    from fanin.server.selection.policies import POLICIES
    from fanin.simulation import DeviceModel, SimulationSettings, read_devices
    from fanin.simulation.arguments import check_validation_fraction
    from fanin.simulation.engines.choice import check_engine_name

    tables = {"csv": csv, "clients_csv": clients_csv, "per_client_csv": per_client_csv}
    files = ResultFiles(**tables, out=out, events=events, tensorboard=tensorboard, plot=plot, json=json)
    names = _FlowerNames(app=flower, initial=initial, keep=keep or (), node_config=node_config, run_config=run_config)
    split = SimulationData(data=data, num_clients=clients, by=by, alpha=alpha, options=options or ())
    with wrong_usage():
        files.check(has_client_tests=bool(client_test))
        app, plan = names.words(app, plan)
        several_seeds = _seeds(seeds, seed)
        cluster = _cluster(backend, ray_address, client_cpus, client_gpus)
        check_engine_name(engine)
        check_validation_fraction(validation)
        check_overrides(overrides)
    limits = {"cohort.concurrency": cohort, "stop.max_rounds": rounds, "training.seed": seed}
    text = SimulationText(json_target=json, quiet=quiet, has_seeds=bool(several_seeds))
    source = _plan(("bundle", "flower") if flower else ("app", app), plan, limits, overrides or ())
    with named_sources(source.sources):
        check_names(source.plan, POLICIES)
    print_notes((*source.plan.notes, *(first_change_notes(source.plan.codec) if flower else ())))
    settings = SimulationSettings(
        plan=source.plan,
        engine=engine,
        seed=seed or 0,
        seeds=several_seeds or None,
        baseline=baseline,
        resume=resume,
        validation_fraction=validation,
        processes=processes,
        cluster=cluster,
        stop_on_failure=stop_on_failure,
        devices=DeviceModel() if devices is None else read_devices(devices),
        on_round=text.row,
        on_failure=text.failures,
        quiet=True,
    )
    with (
        progress("simulate", quiet=quiet, live=False) as step,
        interrupted_by_sigterm(),
        files.open_events(text.event) as on_event,
        _tracebacks(),
        _kept(files),
    ):
        settings = replace(settings, on_event=on_event)
        if flower:
            result = _simulate_flower(names, clients, settings)
        else:
            loaded, parts = split.load(seed or 0)
            parts, settings = with_tests(settings, parts, client_test, tune)
            step(f"loading the App {app}")
            result = _simulate_app(app, parts, replace(settings, test=loaded.test))
    files.write(result)
    text.result(result)
    if not result.is_complete:
        sys.stderr.write(files.stopped(result))
    return 0 if result.is_complete else INTERRUPTED


def _simulate_app(app: str, parts: Partition, settings: "SimulationSettings") -> "Result":
    from fanin.edge.export import load_app
    from fanin.simulation import simulate as run_simulation

    return run_simulation(load_app(app), parts, settings=settings)


def _simulate_flower(names: "_FlowerNames", num_clients: int, settings: "SimulationSettings") -> "Result":
    from fanin.simulation import simulate as run_simulation

    settings = replace(settings, initial=names.arrays(), keep=names.keep)
    return run_simulation(names.settings, num_clients, settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlowerNames:
    """The options of a Flower app."""

    app: str
    initial: str
    keep: Sequence[str]
    node_config: str
    run_config: str

    def words(self, first: str, second: Path | None) -> tuple[str, Path | None]:
        """Return the App and the Plan that the words name: a Flower app takes the place of the App.

        Raises:
            InvalidInput: There is no app or two, or an option of Flower apps without one.
        """
        if not self.app:
            if self.initial or self.keep or self.node_config or self.run_config:
                raise InvalidInput(
                    "--initial, --keep, --node-config, --run-config: got them without --flower, expected them for a "
                    "Flower app only",
                    code="FN-0914",
                )
            if not first:
                raise InvalidInput(
                    "APP: got none, expected package.module:name, or a Flower app with --flower", code="FN-0916"
                )
            return first, second
        if second is not None:
            raise InvalidInput(
                f"--flower: got it with the App {first}, expected a plan alone; remove the App", code="FN-0915"
            )
        return "", Path(first) if first else None

    @property
    def settings(self) -> FlowerSettings:
        """The app, in the working directory."""
        return FlowerSettings(app=self.app, folder=Path.cwd(), node_config=self.node_config, run_config=self.run_config)

    def arrays(self) -> dict[str, Array] | None:
        """Return the initial arrays; None for those of the app. Raises InvalidInput."""
        return read_initial(self.initial, Path.cwd()) if self.initial else None


def _cluster(backend: str, address: str, cpus: float, gpus: float) -> "RayCluster | None":
    """Return the Ray cluster of the options; None for the processes of this machine. Raises InvalidInput."""
    from fanin.simulation import RayCluster

    cluster = RayCluster(address=address, cpus=cpus, gpus=gpus)
    if backend not in BACKENDS:
        raise InvalidInput(f"--backend: got {backend!r}, expected one of {', '.join(BACKENDS)}", code="FN-1008")
    if backend == "ray":
        return cluster
    if cluster != RayCluster():
        raise InvalidInput(
            "--ray-address, --client-cpus, --client-gpus: got them without --backend ray", code="FN-1004"
        )
    return None


def _seeds(text: str, seed: int | None) -> tuple[int, ...]:
    """Return the seeds of ``--seeds``. Raises InvalidInput, also if ``--seed`` is set."""
    words = text.split(",") if text else []
    if not all(word.strip().isdigit() for word in words):
        raise InvalidInput(f"--seeds {text}: expected integers of 0 or more, as in 0,1,2", code="FN-1008")
    if words and seed is not None:
        raise InvalidInput(
            f"--seeds, --seed: got the seeds {text} and the seed {seed}, expected one of them; remove --seed",
            code="FN-1003",
        )
    return tuple(map(int, words))


@contextmanager
def _kept(files: ResultFiles) -> Iterator[None]:
    """Write the completed Rounds of a Run that ended early. Raises its error."""
    try:
        yield
    except (RunStopped, ClientFailed) as exc:
        files.write(exc.result)
        sys.stderr.write(files.stopped(exc.result))
        raise


@contextmanager
def _tracebacks() -> Iterator[None]:
    """Print the traceback of an error in the user's code once: that of a client was printed as it happened."""
    try:
        yield
    except AppFailed as exc:
        sys.stderr.write(exc.trace)
        raise


def _plan(
    model: tuple[str, str], path: Path | None, limits: Mapping[str, int | None], overrides: Sequence[str]
) -> PlanFile:
    """Return the Plan: the file's, or one of plain FedAvg, with the options of the command line. Raises InvalidPlan."""
    limited = {key: value for key, value in limits.items() if value is not None}
    first = [Override(path=key, value=value, source=OPTIONS[key]) for key, value in limited.items()]
    where = "plan" if path is None else str(path)
    trained = Override(path=model[0], value=model[1], source=where)
    if path is None:
        rounds, rate = "stop.max_rounds=20", "training.learning_rate=0.01"
        defaults = [override_of(each, where) for each in ("cohort.concurrency=10", rounds, rate)]
        source = parse_plan("", where, [*defaults, trained, *first, *overrides])
        from fanin.simulation.arguments import with_half_quorum

        names = {text.partition("=")[0].strip() for text in overrides}
        return replace(source, plan=with_half_quorum(source.plan, names))
    return read_plan(path, [*([] if _names_model(path) else [trained]), *first, *overrides])


def _names_model(path: Path) -> bool:
    """Return whether a Plan file names an App or a Bundle. The command line names the trained model instead."""
    try:
        return not {"app", "bundle"}.isdisjoint(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False  # ``read_plan`` reports it.


def _partition_row(parts: Partition) -> dict[str, object]:
    """Return the JSON row of a partition."""
    row: dict[str, object] = {"num_examples": len(parts.examples), "sizes": list(parts.sizes)}
    if parts.examples.y.ndim == 1 and parts.examples.y.dtype.kind == "i":
        row["label_counts"] = parts.label_counts().tolist()
    return row

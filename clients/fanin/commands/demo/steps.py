"""The steps of the demo: split, pre-train, export, serve, join, federate, train on, one more Round, report."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from fanin import datacenter
from fanin.clients.data.examples import Examples, Split, joined
from fanin.clients.data.npz import write_npz
from fanin.clients.operator import Operator
from fanin.commands.console.processes import follow_run
from fanin.commands.console.usage import wrong_usage
from fanin.commands.demo.processes import DeviceEnvironment, Processes, probe
from fanin.commands.demo.report import Findings
from fanin.commands.demo.shown import DemoScreen
from fanin.commands.demo.tasks import TASKS, Task, TrainingPhase
from fanin.datacenter.config.settings import DataSettings, EvaluationSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig, check_config
from fanin.datacenter.jobs.publish import check_int8, measure_version, parent_version, publish_vector
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.parameters import load_parameters, parameter_table, parameter_vector
from fanin.edge.bundles.keys import load_or_create_key
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.export import export
from fanin.edge.files import without_foreign
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.protos.errors import Conflict, InvalidInput
from fanin.protos.messages import CodecSpec, RunEvent, RunRested, RunState, Training
from fanin.protos.plans import DEFAULT_MAX_SHIFTS, AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.protos.texts import counted

Chosen = TypeVar("Chosen")
MIN_MAX_SHIFT: Final = 4
RUN_ID: Final = "demo"
MOMENTUM: Final = 0.9
EVALUATED_AT_ONCE: Final = 256
"""Samples a rank: a few MB of activations."""
VALIDATION: Final = 0.2
PATIENCE: Final = 5
MIN_DELTA: Final = 0.001
DEADLINE_S: Final = 120.0
DEVICE_PYTHONS: Final = MappingProxyType(
    {
        "onnx": Path(".venv-device/bin/python"),
        "litert": Path(".venv-device-litert/bin/python"),
        "tflite": Path(".venv-device-tflite/bin/python"),
    }
)
"""The interpreters of the environments that ``make devices`` creates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options, as on the command line."""

    devices: int
    rounds: int
    dataset: str
    runtimes: str
    codec: str
    alpha: float
    seed: int
    mesh: str
    device_python: tuple[Path, ...]
    delay_seed: int
    state: Path | None
    verbose: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The user's settings, and the values derived from them."""

    task: Task
    num_devices: int
    max_rounds: int
    seed: int
    delay_seed: int
    codec: CodecSpec
    split: Split
    environments: tuple[DeviceEnvironment, ...]
    mesh: MeshShape

    @property
    def graph_formats(self) -> tuple[str, ...]:
        """The formats of the devices' runtimes, and ONNX, with which the demo measures."""
        others = any(part.name != "onnx" for part in self.environments)
        return ("onnx", "tflite") if others else ("onnx",)


def run_demo(options: DemoOptions) -> Findings:
    """Run the demo. Raises WrongUsage for a wrong option, before any work."""
    started_s = time.monotonic()
    with wrong_usage():
        _check(options)
        task = _chosen("--dataset", options.dataset, TASKS)
        shape = MeshShape.parse(options.mesh)
        for turn in (task.pretrain, task.second_turn):
            check_config(job_config(task, turn, Path(), shape, options.seed), shape.num_ranks)
        _chosen("--codec", options.codec, CODECS)
    max_shift = max(MIN_MAX_SHIFT, DEFAULT_MAX_SHIFTS[options.codec])
    setting = Setting(
        task=task,
        num_devices=options.devices,
        max_rounds=options.rounds or task.max_rounds,
        seed=options.seed,
        delay_seed=options.delay_seed,
        codec=CodecSpec(name=options.codec, max_shift=max_shift),
        environments=_environments(options.runtimes, options.device_python),
        split=task.split(options.devices, options.alpha, options.seed),
        mesh=shape,
    )
    with tempfile.TemporaryDirectory(prefix="fanin-demo-") as scratch:
        folder = Path(scratch) if options.state is None else options.state
        folder.mkdir(parents=True, exist_ok=True)
        return _walk(setting, folder, started_s, DemoScreen(verbose=options.verbose))


def _check(options: DemoOptions) -> None:
    """Raise InvalidInput for a number out of range, or a folder that is not empty."""
    if options.rounds < 0 or options.delay_seed < -1:
        raise InvalidInput(
            f"--rounds, --delay-seed: got {options.rounds} and {options.delay_seed}, expected at least 0 and -1",
            code="FN-1008",
        )
    if options.devices < len(options.runtimes.split(",")):
        raise InvalidInput(
            f"--devices: got {options.devices}, expected at least one for each of the runtimes {options.runtimes}",
            code="FN-1050",
        )
    state = options.state
    if state is not None and state.exists() and without_foreign(state.iterdir()):
        raise InvalidInput(f"--state: {state} is not empty; name a new folder", code="FN-1013")


def _chosen(option: str, name: str, known: Mapping[str, Chosen]) -> Chosen:
    if name not in known:
        raise InvalidInput(f"{option}: got {name!r}, expected one of {sorted(known)}", code="FN-1008")
    return known[name]


def _environments(runtimes: str, pythons: Sequence[Path]) -> tuple[DeviceEnvironment, ...]:
    """Return the environment of the devices for each requested runtime."""
    names = [name.strip() for name in runtimes.split(",")]
    with wrong_usage():
        defaults = [_chosen("--runtimes", name, DEVICE_PYTHONS) for name in names]
        if pythons and len(pythons) != len(names):
            raise InvalidInput(
                f"--device-python: got {len(pythons)}, expected one for each of the runtimes {names}", code="FN-1050"
            )
    return tuple(probe(python, name) for python, name in zip(pythons or defaults, names, strict=True))


def _walk(setting: Setting, folder: Path, started_s: float, screen: DemoScreen) -> Findings:
    split, task = setting.split, setting.task
    noun, ranks = task.noun, counted(setting.mesh.num_ranks, "process", "processes")
    screen.done(
        "data",
        f"{len(split.public)} public {noun}, {counted(setting.num_devices, 'device')} with {_num_private(split)}, "
        f"{len(split.test)} for the test",
    )
    app = task.app(setting.seed)
    untrained = parameter_vector(app.module)
    with screen.doing("datacenter", f"pre-train on the public {noun}, in {ranks}"):
        pretrained = _Job(folder / "pretrain", setting, task.pretrain).train(split.public, untrained)
    publisher = load_or_create_key(folder / "publisher.key")
    load_parameters(app.module, parameter_table(app.module), pretrained)
    with screen.doing("edge", "export, quantize, verify and sign a bundle"):
        bundle = export(app, folder / "bundle", publisher, setting.graph_formats).bundle
        runtime = open_runtime("onnx")
    with Processes(folder) as processes:
        processes.publisher_pub.write_text(publisher.public + "\n", encoding="utf-8")
        with screen.doing("server", "start a coordinator with TLS and tokens"):
            processes.serve()
        _join_all(processes, setting)
        runtimes = " and ".join(part.runtime for part in setting.environments)
        screen.done("clients", f"{counted(setting.num_devices, 'device')} join with {runtimes}, {_without(setting)}")
        with processes.operator() as operator:
            operator.publish_bundle(bundle)
            operator.start_run(RUN_ID, _plan(setting), bundle, publisher)
            events = _follow(processes, operator, 0, screen)
            parent = parent_version(operator, RUN_ID, publisher)
            federated = parent.parameters
            with screen.doing("datacenter", "train on from the last version"):
                trained = _Job(folder / "continue", setting, task.second_turn).train(split.public, federated)
                check_int8(measure_version(runtime, bundle, trained, split.public))
            publish_vector(operator, parent, trained, publisher, 1)
            events += _follow(processes, operator, len(events) + 1, screen)
            final = operator.parameters(operator.version(RUN_ID).version)
        names = processes.device_names(setting.num_devices)
    with screen.doing("datacenter", "train on all data in one place, for comparison"):
        # One process: a mesh would not change the result, and would slow thousands of steps of this size down.
        alone = replace(setting, mesh=MeshShape())
        centralised = _Job(folder / "centralised", alone, task.centralised).train(_together(split), untrained)
    models = {"pretrained": pretrained, "federated": federated, "final": final, "centralised": centralised}
    return Findings(
        measured={name: measure_version(runtime, bundle, flat, split.test) for name, flat in models.items()},
        events=events,
        device_names=names,
        environments=setting.environments,
        noun=noun,
        num_public=len(split.public),
        num_devices=setting.num_devices,
        seconds_total=time.monotonic() - started_s,
    )


def _num_private(split: Split) -> str:
    sizes = [len(part) for part in split.devices]
    return f"{min(sizes)} to {max(sizes)} each"


def _without(setting: Setting) -> str:
    """Return which libraries the devices lack."""
    has_torch = not all(part.import_torch for part in setting.environments)
    has_onnx = not all(part.import_onnx for part in setting.environments)
    return "with torch" if has_torch else "without torch" if has_onnx else "without torch and onnx"


def _plan(setting: Setting) -> Plan:
    everybody = setting.num_devices
    return Plan(
        name="demo",
        cohort=CohortPlan(concurrency=everybody, buffer=everybody, quorum=everybody, deadline_s=DEADLINE_S),
        training=Training(
            epochs=setting.task.local_epochs, learning_rate=setting.task.local_learning_rate, seed=setting.seed
        ),
        codec=setting.codec,
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=setting.max_rounds, patience=PATIENCE, min_delta=MIN_DELTA),
    )


def _join_all(processes: Processes, setting: Setting) -> None:
    for index, examples in enumerate(setting.split.devices):
        path = processes.folder / f"device-{index}.npz"
        write_npz(path, examples)
        options = ["--validation", str(VALIDATION)]
        if setting.delay_seed >= 0:
            options += ["--delay-seed", str(setting.delay_seed)]
        processes.join(index, setting.environments[index % len(setting.environments)], path, options)


def _follow(processes: Processes, operator: Operator, from_sequence: int, screen: DemoScreen) -> list[RunEvent]:
    """Print and return the events until the Run ends. Raises an error if a process ends or the Run fails."""
    events = []
    with screen.run() as view:
        for entry in follow_run(operator, RUN_ID, from_sequence, processes.check):
            events.append(entry.event)
            view.event(entry.event)
    last = events[-1]
    if isinstance(last, RunRested) and last.state is RunState.FAILED:
        raise Conflict(
            f"the run failed: {last.reason}; the logs of the processes are in {processes.folder}", code="FN-1044"
        )
    return events


@dataclass(frozen=True, slots=True)
class _Job:
    """A training job in its own folder."""

    folder: Path
    setting: Setting
    turn: TrainingPhase

    def train(self, examples: Examples, start: Float32s) -> Float32s:
        """Train on these examples from these parameters until the validation loss is flat."""
        self.folder.mkdir()
        write_npz(self.folder / "data.npz", examples)
        config = job_config(self.setting.task, self.turn, self.folder, self.setting.mesh, self.setting.seed)
        trained = datacenter.train(config, initial=start, placement=datacenter.Placement(folder=self.folder)).parameters
        assert trained is not None, "an App's job brings its parameters"
        return trained


def job_config(task: Task, turn: TrainingPhase, folder: Path, mesh: MeshShape, seed: int) -> TrainConfig:
    """Return the config of a job with ``data.npz`` in its folder."""
    return TrainConfig(
        model=ModelSettings(app=task.where, layout=task.layout),
        data=DataSettings(examples=folder / "data.npz", held_fraction=VALIDATION),
        # As on the devices.
        training=TrainingSettings(
            batch_size=turn.batch_size, learning_rate=turn.learning_rate, optimizer="sgd", momentum=MOMENTUM
        ),
        stop=StopSettings(epochs=turn.max_epochs),
        evaluation=EvaluationSettings(
            batch_size=EVALUATED_AT_ONCE * mesh.num_parts, patience=turn.patience, min_delta=MIN_DELTA, keep="best"
        ),
        # The models are small. Every machine has enough CPUs for them, but few have enough GPUs.
        parallel=ParallelSettings(mesh=mesh, microbatches=mesh.pp, device="cpu"),
        seed=seed,
    )


def _together(split: Split) -> Examples:
    parts = (split.public, *split.devices)
    return joined(parts)

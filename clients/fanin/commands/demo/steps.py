"""The demo's walk: split, pre-train, export, serve, join, federate, train on, one more Round, tell."""

import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from fanin.clients.data import Examples
from fanin.clients.digits import DigitsSplit, split_digits
from fanin.clients.operator import Operator
from fanin.commands.demo.measure import measure
from fanin.commands.demo.processes import DeviceEnvironment, Processes, look_at
from fanin.commands.demo.report import Findings, json_row, print_table
from fanin.commands.show import describe
from fanin.commands.terminal import JsonOption, write_json
from fanin.datacenter.launch import TrainConfig, TrainSettings, launch
from fanin.datacenter.models.digits_app import app as digits_app
from fanin.datacenter.parameters import load_parameters, parameter_table, parameter_vector
from fanin.datacenter.publish import train_and_publish
from fanin.edge.bundle import Bundle
from fanin.edge.export import export_app
from fanin.edge.keys import SigningKey, load_or_create_key
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s, encode_parameters
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.protos.runs import Recorded, RunEvent, RunRested, RunState

RUN_ID: Final = "demo"
APP: Final = "fanin.datacenter.models.digits_app:app"
FROM_SCRATCH: Final = TrainSettings(learning_rate=0.05)
SECOND_TURN: Final = TrainSettings(learning_rate=0.01, max_epochs=10, patience=3)
"""A few gentle epochs: on 100 digits more would undo what the devices' 1,157 taught."""
NUM_RANKS: Final = 2
VALIDATION: Final = 0.2
LOCAL_EPOCHS: Final = 5
LOCAL_LEARNING_RATE: Final = 0.1
PATIENCE: Final = 5
MIN_DELTA: Final = 0.001
DEADLINE_S: Final = 120.0
DEFAULT_DEVICE_PYTHON: Final = Path(".venv-device/bin/python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the user chose, and what follows from it."""

    num_devices: int
    max_rounds: int
    seed: int
    delay_seed: int
    split: DigitsSplit
    environment: DeviceEnvironment


def demo(
    devices: Annotated[int, typer.Option("--devices", help="How many devices take part.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", help="The most rounds before the datacenter's second turn.")] = 20,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Dirichlet alpha of the split: 0.1 very uneven, 100 even.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="The same seed ends in the same version, bit for bit.")] = 0,
    device_python: Annotated[
        Path, typer.Option("--device-python", help="Python of the devices' environment.")
    ] = DEFAULT_DEVICE_PYTHON,
    delay_seed: Annotated[
        int, typer.Option("--delay-seed", help="Devices wait seeded moments before they upload; -1: they do not.")
    ] = -1,
    state: Annotated[
        Path | None, typer.Option("--state", help="Keep everything in this new folder; default: a temporary one.")
    ] = None,
    json: JsonOption = "",
) -> None:
    """Train one model across a datacenter and devices, all on this machine: 1,797 handwritten digits, no network.

    The datacenter pre-trains on 100 of them with torchrun; a coordinator and the devices, processes of their own,
    federate over the others by TLS; the datacenter trains on from the last version, and one more round runs.
    """
    started_s = time.monotonic()
    setting = Setting(
        num_devices=devices,
        max_rounds=rounds,
        seed=seed,
        delay_seed=delay_seed,
        split=split_digits(devices, alpha, seed),
        environment=look_at(device_python),
    )
    with tempfile.TemporaryDirectory(prefix="fanin-demo-") as scratch:
        folder = Path(scratch) if state is None else state
        if state is not None and state.exists() and any(state.iterdir()):
            raise InvalidInput(f"--state: {state} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        findings = _walk(setting, folder, started_s)
    if json != "-":
        print_table(findings)
    if json:
        write_json(json, json_row(findings))


def _walk(setting: Setting, folder: Path, started_s: float) -> Findings:
    split = setting.split
    _say(f"split: 100 public digits, {len(split.test)} for the test, {setting.num_devices} devices with the rest")
    untrained = parameter_vector(digits_app(setting.seed).module)
    pretrained = _train(folder, "pretrain", split.public, setting, untrained)
    _say("datacenter: pre-trained on the public digits")
    publisher = load_or_create_key(folder / "publisher.key")
    bundle = _export(folder, setting, pretrained, publisher)
    _say(f"edge: bundle {bundle.sha256[:16]} exported, signed and verified")
    with Processes(folder) as processes:
        processes.publisher_pub.write_text(publisher.public + "\n")
        processes.serve()
        _join_all(processes, setting)
        with processes.operator() as operator:
            operator.publish_bundle(bundle)
            operator.start_run(RUN_ID, _plan(setting), bundle, publisher)
            events = _follow(processes, operator, 0)
            federated = operator.parameters(operator.version(RUN_ID).version)
            publish = train_and_publish(
                operator,
                RUN_ID,
                bundle,
                publisher,
                lambda flat: _train(folder, "continue", split.public, setting, flat),
            )
            _say("datacenter: trained on from the last version")
            publish(1)
            events += _follow(processes, operator, len(events) + 1)
            final = operator.parameters(operator.version(RUN_ID).version)
        names = processes.device_names(setting.num_devices)
    _say("datacenter: training the centralised bound on all data in one place")
    centralised = _train(folder, "centralised", _together(split), setting, untrained)
    runtime = open_runtime()
    models = {"pretrained": pretrained, "federated": federated, "final": final, "centralised": centralised}
    return Findings(
        measured={name: measure(runtime, bundle, flat, split.test) for name, flat in models.items()},
        events=events,
        device_names=names,
        environment=setting.environment,
        num_devices=setting.num_devices,
        seconds_total=time.monotonic() - started_s,
    )


def _plan(setting: Setting) -> Plan:
    everybody = setting.num_devices
    return Plan(
        name="demo",
        cohort=CohortPlan(concurrency=everybody, buffer=everybody, quorum=everybody, deadline_s=DEADLINE_S),
        training=Training(epochs=LOCAL_EPOCHS, learning_rate=LOCAL_LEARNING_RATE, seed=setting.seed),
        codec=CodecSpec(name="fixed32", max_shift=4),
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=setting.max_rounds, patience=PATIENCE, min_delta=MIN_DELTA),
    )


def _export(folder: Path, setting: Setting, pretrained: Float32s, publisher: SigningKey) -> Bundle:
    app = digits_app(setting.seed)
    load_parameters(app.module, parameter_table(app.module), pretrained)
    return export_app(app, folder / "bundle", publisher)


def _join_all(processes: Processes, setting: Setting) -> None:
    for index, examples in enumerate(setting.split.devices):
        path = processes.folder / f"device-{index}.npz"
        np.savez(path, x=examples.x, y=examples.y)
        options = ["--validation", str(VALIDATION)]
        if setting.delay_seed >= 0:
            options += ["--delay-seed", str(setting.delay_seed)]
        processes.join(index, setting.environment.python, path, options)
    _say(f"clients: {setting.num_devices} devices join with {setting.environment.runtime}")


def _follow(processes: Processes, operator: Operator, from_sequence: int) -> list[RunEvent]:
    """What happens until the Run rests, told as it happens. Raises if a process ends meanwhile, or the Run fails."""
    inbox: queue.SimpleQueue[Recorded | FaninError | None] = queue.SimpleQueue()

    def watch() -> None:
        try:
            for recorded in operator.watch(RUN_ID, from_sequence):
                inbox.put(recorded)
            inbox.put(None)
        except FaninError as exc:
            inbox.put(exc)

    threading.Thread(target=watch, daemon=True).start()
    events = []
    for recorded in _received(inbox, processes):
        events.append(recorded.event)
        _say(f"server: {describe(recorded.event)}")
    last = events[-1]
    if isinstance(last, RunRested) and last.state is RunState.FAILED:
        raise InvalidInput(f"the run failed: {last.reason}; the logs of the processes are in {processes.folder}")
    return events


def _received(inbox: "queue.SimpleQueue[Recorded | FaninError | None]", processes: Processes) -> Iterator[Recorded]:
    while True:
        try:
            found = inbox.get(timeout=1.0)
        except queue.Empty:
            processes.check()
            continue
        if isinstance(found, FaninError):
            raise found
        if found is None:
            return
        yield found


def _train(folder: Path, name: str, examples: Examples, setting: Setting, start: Float32s) -> Float32s:
    """A torchrun job on these examples from these parameters, to a flat validation loss."""
    job = folder / name
    job.mkdir()
    np.savez(job / "data.npz", x=examples.x, y=examples.y)
    table = parameter_table(digits_app(setting.seed).module)
    (job / "initial.bin").write_bytes(encode_parameters(table, start))
    config = TrainConfig(
        app=APP,
        data=job / "data.npz",
        num_validation=round(len(examples) * VALIDATION),
        training=replace(FROM_SCRATCH if name != "continue" else SECOND_TURN, seed=setting.seed),
        folder=job,
        initial=job / "initial.bin",
    )
    return launch(config, NUM_RANKS).parameters


def _together(split: DigitsSplit) -> Examples:
    parts = (split.public, *split.devices)
    return Examples(x=np.concatenate([part.x for part in parts]), y=np.concatenate([part.y for part in parts]))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

"""The accuracy that int8 costs, and the memory of a device, measured for ``edge.py``.

The memory is that of ``fanin join`` in a real federation with TLS, with one device of each runtime, after some Rounds.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from edge_children import WORKING_TREE, Row, child, device_command, python_of, run_in
from federation import Device, Federation, running
from pretraining import pretrain

from fanin.clients.data.digits import split_digits
from fanin.clients.data.examples import Examples, Split
from fanin.clients.data.files import DATA_VARIABLE
from fanin.clients.data.partitions import hold_out
from fanin.clients.data.public import FASHION_MNIST, split_fashion_mnist
from fanin.datacenter.models import digits_app, fashion_app
from fanin.datacenter.models.fashion_app import FashionCnn
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, export
from fanin.protos.messages import CodecSpec, RunRested, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan

PUBLISHER: Final = SigningKey(bytes(range(32)))
NUM_CALIBRATION: Final = 256
DEADLINE_S: Final = 300.0
PEAK: Final = "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"


def accuracy(runtimes: Sequence[str], folder: Path, num_epochs: int) -> Row:
    """Return the float and int8 accuracy on a test set, in each runtime, after a short training in torch."""
    data = os.environ.get(DATA_VARIABLE)
    if data and (Path(data) / FASHION_MNIST.name).is_dir():
        split, model, name = split_fashion_mnist(1, 1.0, 0), "FashionCnn", FASHION_MNIST.name
        app = trained(FashionCnn(), split, name, num_epochs)
    else:
        split, model, name = split_digits(1, 1.0, 0), "DigitsCnn", "digits"
        # A fiftieth of the images: epochs are short.
        app = trained(digits_app.app().module, split, name, 10 * num_epochs)
    bundle = export(app, folder / "bundle", PUBLISHER).bundle
    test = folder / "test.npz"
    np.savez(test, x=split.test.inputs["x"], y=split.test.y)
    rows: Row = {"model": model, "dataset": name}
    for runtime in runtimes:
        with child(device_command(runtime, folder / "bundle", bundle.signed.public_key, test)) as device:
            counts = {key: int(str(value)) for key, value in device.ask("counts").items()}
        num = counts["num_examples"]
        in_float, in_int8 = counts["num_correct_float"] / num, counts["num_correct_int8"] / num
        rows[runtime] = {
            "num_examples": num,
            "accuracy_float": in_float,
            "accuracy_int8": in_int8,
            "drop_points": 100.0 * (in_float - in_int8),
            "agreement": counts["num_agreeing"] / num,
        }
    return rows


def trained(module: torch.nn.Module, split: Split, name: str, num_epochs: int) -> App:
    """Train the App for some epochs on the images of all devices, and calibrate it on public ones."""
    train, validation = hold_out(split.devices[0], len(split.devices[0]) // 20, np.random.default_rng(0))
    training = TrainingSettings(learning_rate=0.05, batch_size=32, optimizer="sgd")
    pretrain(module, digits_app.smoothed_cross_entropy, (train, validation), training, num_epochs)
    return App(
        name=name,
        module=module,
        calibration=torch.from_numpy(split.public.inputs["x"][:NUM_CALIBRATION]),
        batch_size=fashion_app.BATCH_SIZE,
        num_classes=fashion_app.NUM_CLASSES,
        loss=digits_app.smoothed_cross_entropy,
    )


def memory(runtimes: Sequence[str], folder: Path, num_rounds: int) -> Row:
    """Return the peak RSS of a device of each runtime that trains the demo's CNN, and that of the imports alone."""
    parts = dict(zip(runtimes, split_digits(len(runtimes), 100.0, 0).devices, strict=True))
    peaks_mb = peaks_of(digits_app.app(), parts, folder, num_rounds)
    rows: Row = {"rounds": num_rounds}
    for runtime, peak_mb in peaks_mb.items():
        imports = run_in(python_of(runtime), f"import fanin.commands.join, sys; {PEAK}")
        rows[runtime] = {"peak_rss_mb": peak_mb, "importing_join_mb": int(imports) / 1024}
    torch_alone = run_in(Path(sys.executable), f"import torch; {PEAK}")
    return {**rows, "importing_torch_mb": int(torch_alone) / 1024}


def peaks_of(app: App, parts: Mapping[str, Examples], folder: Path, num_rounds: int) -> dict[str, float]:
    """Return the peak RSS in MiB of a device of each runtime that trains an App on its own examples.

    Args:
        app: The App.
        parts: The examples of the device, by runtime.
        folder: An empty folder for the Bundle, the coordinator and the devices.
        num_rounds: Rounds of the Run.
    """
    bundle = export(app, folder / "bundle", PUBLISHER).bundle
    (folder / "publisher.pub").write_text(PUBLISHER.public + "\n")
    devices = [device_of(runtime, examples) for runtime, examples in parts.items()]
    with running(folder, devices) as federation:
        federation.operator.publish_bundle(bundle)
        federation.operator.start_run("run", plan_of(len(devices), num_rounds), bundle, PUBLISHER)
        return dict(zip(parts, peaks(federation, num_rounds), strict=True))


def device_of(runtime: str, examples: Examples) -> Device:
    """Return a device in the environment of a runtime that runs the sources of this tree."""
    flags = ("--runtime", runtime)
    return Device(examples=examples, flags=flags, python=python_of(runtime), environment=WORKING_TREE)


def plan_of(num_devices: int, num_rounds: int) -> Plan:
    """Return a Plan in which every device takes part in each Round."""
    return Plan(
        name="memory",
        cohort=CohortPlan(concurrency=num_devices, buffer=num_devices, quorum=num_devices, deadline_s=DEADLINE_S),
        training=Training(epochs=1, learning_rate=0.05, seed=0),
        codec=CodecSpec(name="fixed32", max_shift=4),
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=num_rounds),
    )


def peaks(federation: Federation, num_rounds: int) -> list[float]:
    """Return each device's peak RSS in MiB after the last Version. The devices are still running and connected."""
    num_versions = 0
    for entry in federation.operator.watch("run", 0):
        federation.check()
        num_versions += isinstance(entry.event, VersionPublished) and entry.event.round > 0
        if isinstance(entry.event, RunRested):
            break
    if num_versions != num_rounds:
        raise RuntimeError(f"the federation published {num_versions} Versions, expected {num_rounds}")
    statuses = [Path(f"/proc/{process.pid}/status").read_text() for process in federation.devices]
    return [int(text.partition("VmHWM:")[2].split()[0]) / 1024 for text in statuses]

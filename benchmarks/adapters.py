"""The bytes that adapters save: a transformer federated over Shakespeare's speakers, in full and with rank 4.

    python benchmarks/adapters.py --json FILE          (needs tinyshakespeare, see FANIN_DATA)

A two-block decoder is pre-trained on the speakers with little text. Then two federations run over the same speakers,
with real processes and TLS. One trains all parameters; the other trains only adapters next to the frozen int8 layers.

The benchmark reports the bytes of a Round, both ways and over all devices. It also reports the accuracy of the last
Version's next characters on the held-out text of the speakers, in float and as the int8 model that devices serve. The
goal is at most 5 % of the bytes, within 1 point of accuracy.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from federation import Device, running
from pretraining import pretrain

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, joined
from fanin.clients.data.partitions import hold_out
from fanin.clients.data.public import Cutting, Shakespeare, shakespeare
from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import Adapters, App, Recipe, Sgd, export, next_token
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.quality import Quality
from fanin.protos.messages import CodecSpec, RoundClosed, RunRested, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan

CUTTING: Final = Cutting(length=64, min_characters=8000)
BATCH_SIZE: Final = 8
RANK: Final = 4
DEADLINE_S: Final = 300.0
RECIPES: Final = {
    "full": (Recipe(optimizer=Sgd(momentum=0.9), clip_norm=1.0), 0.05),
    "adapters": (Recipe(optimizer=Sgd(momentum=0.9), clip_norm=1.0, trains=Adapters(rank=RANK)), 0.4),
}
"""The method of each federation, and its learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Federated:
    """The result of one federation."""

    measured: Quality
    bytes_per_round: float
    num_parameters: int
    seconds_per_round: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Bytes and accuracy of adapters against full training.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--speakers", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=14, help="of pre-training")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", metavar="FILE", default="")
    options = parser.parse_args(argv)
    data = shakespeare(CUTTING)
    data = replace(data, speakers=data.speakers[: options.speakers])
    shape = DecoderShape(vocabulary=len(data.vocabulary), context=CUTTING.length, width=options.width)
    module = DecoderTransformer(seed=0, shape=shape)
    pretrain_on_others(module, data, options.epochs)
    held_out = together([speaker.held_out for speaker in data.speakers])
    results = {}
    for name, (recipe, learning_rate) in RECIPES.items():
        app = app_of(module, data, recipe)
        with tempfile.TemporaryDirectory(prefix=f"fanin-{name}-") as folder:
            results[name] = federate(app, data, Path(folder), learning_rate, options.rounds, held_out)
        say(f"{name}: {results[name].measured}; {results[name].bytes_per_round:.0f} bytes a round")
    row = row_of(results, options)
    if options.json:
        Path(options.json).write_text(json.dumps(row, indent=1) + "\n")
    sys.stdout.write(json.dumps(row, indent=1) + "\n")
    return 0


def row_of(results: dict[str, Federated], options: argparse.Namespace) -> dict[str, object]:
    """Return the results, and the two numbers of the goal."""
    full, adapters = results["full"], results["adapters"]
    return {
        "speakers": options.speakers,
        "rounds": options.rounds,
        **{
            name: {
                "num_parameters": part.num_parameters,
                "bytes_per_round": part.bytes_per_round,
                "seconds_per_round": part.seconds_per_round,
                "accuracy_float": part.measured.accuracy_float,
                "accuracy_int8": part.measured.accuracy_int8,
            }
            for name, part in results.items()
        },
        "bytes_ratio": adapters.bytes_per_round / full.bytes_per_round,
        "points_lost_float": 100.0 * (full.measured.accuracy_float - adapters.measured.accuracy_float),
        "points_lost_int8": 100.0 * (full.measured.accuracy_int8 - adapters.measured.accuracy_int8),
    }


def pretrain_on_others(module: torch.nn.Module, data: Shakespeare, num_epochs: int) -> None:
    """Train on the text of the speakers that have no partition of their own."""
    assert data.others is not None, "most speakers say little"
    train, validation = hold_out(data.others, max(1, len(data.others) // 10), np.random.default_rng(0))
    training = TrainingSettings(learning_rate=0.1, batch_size=16, optimizer="sgd")
    best = pretrain(module, next_token, (train, validation), training, num_epochs)
    say(f"pre-trained on {len(train)} sequences: validation accuracy {best.validation_accuracy:.4f}")


def app_of(module: torch.nn.Module, data: Shakespeare, recipe: Recipe) -> App:
    """Return the decoder as an App."""
    assert data.others is not None, "pre-training had some"
    return App(
        name="shakespeare",
        module=module,
        calibration=torch.from_numpy(data.others.inputs["x"][:64]),
        batch_size=BATCH_SIZE,
        num_classes=len(data.vocabulary),
        loss=next_token,
        recipe=recipe,
    )


def federate(
    app: App, data: Shakespeare, folder: Path, learning_rate: float, num_rounds: int, held_out: Examples
) -> Federated:
    """Run a coordinator and one device a speaker until the Rounds are finished."""
    publisher = SigningKey(bytes(range(32)))
    bundle = export(app, folder / "bundle", publisher, ["onnx"]).bundle
    (folder / "publisher.pub").write_text(publisher.public + "\n")
    everybody = len(data.speakers)
    plan = Plan(
        name="adapters",
        cohort=CohortPlan(concurrency=everybody, buffer=everybody, quorum=everybody, deadline_s=DEADLINE_S),
        training=Training(epochs=1, learning_rate=learning_rate, seed=0),
        codec=CodecSpec(name="fixed32", max_shift=4),
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=num_rounds),
    )
    flags = ("--validation", "0.1")
    devices = [Device(examples=speaker.train, flags=flags) for speaker in data.speakers]
    with running(folder, devices) as federation:
        operator = federation.operator
        operator.publish_bundle(bundle)
        operator.start_run("run", plan, bundle, publisher)
        versions, rests = [], None
        for entry in operator.watch("run", 0):
            if isinstance(entry.event, VersionPublished) and entry.event.round:
                versions.append(entry.event)
            elif isinstance(entry.event, RunRested):
                rests = entry.event
            elif isinstance(entry.event, RoundClosed):
                say(f"  round {entry.event.round} closed")
        assert rests is not None and len(versions) == num_rounds, f"the run ended early: {rests}"
        parameters = operator.parameters(operator.version("run").version)
    measured = measure(
        open_runtime("onnx"), bundle, VersionValues(parameters=parameters), batches_in_order(held_out, BATCH_SIZE)
    )
    return Federated(
        measured=measured,
        # The first Round also downloads the graphs, once.
        bytes_per_round=statistics.median(event.bytes_down + event.bytes_up for event in versions[1:]),
        num_parameters=bundle.manifest.table.num_values,
        seconds_per_round=statistics.median(event.round_s for event in versions),
    )


def together(parts: Sequence[Examples]) -> Examples:
    """Concatenate the examples of all speakers."""
    return joined(parts)


def say(text: str) -> None:
    """Write progress to stderr."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

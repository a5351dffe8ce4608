"""Seeded substitutes for training and for a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import LocalParameters, Manifest
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.ranges import Activation, columns
from fanin.edge.ranges import counts as extreme_counts
from fanin.edge.runtimes.graphs import CONTROL, state_port
from fanin.edge.signatures import Port, Signature
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.roles import role_by_name

NO_SHAPES: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTrainer:
    """A Trainer that draws a random change of the parameters from the seed (seed, partition, round), as one step.

    ``scale`` is its standard deviation, ``num_examples`` its weight. ``counts`` are further statistics. The input
    ``control`` of a stage is added to the gradient of the step. Each training adds to personal parameters, and their
    mean is a part of the change, which so depends on the device's earlier trainings.
    """

    partition: int
    scale: float = 0.01
    num_examples: int = 10
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Draw the change."""
        should_continue()
        seeds = np.random.SeedSequence((assignment.training.seed, self.partition, assignment.round))
        values = np.random.default_rng(seeds).normal(0.0, self.scale, model.parameters.size).astype(np.float32)
        if CONTROL in model.inputs:
            values -= np.float32(assignment.training.learning_rate) * model.inputs[CONTROL]
        local = None
        if model.bundle.manifest.local is not None:
            _, before = model.bundle.manifest.split(model.values())
            local = before + np.arange(1, before.size + 1, dtype=np.float32) * np.abs(values).max()
            values += before.mean()
        counts = {m.EXAMPLES: self.num_examples} | dict(self.counts)
        return Change(values=values, counts=counts, num_steps=1, local=local, ranges=self._ranges(model, values))

    def _ranges(self, model: OpenedModel, values: Float32s) -> m.RangeCounts:
        """Return the ranges of the activations on one example, whose extremes are those of the change."""
        measured = columns(model.bundle.manifest.activations, self.graph_format)
        lows, highs = (np.full((1, measured.size), end, np.float32) for end in (values.min(), values.max()))
        return range_counts_of(extreme_counts(lows, highs), measured)


ACTIVATION: Final = Activation(name="onnx:logits", graph_format="onnx", low=-1.0, high=1.0)


def synthetic_bundle(
    folder: Path,
    key: SigningKey,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    scaffold: bool = False,
    local: Mapping[str, tuple[int, ...]] = NO_SHAPES,
) -> Bundle:
    """Write a signed Bundle with these parameters, all zero, one activation, and invalid graphs.

    It can be published, downloaded and verified. Running it fails.

    Args:
        folder: A new folder.
        key: The publisher's key.
        shapes: The parameters. Their names show their roles.
        scaffold: Whether the train graph has the inputs ``control.<p>``.
        local: Shapes of the personal parameters, whose initial values are ones.
    """
    table = TensorTable.of(shapes).with_roles({name: role_by_name(name) for name in shapes})
    artifacts = {
        "graph": b"not a graph",
        "initial": encode_parameters(table, np.zeros(table.num_values, np.float32)),
    }
    personal = TensorTable.of(local)
    if local:
        artifacts["local"] = encode_parameters(personal, np.ones(personal.num_values, np.float32))
    x = Port(name="x", dtype="float32", shape=(-1, 1))
    slots = [Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=shapes[name]) for name in shapes]
    slots += [
        Slot(initializer=kind, kind=kind, parameter="", shape=(), activation=ACTIVATION.name)
        for kind in (SlotKind.ACTIVATION_SCALE, SlotKind.ZERO_POINT)
    ]
    signature = Signature(inputs=(x,), outputs=(), graphs=MappingProxyType({"onnx": "graph"}))
    controls = (Port(name=state_port(CONTROL, name), dtype="float32", shape=shapes[name]) for name in sorted(shapes))
    train = replace(signature, inputs=(x, *controls)) if scaffold else signature
    manifest = Manifest(
        name="synthetic",
        batch_size=1,
        num_classes=1,
        table=table,
        signatures=MappingProxyType({"train": train, "evaluate": signature, "infer": signature}),
        slots=MappingProxyType({"onnx": tuple(slots)}),
        artifacts=MappingProxyType({name: artifact_of(data) for name, data in artifacts.items()}),
        initial="initial",
        activations=(ACTIVATION,),
        local=LocalParameters(table=personal, initial="local") if local else None,
    )
    write_bundle(folder, dump_manifest(manifest), artifacts, key)
    return open_folder(folder, trusted=(key.public,))

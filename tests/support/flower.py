"""Updates that both fanin and Flower average. Devices of a federation in memory draw them once."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.codecs.grid import FIRST_RANGE
from fanin.edge.tensors import Float32s
from fanin.protos.messages import Assignment, CodecSpec
from fanin.protos.plans import DEFAULT_MAX_SHIFTS
from fanin.server.aggregation.fold import blocks_within
from fanin.server.folder import open_archive
from fanin.simulation import Member, Scenario, SyntheticTrainer, play, synthetic_bundle
from support.virtual import PUBLISHER, plan

SHAPES = {"conv": (4, 3, 3), "bias": (4,), "scale": ()}
NUM_EXAMPLES = (1, 37, 250, 4096)
"""As uneven as a Plan permits."""
NUM_ROUNDS = 3
ROUNDING = {"fixed32": 0.5, "int8": 1.0}
"""Largest rounding error of a codec, in steps of its grid."""
FLOAT_BITS = 24


@dataclass
class Recording:
    """A trainer that records its changes by Round."""

    drawn: SyntheticTrainer
    changes: dict[int, Float32s] = field(default_factory=dict)
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        """Draw the change."""
        change = self.drawn.train(model, assignment, should_continue)
        self.changes[assignment.round] = change.values
        return change


@dataclass(frozen=True)
class FederationResult:
    """The results of fanin: the parameters after each Round, and the largest possible difference from Flower's.

    ``request`` is the input for Flower (``flower_fedavg``).
    """

    codec: str
    request: dict[str, object]
    parameters: list[Float32s]
    bounds: list[np.ndarray]


def run_federation(folder: Path, codec: str) -> FederationResult:
    """Run Rounds of four devices through the complete coordinator."""
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)
    trainers = [
        Recording(SyntheticTrainer(partition=index, num_examples=count, scale=0.001 * 5**index))
        for index, count in enumerate(NUM_EXAMPLES)
    ]
    members = tuple(Member(device=f"device-{index}", trainer=trainer) for index, trainer in enumerate(trainers))
    spec = CodecSpec(name=codec, max_shift=DEFAULT_MAX_SHIFTS[codec])
    parameters = []
    for num_rounds in range(1, NUM_ROUNDS + 1):
        run_plan = plan(max_rounds=num_rounds, codec=spec)
        scenario = Scenario(plan=run_plan, bundle=bundle, publisher=PUBLISHER, members=members)
        outcome = play(scenario, folder / str(num_rounds))
        assert all(version.num_saturated == 0 for version in outcome.versions)
        parameters.append(outcome.parameters)
    rounds = [
        [[trainer.drawn.num_examples, hexed(trainer.changes[number])] for trainer in trainers]
        for number in range(1, NUM_ROUNDS + 1)
    ]
    flower_input = {"start": hexed(bundle.initial_parameters()), "rounds": rounds}
    return FederationResult(codec, flower_input, parameters, _bounds(folder / str(NUM_ROUNDS), codec, parameters))


def _bounds(folder: Path, codec: str, parameters: list[Float32s]) -> list[np.ndarray]:
    """Return bounds on the difference from Flower after each Round.

    A bound has two terms. The first is the weighted mean of each Update's rounding error on its grid. The second is
    Flower's own error in float32: one rounding each for a client's parameters, its product and its sum.
    """
    record, bounds = open_archive(folder / "state"), []
    table = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES).manifest.table
    bound = np.zeros(table.num_values)
    # A client's parameters may be larger than the mean of all, by less than the range of a first grid.
    largest = max(float(np.abs(flat).max()) for flat in parameters) + FIRST_RANGE
    for closed_round in record.rounds.rounds("run"):
        updates = record.rounds.updates("run", closed_round.round)
        total = sum(update.header.statistics.counts["examples"] for update in updates)
        for update in updates:
            share = update.header.statistics.counts["examples"] / total
            exponents = [step + shift for step, shift in zip(closed_round.grid, update.header.shifts, strict=True)]
            for start, stop, exponent in blocks_within(table, exponents, 0, table.num_values):
                bound[start:stop] += share * ROUNDING[codec] * 2.0**exponent
        bound = bound + 3 * len(updates) * largest * 2.0**-FLOAT_BITS
        bounds.append(bound)
    return bounds


def hexed(flat: Float32s) -> str:
    """Return the hexadecimal form in the golden file."""
    return flat.astype("<f4").tobytes().hex()

"""The algorithms that a Plan names, and all pairs of them: what docs/reference/algorithms.md lists.

A part is a choice of one kind, such as a rule or a codec, with the keys of a Plan that choose it. ``plan_of`` makes the
shortest Plan with two parts, for seven devices: enough for each rule.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Final
from uuid import uuid4

import numpy as np
import torch

from fanin.clients.planfile import parse_plan
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe, Sgd, export
from fanin.protos.errors import FaninError
from fanin.protos.plans import Plan
from fanin.simulation import run_virtual
from support.virtual import PUBLISHER, open_place, start

NUM_DEVICES: Final = 7
NUM_ROUNDS: Final = 2
BASE: Final[Mapping[str, object]] = {
    "bundle": "bundle",
    "cohort.concurrency": NUM_DEVICES,
    "cohort.quorum": NUM_DEVICES,
    "cohort.deadline_s": 600.0,
    "training.learning_rate": 0.05,
    "stop.max_rounds": NUM_ROUNDS,
}
PRIVATE: Final[Mapping[str, object]] = {
    "privacy.clip_norm": 0.5,
    "privacy.noise_multiplier": 1.0,
    "privacy.epsilon": 100.0,
    "privacy.delta": 0.01,
    "privacy.population": "seven",
    "privacy.population_size": NUM_DEVICES,
    "aggregation.max_examples": 1,
    "codec.max_shift": 0,
}
MASKED: Final[Mapping[str, object]] = {"round.protocol": "secagg", "codec.max_shift": 0}
_SCAFFOLD: Final = {"name": "scaffold", "options": {"num_devices": NUM_DEVICES}}


@dataclass(frozen=True)
class Part:
    """One choice of a Plan.

    Attributes:
        kind: What it is a choice of.
        name: Its name.
        keys: The keys that choose it, by their dotted names.
        defaults: Keys that it needs with such values. Another part may choose other ones.
        stages: The stages that it has.
        has_control: Whether the train graph needs the inputs of control variates.
        has_local: Whether the Bundle needs personal parameters.
    """

    kind: str
    name: str
    keys: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    stages: Sequence[Mapping[str, object]] = ()
    has_control: bool = False
    has_local: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether its Rounds wait for all devices at once."""
        return self.keys.get("round.protocol") == "secagg"


def _rule(name: str, **options: object) -> Part:
    return Part("rule", name, {"aggregation.rule": name, "aggregation.rule_options": options})


def _outer(name: str) -> Part:
    return Part("outer optimizer", name, {"aggregation.outer_optimizer": name})


PARTS: Final = (
    _rule("weighted_mean"),
    _rule("trimmed_mean", trim=0.2),
    _rule("median"),
    _rule("meamed", f=1),
    _rule("krum", f=1),
    _rule("multi_krum", f=1),
    _rule("bulyan", f=1),
    _rule("geometric_median"),
    _rule("centred_clipping", radius=1.0),
    _rule("norm_bounding", radius=1.0),
    *(_outer(name) for name in ("fedavg", "fedavgm", "nesterov", "fedadagrad", "fedadam", "fedyogi")),
    Part("client method", "fedprox", {"training.proximal_weight": 0.1}),
    Part("client method", "scaffold", stages=[_SCAFFOLD], has_control=True),
    Part("client method", "fednova", {"aggregation.rule": "fednova"}, stages=[{"name": "fednova"}]),
    Part(
        "client method",
        "qfedavg",
        {"aggregation.rule": "qfedavg"},
        stages=[{"name": "qfedavg", "options": {"q": 1.0}}],
    ),
    Part(
        "client method",
        "feddyn",
        {"aggregation.outer_optimizer": "feddyn", "training.proximal_weight": 0.1},
        stages=[{"name": "feddyn", "options": {"num_devices": NUM_DEVICES}}],
        has_control=True,
    ),
    Part("client method", "fedrep", {"training.personal_epochs": 1}, has_local=True),
    Part("client method", "ditto", {"training.ditto_weight": 0.1, "training.personal_epochs": 1}),
    Part("staleness", "stale Updates", {"aggregation.max_staleness": 2}),
    Part("pipeline", "error_feedback", stages=[{"name": "error_feedback"}]),
    *(Part("codec", name, {"codec.name": name}) for name in ("fixed32", "int16", "int8", "int4")),
    Part("codec", "topk", {"codec.name": "topk", "codec.options": {"fraction": 0.25, "bits": 8}}),
    Part("weights", "uniform weights", {"aggregation.weights": "uniform"}),
    Part("privacy", "secagg", MASKED, {"aggregation.max_examples": 100}),
    Part("privacy", "central", {"privacy.mechanism": "central", **PRIVATE}),
    Part(
        "privacy",
        "adaptive clipping",
        {"privacy.mechanism": "central", "privacy.target_quantile": 0.5, "privacy.bits_noise": 2.0, **PRIVATE},
    ),
    Part("privacy", "skellam", {"privacy.mechanism": "skellam", **PRIVATE, **MASKED}, {"codec.name": "int8"}),
    Part("privacy", "gaussian-shares", {"privacy.mechanism": "gaussian-shares", **PRIVATE, **MASKED}),
)
"""All parts. Two parts of one kind exclude each other, except stages."""


def pairs() -> Iterator[tuple[Part, Part]]:
    """Yield each pair of parts that a Plan can name at once."""
    for first, second in combinations(PARTS, 2):
        clash = first.keys.keys() & second.keys.keys()
        if first.kind != second.kind and all(first.keys[key] == second.keys[key] for key in clash):
            yield first, second


def plan_of(*parts: Part) -> Plan:
    """Return the shortest Plan with these parts. Raises InvalidPlan if it refuses them."""
    stages = [stage for part in parts for stage in part.stages]
    tables = (BASE, *(part.defaults for part in parts), *(part.keys for part in parts))
    keys = {key: value for table in tables for key, value in table.items()}
    texts = [f"{key}={_toml(value)}" for key, value in (keys | {"stages": stages}).items()]
    return parse_plan("", "combination", texts).plan


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def app(has_control: bool, has_local: bool) -> App:
    """Return an App whose graphs carry out each method that needs such inputs and personal parameters, or none."""
    torch.manual_seed(0)
    return App(
        name=f"combined-{has_control}-{has_local}",
        module=torch.nn.Linear(4, 3),
        calibration=torch.randn(16, 4),
        batch_size=4,
        num_classes=3,
        recipe=Recipe(
            optimizer=Sgd(momentum=0.0), proximal=True, scaffold=has_control, local=["bias"] if has_local else []
        ),
    )


def examples_of(index: int) -> dict[str, np.ndarray]:
    """Return the examples of a device, between 8 and 20."""
    rng = np.random.default_rng(index)
    x = rng.standard_normal((8 + 2 * index, 4), np.float32)
    return {"x": x, "y": x[:, :3].argmax(1).astype(np.int32)}


Needs = tuple[bool, bool]
"""Whether a Bundle has the inputs of control variates, and whether it has personal parameters."""


def needs_of(*parts: Part) -> Needs:
    """Return what the Bundle of a Run with these parts has."""
    return any(part.has_control for part in parts), any(part.has_local for part in parts)


def bundles_in(folder: Path) -> dict[Needs, Bundle]:
    """Export the Apps of all pairs into a new folder, by what they have."""
    needs = {needs_of(*pair) for pair in pairs()}
    return {
        each: export(app(*each), folder / f"{number}", PUBLISHER, formats=("onnx",)).bundle
        for number, each in enumerate(sorted(needs))
    }


def refusals(folder: Path, bundles: Mapping[Needs, Bundle]) -> dict[tuple[str, str], FaninError]:
    """Return the error of each pair whose Run does not start."""
    refused: dict[tuple[str, str], FaninError] = {}

    async def main() -> None:
        place = open_place(folder)
        await place.runs.start()
        for first, second in pairs():
            try:
                await start(place.runs, bundles[needs_of(first, second)], plan_of(first, second), f"run-{uuid4()}")
            except FaninError as exc:
                refused[first.name, second.name] = exc
        await place.runs.stop()

    run_virtual(main())
    return refused

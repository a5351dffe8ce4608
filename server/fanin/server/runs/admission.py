"""Checks of operators' publications: Bundles, Versions and the start of a Run.

Nothing is recorded before it has passed these checks, so devices can rely on every recorded Bundle and Version. The
Chunks come from an operator. Those that do not fit together are the operator's mistake (InvalidBundle, InvalidVersion);
Chunks damaged after their upload are damage of the coordinator (Corrupted).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import MAX_MANIFEST_BYTES, Bundle, SignedManifest
from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.bundles.versions import check_delegation, check_version
from fanin.edge.codecs.methods.fednova import FEDNOVA
from fanin.edge.codecs.scaffold import CONTROL, NUM_DEVICES, declared_devices, named_devices
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import EVALUATE_ONLY, inputs_of
from fanin.edge.runtimes.graphs import PROXIMAL_WEIGHT, control_ports, optimizer_table
from fanin.edge.tensors import TensorTable, decode_parameters
from fanin.protos.chunks import Artifact, assemble, short
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidPlan, InvalidVersion
from fanin.protos.messages import FIRST_EPOCH, UNSEEN, BundleRef, Delegation, StartRun, Version
from fanin.protos.plans import EXPORT, OPTIMIZER_SETTINGS, FlowerPlan, Plan, ScheduledChange, Training
from fanin.protos.plans.keys import keys_of
from fanin.server.aggregation.methods.checks import PARTS, check_measured, check_personal
from fanin.server.rounds.setup import RunSetup
from fanin.server.runs.measuring import check_evaluation, check_query
from fanin.server.storage.protocols.files import BlobReader, Blobs

OF_GRAPHS: Final = MappingProxyType(
    {key.name: key.default for key in keys_of(Training) if key.name not in ("learning_rate", "seed")}
)
"""Settings of training that only graphs read, with their defaults."""
MAX_REPEATED_BYTES: Final = 256 << 20
"""Bytes of a Bundle's artifacts that may repeat Chunks, in addition to as many as its Chunks have. Hashing them takes a
second. Initial parameters that are all zero have such Chunks."""


def open_bundle(ref: BundleRef, blobs: BlobReader) -> Bundle:
    """Open a Bundle and verify its manifest.

    Raises:
        InvalidBundle: The manifest is too large or invalid, or its Chunks do not form it.
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged.
    """
    if ref.manifest.size_bytes > MAX_MANIFEST_BYTES:
        raise InvalidBundle(
            f"bundle: got a manifest of {ref.manifest.size_bytes} bytes, expected at most {MAX_MANIFEST_BYTES}",
            code="FN-0378",
        )
    try:
        # Not ``read_artifact``: it would report the operator's wrong Chunks as our damage.
        data = assemble("manifest", ref.manifest, blobs.read)
    except InvalidInput as exc:
        raise InvalidBundle(f"bundle: {exc}", code=exc.code) from exc
    signed = SignedManifest(data=data, public_key=ref.public_key, signature=ref.signature)
    return Bundle.open(signed, trusted=(ref.public_key,), read=blobs.read)


def check_bundle(ref: BundleRef, blobs: Blobs) -> None:
    """Verify every artifact of a Bundle, as a device would. Raises like ``open_bundle``."""
    bundle = open_bundle(ref, blobs)
    artifacts = (ref.manifest, *bundle.manifest.artifacts.values())
    _check_work(artifacts)
    # From here on the Chunks stay, although the Bundle is recorded only after all of them were read.
    blobs.renew({chunk.sha256 for artifact in artifacts for chunk in artifact.chunks})
    for name in bundle.manifest.artifacts:
        bundle.artifact(name)
    bundle.completed(bundle.initial_parameters())


def _check_work(artifacts: Iterable[Artifact]) -> None:
    """Raise InvalidBundle if artifacts repeat their Chunks so often that verifying them would take too long.

    All bytes of an artifact are hashed. A manifest of 110 kB can name one Chunk a thousand times, and so 3 GB.
    """
    artifacts = tuple(artifacts)
    refs = {ref.sha256: ref.size_bytes for artifact in artifacts for ref in artifact.chunks}
    total, stored = sum(artifact.size_bytes for artifact in artifacts), sum(refs.values())
    if total - stored > stored + MAX_REPEATED_BYTES:
        raise InvalidBundle(
            f"bundle: got artifacts of {total} bytes from chunks of {stored} bytes, expected at most "
            f"{2 * stored + MAX_REPEATED_BYTES}; export it with parameters that repeat fewer values",
            code="FN-0378",
        )


def check_start(start: StartRun, setup: RunSetup) -> None:
    """Check the command that starts a Run: Version 0, its delegation, and the Plan.

    Raises:
        InvalidVersion: The Version or the delegation is not for this Run.
        InvalidPlan: The Bundle's graphs cannot carry out the Plan.
    """
    if start.version.number != 0:
        raise InvalidVersion(
            f"run {start.run_id}: got version {start.version.number} to start from, expected 0", code="FN-0601"
        )
    check_outside(start.version, setup.bundle)
    if start.delegation.epoch != start.version.epoch or start.version.epoch != FIRST_EPOCH:
        raise InvalidVersion(
            f"run {start.run_id}: got a version of epoch {start.version.epoch} and a delegation of epoch "
            f"{start.delegation.epoch}, expected {FIRST_EPOCH}",
            code="FN-0601",
        )
    check_permission(start.delegation, start.run_id, setup.bundle, setup.run_key.public)
    _check_plan(start, setup)


def check_permission(delegation: Delegation, run_id: str, bundle: BundleRef, run_public_key: str) -> None:
    """Raise InvalidVersion unless a Bundle's publisher delegated to this key of this Run."""
    if (delegation.run_id, delegation.bundle_sha256, delegation.run_public_key) != (
        run_id,
        bundle.manifest.sha256,
        run_public_key,
    ):
        raise InvalidVersion(
            f"run {run_id}: the delegation is for run {delegation.run_id}, bundle "
            f"{short(delegation.bundle_sha256)} and key {short(delegation.run_public_key)}, expected this run, "
            f"bundle {short(bundle.manifest.sha256)} and key {short(run_public_key)}",
            code="FN-0602",
        )
    check_delegation(delegation, bundle.public_key)


def check_outside(version: Version, bundle: BundleRef) -> None:
    """Raise InvalidVersion unless a Version from outside is signed for the Bundle of its Run, and has only parameters.

    It starts a lineage, in which the auxiliary tensors are initially zero.
    """
    if version.auxiliary:
        raise InvalidVersion(
            f"version {version.number} of run {version.run_id}: got the auxiliary tensors {list(version.auxiliary)}, "
            "expected none: they begin with zeros after a version from outside; publish the parameters alone",
            code="FN-0601",
        )
    check_version(
        version,
        run_id=version.run_id,
        bundle_sha256=bundle.manifest.sha256,
        publisher=bundle.public_key,
        seen=UNSEEN,
    )


def check_parameters(artifact: Artifact, table: TensorTable, blobs: Blobs) -> None:
    """Check the parameters of a Version.

    Raises:
        InvalidVersion: They do not fit the Bundle's table, or a value is not finite, or out of the range of its tensor.
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged.
    """
    size_bytes = len(table.header()) + 4 * table.num_values
    if artifact.size_bytes != size_bytes:
        # Before they are read: the message can name one Chunk tens of thousands of times.
        raise InvalidVersion(
            f"parameters: got {artifact.size_bytes} bytes, expected {size_bytes} by the bundle", code="FN-0357"
        )
    blobs.renew({ref.sha256 for ref in artifact.chunks})
    try:
        # Not ``read_artifact``: it would report the operator's wrong Chunks as our damage.
        data = assemble("parameters", artifact, blobs.read)
        published_table, flat = decode_parameters(data)
    except InvalidInput as exc:
        raise InvalidVersion(str(exc), code=exc.code) from exc
    if published_table != table:
        raise InvalidVersion("parameters: names or shapes differ from the bundle's", code="FN-0357")
    if not np.isfinite(flat).all():
        raise InvalidVersion(
            "parameters: got NaN or infinity, expected finite values; the training diverged", code="FN-0359"
        )
    try:
        table.check_values(flat)
    except InvalidInput as exc:
        raise InvalidVersion(f"parameters: {exc}", code=exc.code) from exc


def _check_plan(start: StartRun, setup: RunSetup) -> None:
    """Raise InvalidPlan if the Plan and the Bundle's graphs do not fit together."""
    manifest = setup.manifest
    check_query(start, manifest)
    if faults := manifest.privacy_floor.faults(start.plan.round, start.plan.privacy):
        raise InvalidPlan(
            f"run {start.run_id}: the bundle has a privacy floor, and devices would refuse this plan: got "
            f"{'; '.join(faults)}; raise the plan to it, its publisher signed it",
            code="FN-1703",
        )
    if not manifest.signatures:
        check_no_graphs(f"run {start.run_id}", start.plan, setup.stages)
        return
    if setup.plan.int8.ranges != EXPORT and not setup.activations:
        raise InvalidPlan(
            f"run {start.run_id}: got int8.ranges {setup.plan.int8.ranges!r}, but the bundle lists no activations "
            "whose ranges could be measured; export the App again, or remove the key",
            code="FN-0269",
        )
    inputs = manifest.signatures["train"].inputs
    facts = TrainFacts(
        has_proximal=PROXIMAL_WEIGHT in {port.name for port in inputs},
        has_local=manifest.local is not None,
        has_control=bool(control_ports(setup.table, inputs)),
        optimizer=manifest.optimizer,
        batch_sizes=manifest.batch_sizes,
        states=frozenset(spec.name.partition(".")[0] for spec in optimizer_table(manifest).specs),
    )
    check_training(f"run {start.run_id}", start.plan, setup.stages, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFacts:
    """The settings that a Plan may change in the train graphs of a Bundle, or of an App before its export.

    Attributes:
        has_proximal: Whether the graph has FedProx's inputs.
        has_local: Whether some parameters are personal.
        has_control: Whether the graph has SCAFFOLD's control variates.
        optimizer: The settings of the optimizer by name.
        batch_sizes: The batch sizes, each with a graph.
        states: The names of the optimizer's states, each with a value for each parameter.
    """

    has_proximal: bool
    has_local: bool
    has_control: bool
    optimizer: Mapping[str, OptimizerSetting]
    batch_sizes: tuple[int, ...]
    states: frozenset[str]

    @property
    def is_sgd(self) -> bool:
        """Whether the optimizer is SGD, with or without momentum."""
        return self.states <= {"momentum"} and self.optimizer.keys() <= {"momentum", "weight_decay"}


def check_training(what: str, plan: Plan, stages: Mapping[str, Stage], facts: TrainFacts) -> None:
    """Raise InvalidPlan if the train graphs cannot carry out a Plan.

    Args:
        what: The Run or the command, for errors.
        plan: The Plan.
        stages: The stages of the Plan by name.
        facts: The graphs.
    """
    config = [f"{path}.config" for path, each in _flower_settings(plan) if each.config]
    config += ["flower.roles"] * bool(plan.flower.roles) + ["flower.strategy"] * bool(plan.flower.strategy)
    if config:
        raise InvalidPlan(
            f"{what}: got {', '.join(config)}, but the bundle has graphs, which read no such values; remove this from "
            "the plan, or publish a bundle of fanin bundle",
            code="FN-0260",
        )
    if EVALUATE_ONLY in stages:
        check_evaluation(what, plan, stages)
    elif not plan.training.learning_rate:
        raise InvalidPlan(
            f"{what}: training.learning_rate: got none, expected a rate of the train graph; add the key", code="FN-0286"
        )
    _check_control(what, stages, has_control=facts.has_control)
    _check_num_devices(what, plan)
    if FEDNOVA in stages and not facts.is_sgd:
        raise InvalidPlan(
            f"{what}: got the stage {FEDNOVA!r}, but the optimizer of the train graph is not SGD, expected SGD with or "
            "without momentum: the weights of its steps are not known; export the App with Recipe(optimizer=Sgd(...)), "
            "or remove the stage",
            code="FN-1816",
        )
    check_personal(what, plan, has_local=facts.has_local, has_proximal=facts.has_proximal)
    for path, settings in _training_settings(plan):
        if settings.proximal_weight and not facts.has_proximal:
            raise InvalidPlan(
                f"{what}: got {path}.proximal_weight {settings.proximal_weight:g}, but the train graph has no such "
                "input; export the App with Recipe(proximal=True)",
                code="FN-0266",
            )
        _check_optimizer(f"{what}: got {path}.optimizer", settings.optimizer, facts.optimizer)
        if (size := settings.batch_size) and size not in facts.batch_sizes:
            raise InvalidPlan(
                f"{what}: got {path}.batch_size {size}, but the bundle's train graphs are for "
                f"{', '.join(map(str, facts.batch_sizes))}; choose one of these, or export the App with "
                f"App(other_batch_sizes=({size},))",
                code="FN-0263",
            )


def _training_settings(plan: Plan) -> list[tuple[str, Training | ScheduledChange]]:
    """Return the settings of training and their changes, each with its path in the Plan."""
    return [("training", plan.training), *((f"schedule.{index}", each) for index, each in enumerate(plan.schedule))]


def _flower_settings(plan: Plan) -> list[tuple[str, FlowerPlan]]:
    """Return the settings of Flower apps and their changes, each with its path in the Plan."""
    changes = [(f"schedule.{index}.flower", each.flower) for index, each in enumerate(plan.schedule)]
    return [("flower", plan.flower), *changes]


def _check_optimizer(what: str, changes: Mapping[str, float], known: Mapping[str, OptimizerSetting]) -> None:
    """Raise InvalidPlan if the Plan changes a setting that the optimizer lacks, or to a value that it excludes."""
    if unknown := sorted(changes.keys() - known.keys()):
        raise InvalidPlan(
            f"{what} {', '.join(unknown)}, but the settings in the train graph are: {', '.join(known) or 'none'}; "
            f"{_optimizer_remedy(unknown, known)} (docs/howto/recipe.md#optimizers)",
            code="FN-0264",
        )
    for name, value in changes.items():
        if not known[name].allows(value):
            raise InvalidPlan(
                f"{what}.{name} {value:g}, expected at least 0 and below {known[name].below:g}", code="FN-0264"
            )


def _optimizer_remedy(unknown: Sequence[str], known: Collection[str]) -> str:
    strange = [name for name in unknown if name not in OPTIMIZER_SETTINGS]
    if strange and (near := get_close_matches(strange[0], {*known, *OPTIMIZER_SETTINGS}, n=1)):
        return f"for {strange[0]}, did you mean {near[0]}?"
    if strange:
        return f"the optimizers of fanin have {', '.join(OPTIMIZER_SETTINGS)}; remove {strange[0]}"
    remedy = "export the App with an optimizer that has them"
    # An optimizer with betas has no momentum.
    settable = tuple(
        name for name in unknown if name == "weight_decay" or (name == "momentum" and "beta1" not in known)
    )
    if not settable:
        return remedy
    return (
        f"{remedy}. A momentum or weight decay of 0.0 is in the graph only if the optimizer has the field "
        f"settable={settable!r}"
    )


def check_no_graphs(what: str, plan: Plan, stages: Mapping[str, Stage]) -> None:
    """Raise InvalidPlan if a Plan for a Bundle without graphs has settings that only graphs support.

    Args:
        what: The Run or the command, for errors.
        plan: The Plan.
        stages: The stages of the Plan by name.
    """
    check_measured(what, plan, has_own=False)
    is_set = {
        f"{path}.{name}": getattr(settings, name, None) not in (None, default)
        for path, settings in _training_settings(plan)
        for name, default in OF_GRAPHS.items()
    }
    is_set |= {
        "evaluation.data": bool(plan.evaluation.data),
        "stop.max_int8_drop": plan.stop.max_int8_drop > 0.0,
        "int8.ranges": plan.int8.ranges != EXPORT,
        "the stage evaluate_only": EVALUATE_ONLY in stages,
        **{f"the stage {name}": name in PARTS or name == inputs_of(stages).get(CONTROL) for name in stages},
    }
    if keys := [key for key, value in is_set.items() if value]:
        raise InvalidPlan(
            f"{what}: got {', '.join(keys)}, but the bundle has no graphs: the code on the devices trains; remove this "
            "from the plan, and set it in the app (docs/howto/flower.md)",
            code="FN-0260",
        )


def _check_control(what: str, stages: Mapping[str, Stage], *, has_control: bool) -> None:
    """Raise InvalidPlan unless the train graph has SCAFFOLD's control variates if a stage sets them.

    Without a stage a device feeds zeros to the inputs, so one App may serve FedAvg and SCAFFOLD.
    """
    owner = inputs_of(stages).get(CONTROL)
    if owner is not None and not has_control:
        raise InvalidPlan(
            f"{what}: got the stage {owner!r}, but the train graph has no inputs {CONTROL}.<name>, so no device could "
            "correct its gradients; export the App with Recipe(scaffold=True), or remove the stage",
            code="FN-0266",
        )


def _check_num_devices(what: str, plan: Plan) -> None:
    """Raise InvalidPlan if the number of all devices is below a Round's concurrency: a step would overshoot."""
    concurrency, declared = plan.cohort.concurrency, declared_devices(plan.stages)
    if declared is not None and declared < concurrency:
        raise InvalidPlan(
            f"{what}: got {named_devices(plan.stages)} {NUM_DEVICES} {declared} and cohort.concurrency {concurrency}, "
            f"expected at least {concurrency}: {NUM_DEVICES} counts all devices of the Run",
            code="FN-0268",
        )

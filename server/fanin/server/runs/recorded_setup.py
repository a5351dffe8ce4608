"""The setup of a Run from its record, which devices suit it, and whether the record may be continued."""

import hashlib
import logging
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.sparse.requirements import check_sparse_model, check_sparse_plan
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.metrics.metric import metrics_of
from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, Corrupted, InvalidInput, InvalidPlan, NotFound
from fanin.protos.messages import BundleRef, Capabilities, Delegation, DeviceQuery, StartRun
from fanin.protos.plans import DATA, Plan
from fanin.protos.plans.keys import differences, shown
from fanin.protos.plans.privacy import COINS
from fanin.protos.roles import PARAMETER
from fanin.protos.texts import counted
from fanin.server.aggregation.checked import optimizer_of, rule_of
from fanin.server.aggregation.methods.checks import check_methods, check_weights
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.rules import ColumnRule, StrategySource, StrategyTask, config_in
from fanin.server.privacy.noising import with_noise
from fanin.server.protocols.known import protocol_of
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.targets import check_target
from fanin.server.runs.admission import open_bundle
from fanin.server.runs.data import DataSource, NoData, check_data_name
from fanin.server.runs.suitability import unsuitable
from fanin.server.selection.coins import Coins
from fanin.server.selection.policies import POLICIES, SelectionPolicy, policy_of
from fanin.server.storage.decisions import lost_key
from fanin.server.storage.protocols.files import BlobReader
from fanin.server.storage.protocols.ledger import SEED_BYTES
from fanin.server.storage.stores import Files, Stores
from fanin.server.strategies.process import Strategies

LOG: Final = logging.getLogger("fanin.server.runs.recorded_setup")
NUM_COPIES: Final = 6
"""Copies of the parameters in the process of a strategy besides the Updates, such as the base and the result."""
FLOWER_MB: Final = 70
"""What flwr takes itself."""
MAX_CHANGES_SHOWN: Final = 5
"""Keys with another value that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a coordinator has for the Plans of its Runs, besides the installed packages.

    Attributes:
        policies: The selection policies by name.
        strategies: Runs the Flower strategies that Plans name.
        data: The data sets that Plans may name. The default has none.
        roster: The devices that coins may draw; None: those that are enrolled when a Run starts. Only a simulation,
            which enrolls none, has another one.
        draw_seed: Returns a new seed of the noise of a Run's Round. The default draws it from the operating system, and
            only a simulation has another one.
    """

    policies: Mapping[str, SelectionPolicy] = field(default_factory=lambda: POLICIES)
    strategies: StrategySource = field(default_factory=Strategies)
    data: DataSource = field(default_factory=NoData)
    roster: Container[str] | None = None
    draw_seed: Callable[[str, int], bytes] = lambda _run_id, _round_number: secrets.token_bytes(SEED_BYTES)


def check_parts(plan: Plan, parts: Parts) -> None:
    """Raise InvalidPlan if a Plan names something that is not here."""
    check_data_name("plan", plan, parts.data.names)
    check_names(plan, parts.policies)
    if plan.stop.target is not None:
        check_target(plan, metrics_of(each.name for each in plan.evaluation.metrics))


def check_names(plan: Plan, policies: Mapping[str, SelectionPolicy]) -> Mapping[str, Stage]:
    """Return the stages of a Plan by name. Raises InvalidPlan if it names something that is not here."""
    codec_of(plan.codec)
    rule, protocol = rule_of(plan), protocol_of(plan)
    if (protocol.ring or protocol.correct) and (isinstance(rule, ColumnRule) or plan.flower.strategy):
        raise InvalidPlan(
            f"plan: got round.protocol {plan.round.protocol!r}, which adjusts the sum of the Updates, with a rule or a "
            "strategy that is no sum, expected a rule that is one; set aggregation.rule to weighted_mean",
            code="FN-1601",
        )
    check_methods(plan)
    optimizer_of(plan)
    policy_of(plan, policies)
    stages = stages_of(plan.stages)
    check_weights(plan, stages)
    check_sparse_plan(plan, stages, is_sum=not isinstance(rule, ColumnRule), is_masked=protocol.is_masked)
    return stages


async def setup_of(start: StartRun, delegation: Delegation, stores: Stores, files: Files, parts: Parts) -> RunSetup:
    """Return the setup of a Run.

    Args:
        start: The command that started the Run.
        delegation: The publisher's permission for the key of the Run's epoch.
        stores: The record.
        files: Blobs and spool.
        parts: The parts that Plans may name, in addition to the installed ones.

    Raises:
        NotFound: The Bundle or a Chunk is missing.
        Corrupted: The Bundle's record does not verify.
        InvalidPlan: The Plan names something that is not installed here, or a strategy that may not run here.
    """
    sha256 = start.version.bundle_sha256
    bundle = await recorded_bundle(sha256, stores)
    try:
        manifest = (await files.run(open_bundle, bundle, files.blobs)).manifest
    except InvalidInput as exc:
        # The Bundle passed verification when it was published, so the record must have changed.
        raise Corrupted(
            f"bundle {short(sha256)}: its record does not verify ({exc}); restore a backup", code="FN-0525"
        ) from exc
    stages, table = stages_of(start.plan.stages), table_in(manifest, start.plan.flower)
    layout = layout_of(table, stages)
    run_key = await run_key_of(start.run_id, delegation.epoch, stores)
    return RunSetup(
        start=start,
        delegation=delegation,
        bundle=bundle,
        manifest=replace(manifest, table=table),
        codec=codec_of(start.plan.codec),
        rule=rule_of(start.plan),
        optimizer=optimizer_of(start.plan),
        strategy=parts.strategies.runner(start.run_id, start.plan) if start.plan.flower.strategy else None,
        policy=policy_of(start.plan, parts.policies),
        protocol=with_noise(protocol_of(start.plan), start.plan, layout.total_table.num_values),
        stages=stages,
        layout=layout,
        measure=partial(parts.data.measure, start.plan, bundle) if start.plan.int8.ranges == DATA else None,
        draw_seed=partial(parts.draw_seed, start.run_id),
        coins=await coins_of(start, run_key, stores, parts.roster),
        run_key=run_key,
    )


def check_sum(start: StartRun, setup: RunSetup) -> None:
    """Raise InvalidPlan if the sum of a model is sparse, or adjusted by noise or by the protocol, and cannot be."""
    check_sparse_model(start.plan, setup.table)
    specs = setup.layout.total_table.specs
    if setup.noise is not None and (others := [spec.name for spec in specs if spec.role != PARAMETER]):
        raise InvalidPlan(
            f"run {start.run_id}: got privacy.mechanism {start.plan.privacy.mechanism!r} with a model whose tensor "
            f"{others[0]!r} is a running statistic, a counter, or a parameter with a range, expected parameters "
            "without a range alone; keep it on the devices (Recipe(local=...)), use a norm without statistics, such as "
            "GroupNorm, or remove the range",
            code="FN-1684",
        )
    adjusts = setup.protocol.ring is not None or setup.protocol.correct is not None
    if adjusts and not TrainedPart(setup.layout.total_table).is_all:
        raise InvalidPlan(
            f"run {start.run_id}: got round.protocol {start.plan.round.protocol!r}, which adjusts the sum of the "
            "Updates, with a model that has running statistics or counters, expected parameters alone; keep these on "
            "the devices (Recipe(local=...)), or use a norm without them",
            code="FN-1601",
        )
    if setup.protocol.is_masked and len(setup.layout.groups) > 1:
        raise InvalidPlan(
            f"run {start.run_id}: got round.protocol {start.plan.round.protocol!r}, which masks the Updates, with "
            "stages that add groups of values, expected none: the groups have weights of their own; remove the stages",
            code="FN-1601",
        )


def check_strategy(start: StartRun, setup: RunSetup, blobs: BlobReader) -> None:
    """Check the strategy of a Run before it starts, and log the memory that it needs. Raises InvalidPlan."""
    plan, name = start.plan, start.plan.flower.strategy
    if setup.strategy is None:
        return
    if len(setup.layout.groups) > 1:
        raise InvalidPlan(
            f"run {start.run_id}: got flower.strategy {name} with stages that add groups of values, expected none: the "
            "strategy sees parameters alone; remove the stages",
            code="FN-0922",
        )
    part = TrainedPart(setup.table)
    parameters, _ = part.split(load_parameters(blobs, start.version, setup.table), 0)
    task = StrategyTask(round=1, config=config_in(plan, 1), table=part.trained, parameters=parameters)
    result = setup.strategy.run(task, ())
    num_held = 1 if plan.flower.strategy_streams else plan.cohort.buffer
    LOG.info(
        "run %s: the strategy %s runs in a process of its own with up to %s at a time: %.0f MB and what it computes",
        *(start.run_id, name, counted(num_held, "update")),
        (num_held + NUM_COPIES) * parameters.nbytes / 1e6 + FLOWER_MB,
    )
    if result.unsaved:
        LOG.warning(
            "run %s: after a restart, the run cannot resume: the state of the strategy %s cannot be saved (%s)",
            *(start.run_id, name, result.unsaved),
        )


async def recorded_bundle(sha256: str, stores: Stores) -> BundleRef:
    """Return a Bundle of the record. Raises NotFound."""
    bundle = await stores.runs.bundle(sha256)
    if bundle is None:
        raise NotFound(f"bundle {short(sha256)}: not published here; publish it before starting a run", code="FN-0606")
    return bundle


async def run_key_of(run_id: str, epoch: int, stores: Stores) -> SigningKey:
    """Return the key that signs the Versions of an epoch of a Run. It is created for an epoch that has not begun.

    Raises:
        Conflict: The Run has another epoch, or its key is lost.
    """
    new_key = SigningKey.generate().private_bytes()
    return SigningKey(await stores.runs.run_key(run_id, epoch, new_key, stores.wall()))


async def coins_of(
    start: StartRun, run_key: SigningKey, stores: Stores, roster: Container[str] | None = None
) -> Coins | None:
    """Return the coins of a Run, whose roster are the devices that were enrolled when it started; None without coins.

    The delta of a Plan is for a population. So none may be smaller than the enrolled devices, with and without coins.

    Their key derives from that of the Run's epoch. Another epoch begins without an open Round
    (``CommandStore.reclaim``), so no Round is drawn twice. A restored Run, whose numbers of Rounds may repeat, always
    has another epoch.

    Raises:
        InvalidPlan: More devices are enrolled than the population of the Plan has.
    """
    privacy = start.plan.privacy
    if not privacy:
        return None
    enrolled = await _enrolled(start.run_id, stores) if roster is None else frozenset()
    if len(enrolled) > privacy.population_size:
        raise InvalidPlan(
            f"run {start.run_id}: got privacy.population_size {privacy.population_size} with "
            f"{counted(len(enrolled), 'enrolled device')}, expected at least as many: each of them may take part; "
            "raise it, lower delta to 1 / population_size, and with coins raise cohort.buffer",
            code="FN-1722",
        )
    if privacy.sampling != COINS:
        return None
    key = hashlib.sha256(b"fanin coins" + run_key.private_bytes()).digest()
    return Coins(key=key, rate=privacy.sampling_rate, roster=enrolled if roster is None else roster)


async def _enrolled(run_id: str, stores: Stores) -> frozenset[str]:
    """Return the devices that were enrolled when a Run started, or now if it has not."""
    run, devices = await stores.runs.run(run_id), set[str]()
    until_s = stores.wall() if run is None else run.started_at_s
    query: DeviceQuery | None = DeviceQuery()
    while query is not None:
        page = await stores.devices.device_page(query)
        devices |= {device.device_id for device in page.devices if device.enrolled_at <= until_s}
        query = DeviceQuery(after=page.next) if page.next else None
    return frozenset(devices)


def check_key(setup: RunSetup) -> None:
    """Raise Conflict unless the key of a recorded Run is the one to which its publisher delegated."""
    if setup.run_key.public != setup.delegation.run_public_key:
        raise lost_key(setup.start.run_id)


async def check_up_to_date(run_id: str, stores: Stores, files: Files) -> None:
    """Raise Corrupted if the record of a Run is older than its payloads.

    SQLite drops the end of a damaged write-ahead log without an error. The Run would publish numbers again that devices
    have already seen.
    """
    last = await stores.rounds.last(run_id)
    recorded = 0 if last is None else last.round
    stored = await files.run(files.spool.newest_round, run_id)
    if stored > recorded:
        raise Corrupted(
            f"run {run_id}: fanin.db ends at round {recorded}, but updates/{run_id}/{stored} has payloads: the "
            "database or its write-ahead log is older than the updates; restore a backup of the folder, or move "
            f"the folders after {recorded} away",
            code="FN-0510",
        )


def refusal_of(setup: RunSetup, capabilities: Capabilities) -> str:
    """Return why a device with these capabilities cannot take part in a Run, or an empty string if it can."""
    download_bytes = setup.download_bytes(capabilities.graph_formats)
    return unsuitable(capabilities, setup.plan, setup.graph_formats, download_bytes)


def taken_id(known: StartRun, start: StartRun) -> Conflict:
    """Return the error for a Run that is started under the id of another one, with what differs between them."""
    problems = plan_problems(known.plan, start.plan)
    there, here = known.version, start.version
    if there.bundle_sha256 != here.bundle_sha256:
        problems.append(
            f"a run of another bundle (there {short(there.bundle_sha256)}, here {short(here.bundle_sha256)})"
        )
    if there.public_key != here.public_key:
        problems.append(f"a run of another publisher (there {short(there.public_key)}, here {short(here.public_key)})")
    return taken_by(start.run_id, problems or ["a run with another version 0"])


def plan_problems(known: Plan, plan: Plan) -> list[str]:
    """Return one text if a Plan differs from that of a Run, else none."""
    changes = [f"{path} (there {shown(there)}, here {shown(here)})" for path, there, here in differences(known, plan)]
    if not changes:
        return []
    more = [counted(len(changes) - MAX_CHANGES_SHOWN, "more key")] if len(changes) > MAX_CHANGES_SHOWN else []
    return [f"a run of another plan; it differs in {', '.join([*changes[:MAX_CHANGES_SHOWN], *more])}"]


def taken_by(run_id: str, problems: Sequence[str]) -> Conflict:
    """Return the error for an id that a Run with these differences has."""
    return Conflict(
        f"run {run_id}: the id is taken by {' and by '.join(problems)}. A run cannot change: choose another id "
        "(--run-id), or start it without the change",
        code="FN-0604",
    )

"""The setup of a Run from its record, which devices suit it, and whether the record may be continued."""

from collections.abc import Mapping
from dataclasses import replace

from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.protos.chunks import short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound
from fanin.protos.messages import BundleRef, Capabilities, Delegation, StartRun
from fanin.protos.plans import Plan
from fanin.server.aggregation.checked import optimizer_of, rule_of
from fanin.server.rounds.setup import RunSetup
from fanin.server.runs.admission import open_bundle
from fanin.server.runs.suitability import unsuitable
from fanin.server.selection.policies import SelectionPolicy, policy_of
from fanin.server.storage.decisions import lost_key
from fanin.server.storage.stores import Files, Stores


def check_names(plan: Plan, policies: Mapping[str, SelectionPolicy]) -> Mapping[str, Stage]:
    """Return the stages of a Plan by name. Raises InvalidPlan if it names something that is not here."""
    codec_of(plan.codec)
    rule_of(plan)
    optimizer_of(plan)
    policy_of(plan, policies)
    return stages_of(plan.stages)


async def setup_of(
    start: StartRun, delegation: Delegation, stores: Stores, files: Files, policies: Mapping[str, SelectionPolicy]
) -> RunSetup:
    """Return the setup of a Run.

    Args:
        start: The command that started the Run.
        delegation: The publisher's permission for the key of the Run's epoch.
        stores: The record.
        files: Blobs and spool.
        policies: The selection policies by name, in addition to the installed ones.

    Raises:
        NotFound: The Bundle or a Chunk is missing.
        Corrupted: The Bundle's record does not verify.
        InvalidPlan: The Plan names something that is not installed here.
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
    return RunSetup(
        start=start,
        delegation=delegation,
        bundle=bundle,
        manifest=replace(manifest, table=table),
        codec=codec_of(start.plan.codec),
        rule=rule_of(start.plan),
        optimizer=optimizer_of(start.plan),
        policy=policy_of(start.plan, policies),
        stages=stages,
        layout=layout_of(table, stages),
        run_key=await run_key_of(start.run_id, delegation.epoch, stores),
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

"""The publisher's part of reclaiming a Run, without gRPC."""

from fanin.edge.bundles.versions import begin_epoch, sign_delegation, sign_version
from fanin.protos.messages import Reclaim, Version
from fanin.server.runs.catalog import Runs
from support.virtual import PUBLISHER


async def reclaim_of(runs: Runs, newest: Version, rounds: int = 0) -> Reclaim:
    """Return the publisher's request for the next epoch, with the parameters of the newest Version."""
    following = sign_version(
        PUBLISHER, parent=newest, run_id="run", bundle_sha256=newest.bundle_sha256, parameters=newest.parameters
    )
    version = begin_epoch(PUBLISHER, following)
    key = await runs.prepare_run("run", version.epoch)
    delegation = sign_delegation(
        PUBLISHER, run_id="run", epoch=version.epoch, bundle_sha256=newest.bundle_sha256, run_public_key=key
    )
    return Reclaim(delegation=delegation, version=version, adopted_number=newest.number, rounds=rounds)

"""The calls of an operator to a coordinator in this process, without gRPC."""

from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.protos.chunks import cut
from fanin.protos.messages import StartRun
from fanin.protos.plans import Plan
from fanin.server.runs.catalog import Runs


async def start_run(runs: Runs, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey) -> None:
    """Publish a Bundle and start a Run of it. Raises the errors of ``Runs``."""
    for data in (bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)):
        for ref, piece in cut(data):
            await runs.put_chunk(ref.sha256, piece)
    await runs.publish_bundle(ref_of(bundle.signed))
    run_key = await runs.prepare_run(run_id)
    initial = bundle.manifest.artifacts[bundle.manifest.initial]
    version = sign_version(publisher, parent=None, run_id=run_id, bundle_sha256=bundle.sha256, parameters=initial)
    delegation = sign_delegation(publisher, run_id=run_id, bundle_sha256=bundle.sha256, run_public_key=run_key)
    await runs.start_run(StartRun(run_id=run_id, plan=plan, version=version, delegation=delegation))

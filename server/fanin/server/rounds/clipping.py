"""The clip norm of a Round: that of the Plan, or the recorded one of its base Version.

It is a function of the base Version, as the grid is. So a restart, a rollback and ``fanin verify`` get the same one.
"""

from fanin.protos.errors import Corrupted, NotFound
from fanin.protos.messages import Version
from fanin.server.privacy.noising import CentralNoise, SharedNoise, recorded_clipping
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import Damaged
from fanin.server.storage.stores import Files, Stores


async def noise_in(setup: RunSetup, base: Version, stores: Stores, files: Files) -> CentralNoise | SharedNoise | None:
    """Return the noise of a Round on a Version; None without differential privacy.

    Raises:
        Damaged: The record of the clip norm is missing or damaged.
    """
    noise = setup.noise
    if not isinstance(noise, CentralNoise) or not noise.bits_noise:
        return noise
    state = await stores.rounds.recorded_state(base)
    try:
        recorded = await files.run(recorded_clipping, state, files.blobs.read_artifact)
    except (Corrupted, NotFound) as exc:
        raise Damaged(f"the clip norm after version {base.number} is damaged on the coordinator's disk") from exc
    return noise if recorded is None else noise.at(recorded[1])

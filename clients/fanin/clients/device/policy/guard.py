"""The guard of a device: it refuses an Assignment that promises less than the floor, and counts what leaves.

The order is the security property:

1. The owner's floor is checked before anything is downloaded for the Assignment.
2. The floor of the manifest is checked as soon as the manifest is verified, before any other file of the Bundle, any
   parameter, any message of the Round and the training. So is its query for statistics, by the floor of both.
3. The owner's floor is checked again, and the ledger is durable, before the first byte of the Update leaves.

So a policy that was tightened meanwhile holds for a trained Update, too. A device that restarts begins with 1 again.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from fanin.clients.device.policy.ledger import PrivacyLedger
from fanin.clients.device.policy.owner import read_policy
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.floors.rows import floor_row
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.messages import Assignment, UpdateHeader

LOG = logging.getLogger("fanin.clients")
OWNER: Final = "owner"
MANIFEST: Final = "manifest"


class PrivacyGuard:
    """The floor and the ledger of one device.

    Args:
        folder: The device's folder. None for a device in a simulation: it has the floor of manifests alone, and no
            ledger.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._ledger = None if folder is None else PrivacyLedger(folder)

    def owner(self) -> PrivacyFloor:
        """Return the owner's floor, from its file. Raises InvalidInput for a policy that cannot be read."""
        return NO_FLOOR if self._folder is None else read_policy(self._folder)

    def floor(self, manifest: Manifest) -> PrivacyFloor:
        """Return the floor in force for a Bundle. Its ``masks`` are the floor of ``fanin.edge.masking``.

        Raises:
            InvalidInput: The policy cannot be read, or it names another authority than the manifest.
        """
        return self.owner().tightened(manifest.privacy_floor)

    def check_assignment(self, work: Assignment) -> None:
        """Raise InvalidInput if an Assignment promises less than the owner's floor (1)."""
        try:
            self.owner().check(work, "the device's owner")
        except InvalidInput as exc:
            self._note_refusal(work, exc)
            raise

    def check_manifest(self, work: Assignment, manifest: Manifest) -> None:
        """Raise InvalidInput if an Assignment promises less than the floor of its verified manifest (2)."""
        asked = () if manifest.query is None else manifest.query.texts
        if self._ledger is not None and (asked or manifest.privacy_floor != NO_FLOOR):
            with suppress(FaninError):
                self._ledger.note_manifest(work, floor_row(manifest.privacy_floor), asked)
        try:
            manifest.privacy_floor.check(work, "the bundle's manifest")
            # The policy may have changed since (1), and the authority of both must be one.
            floor = self.floor(manifest)
            floor.check(work, "manifest and owner")
            floor.check_query(manifest.query)
        except InvalidInput as exc:
            self._note_refusal(work, exc)
            raise

    def release(self, work: Assignment, header: UpdateHeader) -> None:
        """Let an Update leave: check the owner's floor again, and count the Update once (3).

        Raises:
            InvalidInput: The owner tightened the policy since.
            StorageFull: The ledger cannot be written.
        """
        self.check_assignment(work)
        if self._ledger is not None:
            self._ledger.charge(work, header)

    def _note_refusal(self, work: Assignment, error: FaninError) -> None:
        # A full disk must not turn a refusal into work.
        with suppress(FaninError):
            if self._ledger is not None:
                self._ledger.refuse(work, str(error))

"""The files of a backup that never change: each is copied once, verified later, and replaced if its copy decayed.

A whole copy in the backup is never replaced or removed because of a damaged file in the coordinator's folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fanin.protos.chunks import Artifact, assemble
from fanin.protos.errors import Corrupted, InvalidInput, NotFound
from fanin.server.care.places import BackupPlace, file_digest
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.care import StoredFile, blob_path


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the files of a snapshot.

    Attributes:
        copied: New in the backup.
        healed: Damaged in the backup, and replaced.
        damaged: Missing or damaged in the coordinator's folder, and whole in the backup.
        lost: Whole nowhere.
        num_verified: Files of earlier backups whose digests were verified.
    """

    copied: list[StoredFile] = field(default_factory=list)
    healed: list[StoredFile] = field(default_factory=list)
    damaged: list[StoredFile] = field(default_factory=list)
    lost: list[StoredFile] = field(default_factory=list)
    num_verified: int = 0


class Bundles:
    """The manifests of Bundles, which list other files: from the folder, or from the backup if they are damaged."""

    def __init__(self, state: Path, place: BackupPlace) -> None:
        self._blobs = FolderBlobs(state / "blobs", Durability.PROCESS)
        self._place = place
        self.damaged: set[str] = set()

    def read(self, manifest: Artifact) -> bytes:
        """Return a manifest. Raises Corrupted or NotFound if neither copy is whole."""
        try:
            return self._blobs.read_artifact("manifest", manifest)
        except (Corrupted, NotFound):
            self.damaged.update(blob_path(ref.sha256) for ref in manifest.chunks)
            try:
                return assemble("manifest", manifest, lambda digest: self._place.read(blob_path(digest)) or b"")
            except InvalidInput:
                pass
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """A backup under way: from a folder, to a place. ``report`` receives the steps."""

    state: Path
    place: BackupPlace
    report: Callable[[str], None]

    def copy(self, files: list[StoredFile], stored: Mapping[str, int], due: set[str]) -> Tally:
        """Copy the files that the backup does not have, and verify the others: by digest those that are due.

        Args:
            files: The files of the snapshot.
            stored: The sizes of the files of the backup.
            due: The paths of the files whose digests are verified.
        """
        tally = Tally()
        for file in files:
            if file.path in stored:
                self._verify(file, stored[file.path], tally, is_due=file.path in due)
                continue
            if not self._put(file):
                tally.lost.append(file)
                continue
            tally.copied.append(file)
            if len(tally.copied) % 1000 == 0:
                self.report(f"copied {len(tally.copied):,} new files of {len(files):,}")
        return tally

    def _verify(self, file: StoredFile, stored_bytes: int, tally: Tally, *, is_due: bool) -> None:
        """Compare both copies of a file with its digest if it is due, else with its size. Replace a damaged backup."""
        live = self.state / file.path
        is_stored = stored_bytes == file.size_bytes
        if is_due:
            is_stored = is_stored and self.place.digest(file.path) == file.sha256
            is_live = file_digest(live) == file.sha256
            tally.num_verified += 1
            if tally.num_verified % 1000 == 0:
                self.report(f"verified {tally.num_verified:,} files of earlier backups")
        else:
            is_live = live.is_file() and live.stat().st_size == file.size_bytes
        if not is_stored:
            (tally.healed if self._put(file) else tally.lost).append(file)
        elif not is_live:
            tally.damaged.append(file)

    def _put(self, file: StoredFile) -> bool:
        return self.place.put(self.state / file.path, file.path, file.sha256)

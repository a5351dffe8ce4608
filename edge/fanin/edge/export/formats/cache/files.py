"""The folder of the cache: a file for each key, whose first line is the SHA-256 of the following bytes.

A file that is damaged, or cannot be read or written, counts as missing. The folder is private to the user (0700), and
every export compares its graphs with eager torch. So a foreign file cannot change a signed result undetected.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.edge.tensors import sha256_hex

LOG = logging.getLogger("fanin.edge.export")
VARIABLE: Final = "FANIN_GRAPH_CACHE"
"""Names the folder; ``off`` means no cache."""
MAX_BYTES: Final = 512 * 1024 * 1024
"""Bytes of all files. The files that were not used for the longest time are removed first."""
DIGEST_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of files by key.

    Attributes:
        path: The folder; created on first use. None means no cache.
        max_bytes: Bytes of all files.
    """

    path: Path | None
    max_bytes: int = MAX_BYTES

    def read(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if there are none."""
        if self.path is None:
            return None
        file = self.path / key
        try:
            digest, data = (content := file.read_bytes())[:DIGEST_CHARS], content[DIGEST_CHARS + 1 :]
            if digest.decode("ascii", "replace") != sha256_hex(data):
                LOG.info("%s: damaged, and converted again", file)
                return None
            os.utime(file)
        except OSError:
            return None
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep the bytes of a key. Bytes that are more than an eighth of the cache are not kept."""
        if self.path is None or len(data) > self.max_bytes // 8:
            return
        draft: Path | None = None
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, suffix=".new", delete=False) as file:
                draft = Path(file.name)
                file.write(sha256_hex(data).encode() + b"\n" + data)
            draft.replace(self.path / key)
            self._remove_oldest(self.path)
        except OSError as exc:
            LOG.info("%s: a converted graph is not kept (%s)", self.path, exc)
            if draft is not None:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)

    def _remove_oldest(self, folder: Path) -> None:
        rows = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file())
        total = sum(size for _, size, _ in rows)
        for _, size, file in rows:
            if total <= self.max_bytes:
                return
            # Another export may remove it, too.
            file.unlink(missing_ok=True)
            total -= size


def folder_from(environ: Mapping[str, str]) -> CacheFolder:
    """Return the folder that an environment names; default: ``fanin/graphs`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    named, home = environ.get(VARIABLE, ""), environ.get("XDG_CACHE_HOME", "")
    if named == "off":
        return CacheFolder(None)
    if named:
        return CacheFolder(Path(named))
    try:
        return CacheFolder((Path(home) if home else Path.home() / ".cache") / "fanin" / "graphs")
    except RuntimeError:  # a user without a home
        return CacheFolder(None)

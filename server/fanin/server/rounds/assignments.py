"""Assignments: made here, and known again by their ids without having been stored.

An id is run.round.tag, the tag an HMAC (RFC 2104) over run, round and device under a key that never leaves the
coordinator. So a device keeps its Assignment over a restart, and nobody can make one up (docs/decisions/0002). The id
of a Publication is run.vNUMBER.tag, made in the same way.
"""

import hashlib
import hmac
from typing import Final

from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.control import StartRun
from fanin.protos.errors import NotFound
from fanin.server.rounds.recent import Made

TAG_CHARS: Final = 32


class Assignments:
    """Those of one Run."""

    def __init__(self, start: StartRun, bundle: m.BundleRef, run_key: SigningKey) -> None:
        self._start = start
        self._bundle = bundle
        self._tag_key = hashlib.sha256(b"fanin assignment" + run_key.private_bytes()).digest()

    def make(self, device: str, made: Made, left_s: float) -> m.Assignment:
        """A device's Assignment of a Round; the same one each time but for the seconds that are left."""
        plan = self._start.plan
        return m.Assignment(
            assignment_id=self._id(made.record.round, device),
            run_id=self._start.run_id,
            round=made.record.round,
            bundle=self._bundle,
            version=made.base,
            grid=made.record.grid,
            codec=plan.codec,
            training=plan.training,
            deadline_s=left_s,
        )

    def check(self, assignment_id: str, device: str) -> int:
        """The Round of an Assignment of this Run. Raises NotFound unless it was made here for this device."""
        _, number, _ = assignment_id.rsplit(".", 2)
        if not number.isdecimal() or not hmac.compare_digest(self._id(int(number), device), assignment_id):
            raise NotFound(f"assignment {assignment_id}: not made for device {device}; check in again")
        return int(number)

    def publish(self, device: str, version: m.Version) -> m.Publication:
        """A Version of this Run, for a device that may download it."""
        return m.Publication(
            download_id=self._id(f"v{version.number}", device),
            run_id=self._start.run_id,
            bundle=self._bundle,
            version=version,
        )

    def check_publication(self, download_id: str, device: str) -> int | None:
        """The number of the Version that an id lets a device download; None for an id of another kind.

        Raises NotFound unless it was made here for this device.
        """
        _, number, _ = download_id.rsplit(".", 2)
        if not number.startswith("v"):
            return None
        if not number[1:].isdecimal() or not hmac.compare_digest(self._id(number, device), download_id):
            raise NotFound(f"publication {download_id}: not made for device {device}; check in again")
        return int(number[1:])

    def _id(self, number: int | str, device: str) -> str:
        stem = f"{self._start.run_id}.{number}"
        tag = hmac.new(self._tag_key, f"{stem}.{device}".encode(), hashlib.sha256).hexdigest()[:TAG_CHARS]
        return f"{stem}.{tag}"

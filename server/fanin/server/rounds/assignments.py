"""Assignments and Publications: created for a device, and recognized by their ids without being stored.

An Assignment's id is ``run.round.tag``. The tag is an HMAC (RFC 2104) over Run, Round and device, with a key that never
leaves the coordinator. So a device keeps its Assignment over a restart, and no peer can invent one
(docs/decisions/0002). A Publication's id is ``run.vNUMBER.tag``, computed in the same way.
"""

import hashlib
import hmac
from typing import Final

from fanin.protos import messages as m
from fanin.protos.errors import NotFound
from fanin.server.rounds.recent import OpenedRound
from fanin.server.rounds.setup import RunSetup
from fanin.server.selection.presence import interval_of

TAG_CHARS: Final = 32


class Assignments:
    """The Assignments and Publications of one Run.

    Attributes:
        has_state: Whether devices keep a state between Rounds: that of stages, or of the code of a Bundle without
            graphs.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._start = setup.start
        self._bundle = setup.bundle
        self._statistics = setup.statistics
        self._range_examples = m.RANGE_EXAMPLES if setup.counted else 0
        self._progress_s = interval_of(setup.plan.cohort)
        self._exchanges = not setup.protocol.first.accepts_updates
        self.has_state = bool(setup.plan.stages) or not setup.manifest.signatures
        self._tag_key = hashlib.sha256(b"fanin assignment" + setup.run_key.private_bytes()).digest()

    def assign(self, device: str, opened: OpenedRound, left_s: float, lineage: int) -> m.Assignment:
        """Return the Assignment of a device in a Round, without the Round of its state.

        Repeated calls differ only in ``left_s``.

        Args:
            device: The device's id.
            opened: The Round.
            left_s: Seconds until the deadline.
            lineage: The Version with which the Round's lineage starts.
        """
        plan = self._start.plan
        return m.Assignment(
            assignment_id=self._id(opened.record.round, device),
            run_id=self._start.run_id,
            round=opened.record.round,
            bundle=self._bundle,
            version=opened.base,
            grid=opened.record.grid,
            codec=plan.codec,
            training=plan.training_in(opened.record.round),
            deadline_s=left_s,
            statistics=self._statistics,
            stages=plan.stages,
            flower=plan.flower_in(opened.record.round),
            progress_s=self._progress_s,
            range_examples=self._range_examples,
            round_protocol=plan.round,
            privacy=None if opened.noise is None else opened.noise.terms,
            state=m.StageState(lineage=lineage if self.has_state or self._exchanges else 0),
            max_devices=plan.cohort.concurrency if self._exchanges else 0,
        )

    def check(self, assignment_id: str, device: str) -> int:
        """Return the number of the Round of an Assignment.

        Raises:
            NotFound: This Run has not issued the Assignment, or not to this device.
        """
        _, number, _ = assignment_id.rsplit(".", 2)
        if not number.isdecimal() or not hmac.compare_digest(self._id(int(number), device), assignment_id):
            raise NotFound(f"assignment {assignment_id}: not made for device {device}; check in again", code="FN-0613")
        return int(number)

    def publish(self, device: str, version: m.Version) -> m.Publication:
        """Return a Publication that lets a device download a Version of this Run."""
        return m.Publication(
            download_id=self._id(f"v{version.number}", device),
            run_id=self._start.run_id,
            bundle=self._bundle,
            version=version,
        )

    def check_publication(self, download_id: str, device: str) -> int | None:
        """Return the number of the Version that a Publication's id lets a device download.

        Returns:
            The number, or None if the id is not that of a Publication.

        Raises:
            NotFound: This Run has not issued the Publication, or not to this device.
        """
        _, number, _ = download_id.rsplit(".", 2)
        if not number.startswith("v"):
            return None
        if not number[1:].isdecimal() or not hmac.compare_digest(self._id(number, device), download_id):
            raise NotFound(f"publication {download_id}: not made for device {device}; check in again", code="FN-0613")
        return int(number[1:])

    def _id(self, number: int | str, device: str) -> str:
        stem = f"{self._start.run_id}.{number}"
        tag = hmac.new(self._tag_key, f"{stem}.{device}".encode(), hashlib.sha256).hexdigest()[:TAG_CHARS]
        return f"{stem}.{tag}"

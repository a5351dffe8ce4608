"""Small durable records of a device: the highest Version of each Run, and the served Publication."""

import json
from pathlib import Path

from google.protobuf.message import DecodeError

from fanin.clients.device.storage.files import replace
from fanin.protos.errors import Corrupted, InvalidInput
from fanin.protos.messages import UNSEEN, Order, Publication
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import fleet_pb2 as pb


class Records:
    """The records in a device's folder. Raises Corrupted if the record of the highest Versions is damaged."""

    def __init__(self, folder: Path) -> None:
        self._versions = folder / "seen.json"
        self._served = folder / "served"
        # Read the record now: an error is reported at the start, not in the middle of the first Assignment.
        self._highest_versions()

    @property
    def has_versions(self) -> bool:
        """Whether this device has verified a Version, in any Run."""
        return bool(self._highest_versions())

    def highest_version(self, run_id: str) -> Order:
        """Return the highest (epoch, number) that this device has verified in a Run; ``UNSEEN`` for none."""
        return self._highest_versions().get(run_id, UNSEEN)

    def raise_version(self, run_id: str, order: Order) -> None:
        """Record the (epoch, number) of a verified Version, unless a higher pair is recorded. Raises StorageFull.

        The record is durable before this returns: otherwise a coordinator could offer an old Version again.
        """
        versions = self._highest_versions()
        if versions.get(run_id, UNSEEN) >= order:
            return
        replace(self._versions, json.dumps(versions | {run_id: order}).encode())

    def put_served(self, publication: Publication) -> None:
        """Record the Publication of the served model. The record is durable before this returns. Raises StorageFull."""
        replace(self._served, to_proto(publication, pb.Publication).SerializeToString())

    def served(self) -> Publication | None:
        """Return the Publication of the model that was served last; None if no readable record exists."""
        try:
            return from_proto(Publication, pb.Publication.FromString(self._served.read_bytes()))
        except (FileNotFoundError, DecodeError, InvalidInput):
            return None

    def _highest_versions(self) -> dict[str, Order]:
        path = self._versions
        try:
            rows = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
            if not all(type(epoch) is int and type(number) is int for epoch, number in rows.values()):
                raise ValueError("expected an object of [epoch, number] by run")
            return {run_id: (epoch, number) for run_id, (epoch, number) in rows.items()}
        except (ValueError, TypeError) as exc:
            # Without the record an old Version would be accepted again; the operator of the device must decide.
            raise Corrupted(
                f"{path}: not readable ({exc}); remove it to forget which versions were seen", code="FN-0835"
            ) from exc

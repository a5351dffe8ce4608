"""The masked payloads that devices have announced: one for each Assignment.

A mask key serves one payload. A device whose folder was rolled back after its shares, or is used twice, may train again
with another result, and does not know that it has sent bytes before. So the coordinator refuses a second payload before
it accepts a byte of it. It remembers them while it runs.
"""

from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import UpdateHeader


class MaskedPayloads:
    """The digest of the last masked payload that each device announced, with its Assignment."""

    def __init__(self) -> None:
        self._announced: dict[str, tuple[str, str]] = {}

    def check(self, device: str, header: UpdateHeader) -> None:
        """Raise InvalidUpdate for another masked payload of the Assignment for which this device announced one."""
        assignment_id, sha256 = self._announced.get(device, ("", ""))
        if assignment_id == header.assignment_id and sha256 != header.payload.sha256:
            raise InvalidUpdate(
                f"update of {header.assignment_id}: got a second masked payload ({header.payload.sha256[:16]}), "
                f"expected the first one ({sha256[:16]}), because a mask key serves one; the folder of this device was "
                "restored from a copy, or two devices use it: enroll it again with a new folder",
                code="FN-1724",
            )
        self._announced[device] = (header.assignment_id, header.payload.sha256)

"""The fate of a complete upload: accepted, discarded, or decided later.

``accept`` is the only way of an Update into the record. The order of its steps ensures that no crash leaves a committed
Update without its payload, or an acknowledged Update without its row:

    1. the payload becomes durable
    2. the values of its tensors with ranges are checked (``runs.driving.ranges``)
    3. one row in the database commits the Update to the open Round
    4. the files of the upload are removed
    5. the device receives the fate
"""

import asyncio
from dataclasses import dataclass
from typing import assert_never

from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate
from fanin.server.runs.driving.intake import Intake, Prospect
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.stores import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteUpload:
    """An Update whose Chunks are all in the spool.

    Attributes:
        device: The device that made it.
        header: Its header, which was checked against its Assignment.
        upload: Its Chunks.
    """

    device: str
    header: m.UpdateHeader
    upload: Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An Update of this Assignment is durable and in exactly one Round: this one, or an earlier one of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """No Round will count the Update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """The next Round may count the Update. The upload is kept.

    Attributes:
        changed: Set at the next change of the Run. Then call ``accept`` again.
    """

    changed: asyncio.Event


Fate = Accepted | Discarded | Later


async def accept(update: CompleteUpload, intake: Intake, files: Files) -> Fate:
    """Decide the fate of a complete upload, as far as that is possible now. It may be repeated after any failure.

    Args:
        update: The upload.
        intake: The Run of its Assignment.
        files: The spool.

    Raises:
        InvalidUpdate: A tensor of the device is out of its range. The Update leaves no trace.
        Unavailable: The fate cannot be decided, because the Run is paused between two Rounds or the coordinator is
            ending.
        StorageFull: The disk is full.
    """
    # Before the decision, so that no change after it is missed.
    changed = intake.changed
    match intake.prospect(update.header.round, update.device):
        case Prospect.NOW:
            return await _commit(update, intake, files, changed)
        case Prospect.LATER:
            return Later(changed=changed)
        case Prospect.NEVER:
            await files.run(files.spool.discard, update.header.assignment_id)
            return Discarded()
        case other:
            assert_never(other)


async def _commit(update: CompleteUpload, intake: Intake, files: Files, changed: asyncio.Event) -> Fate:
    header, spool = update.header, files.spool
    await files.run(spool.commit, update.upload, update.device)
    if intake.ranges.are_checked:
        opened = intake.opened(header.round)
        origin = opened.record, opened.base
        try:
            await files.run(intake.ranges.check, header, update.device, origin, (spool, files.blobs))
        except InvalidUpdate:
            await files.run(spool.withdraw, header, update.device)
            raise
    committed = await intake.commit(update.device, header, update.upload.resumed_bytes)
    if committed is None and intake.prospect(header.round, update.device, is_full=True) is Prospect.LATER:
        return Later(changed=changed)
    if committed is None or committed.payload != header.payload:
        await files.run(spool.withdraw, header, update.device)
    await files.run(spool.discard, header.assignment_id)
    return Discarded() if committed is None else Accepted()

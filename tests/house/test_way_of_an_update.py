"""The files that one upload enters on the coordinator, from its header to the row of its Update.

Each of them must change the Update, or decide about it. Before a number here rises, look for two files that are one.
"""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType

from sqlalchemy import Engine, event
from support.staleness import assignment, settle, update
from support.virtual import bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.wire import to_proto
from fanin.server.fleet.servicer import FleetService
from fanin.simulation import run_virtual
from fanin.v1 import fleet_pb2

ROOT = Path(__file__).parents[2]
NUM_FILES = 26
"""The files of ``server``: 9 of the storage, 3 of the access, 12 that receive, decide and check, 2 that measure."""
MAX_ENTRIES = {
    "runs/driving/updates.py": 2,
    "runs/driving/intake.py": 0,
    "rounds/decision.py": 3,
    "runs/validation.py": 1,
}
"""The calls of a file's functions by other files."""
NUM_CONVERSIONS = {"UpdateHeader.__post_init__": 1, "recorded_header": 1}
"""The header is converted once from the wire, and once to the record."""


class Entries:
    """The calls from one file of the product into another one.

    Attributes:
        calls: Each call as a file, relative to its source root, and the qualified name of a function.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        # A coroutine is called again each time that it continues. Its frame is kept, so that its id stays unique.
        self._frames: dict[int, FrameType] = {}

    def __call__(self, frame: FrameType, kind: str, _argument: object) -> None:
        """Note a call: this is the profile function of the interpreter."""
        file = file_of(frame.f_code)
        if kind != "call" or file is None or id(frame) in self._frames:
            return
        self._frames[id(frame)] = frame
        caller = frame.f_back
        while caller is not None and file_of(caller.f_code) is None:
            caller = caller.f_back
        if caller is None or file_of(caller.f_code) != file:
            self.calls.append((file, frame.f_code.co_qualname))


def file_of(code: CodeType) -> str | None:
    """Return the file of a function of the product, None for other functions."""
    for source_root in ("server/fanin/server", "edge/fanin", "protos/fanin"):
        folder = f"{ROOT / source_root}/"
        if code.co_filename.startswith(folder):
            return code.co_filename.removeprefix(folder)
    return None


def uploaded(folder: Path, profile: Callable[[FrameType, str, object], None]) -> fleet_pb2.UploadReply:
    """Upload one Update of one Chunk under a profile function, until its row is written. Return the last reply."""

    async def send(requests: Sequence[fleet_pb2.UploadRequest]) -> AsyncIterator[fleet_pb2.UploadRequest]:
        for request in requests:
            yield request

    async def main() -> fleet_pb2.UploadReply:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan(buffer=2, quorum=2))
        await settle()
        header, payload = update(await assignment(place, "device"))
        service = FleetService(place.coordinator, None, place.state.stores)
        parts = (header, m.Piece(offset=0, data=payload))
        requests = [to_proto(m.UploadRequest(part=part), fleet_pb2.UploadRequest) for part in parts]
        sys.setprofile(profile)
        try:
            principal = m.Principal(kind=m.PrincipalKind.DEVICE, id="device")
            replies = [reply async for reply in service.Upload(send(requests), principal)]
        finally:
            sys.setprofile(None)
        await place.runs.stop()
        return replies[-1]

    def stop_at_the_row(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO updates"):
            sys.setprofile(None)

    event.listen(Engine, "before_cursor_execute", stop_at_the_row)
    try:
        return run_virtual(main())
    finally:
        event.remove(Engine, "before_cursor_execute", stop_at_the_row)


def test_an_upload_enters_few_files_of_the_server(tmp_path: Path) -> None:
    entries = Entries()
    reply = uploaded(tmp_path, entries)
    assert reply.update_state == fleet_pb2.UPDATE_STATE_ACCEPTED
    num_entries = Counter(file for file, _ in entries.calls)
    files = sorted(file for file in num_entries if (ROOT / "server/fanin/server" / file).exists())
    assert len(files) <= NUM_FILES, files
    assert {file: num_entries[file] for file in MAX_ENTRIES} == MAX_ENTRIES
    functions = Counter(function for _, function in entries.calls)
    assert {name: functions[name] for name in NUM_CONVERSIONS} == NUM_CONVERSIONS

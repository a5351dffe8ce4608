"""The state of a device as a JSON file in its folder: ``fanin status`` and the local page read nothing else.

The file is replaced as a unit, so a reader sees the old state or the new one. It has no secret. Times are seconds since
the Unix epoch, by the device's clock. A reader ignores keys that it does not know.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

RECORD_FILE: Final = "status.json"
RECORD_FORMAT: Final = 1
MAX_ERRORS: Final = 20
"""The newest errors that are kept."""
MAX_SENT_RUNS: Final = 64
"""Runs whose totals are kept, the newest ones."""
MAX_TEXT_CHARS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLink:
    """Whether the coordinator accepts this device's calls.

    Attributes:
        is_connected: Whether the last call was answered.
        since: When that began.
        reason: Why it is not connected; "" if it is.
        code: The code of that error.
        next_try_at: When the device calls again; 0 if it is calling now, or does not call again.
    """

    is_connected: bool = False
    since: float = 0.0
    reason: str = ""
    code: str = ""
    next_try_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteWork:
    """The Assignment under way; ``run`` is "" for none. Numbers of steps and bytes are 0 while they are unknown."""

    run: str = ""
    round: int = 0
    version: int = 0
    bundle: str = ""
    since: float = 0.0
    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0
    sent_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What this device sent for one Run: bytes of Updates on the wire, also of uploads that broke, and Rounds.

    ``bundle`` and ``publisher`` are of its last Assignment.
    """

    num_bytes: int = 0
    num_rounds: int = 0
    last_at: float = 0.0
    bundle: str = ""
    publisher: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTuned:
    """The last fine-tuning on this device; ``run`` is "" for none.

    Attributes:
        run: The Run.
        version: The Version from which it started.
        at: When it ended.
        epochs: Its epochs.
        num_examples: Validation examples of this device; 0: the numbers below are unknown.
        metric: ``accuracy``, or ``loss`` for a model of values.
        global_model: The metric of the Version. Personal parameters have their initial values.
        personal_model: That of the fine-tuned model, in float.
        personal_int8: Its accuracy as the int8 model that the device serves; 0 for a model of values.
    """

    run: str = ""
    version: int = 0
    at: float = 0.0
    epochs: int = 0
    num_examples: int = 0
    metric: str = ""
    global_model: float = 0.0
    personal_model: float = 0.0
    personal_int8: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCompared:
    """The last Round in which this device measured the global model and its own one; ``run`` is "" for none.

    Attributes:
        run: The Run.
        round: The Round.
        version: The Version that it received.
        num_examples: Validation examples of this device.
        global_model: The metrics of the Version by name. Personal parameters have their initial values.
        personal_model: Those of the device's own model before the Round.
    """

    run: str = ""
    round: int = 0
    version: int = 0
    num_examples: int = 0
    global_model: Mapping[str, float] = field(default_factory=dict)
    personal_model: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastError:
    """An error: when it came, the action of the device, its code and its text. ``times`` counts repetitions."""

    at: float
    action: str
    code: str
    text: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What leaves the machine, and what never does: one sentence each."""

    leaves: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlace:
    """How the device was started: the coordinator, the route to it, and the files that it uses.

    ``ca_fingerprint`` is that of the coordinator's own authority; "" if the device was started without it.
    """

    server: str = ""
    proxy: str = ""
    ca_file: str = ""
    ca_fingerprint: str = ""
    token_file: str = ""
    data: str = ""
    runtime: str = ""
    publishers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord:
    """The state of a device.

    Attributes:
        release: The release of fanin that wrote it.
        pid: The process that wrote it.
        started_at: When this process started.
        written_at: When the file was written.
        ended: Why the process ended; "" while it runs, and after it was killed.
        connected_at: When the last connection began, also one of an earlier process; 0 if there was none yet.
        device_id: The id of the device's key.
        phase: The phase of the session, such as ``training``.
        served: The Version that the device serves to its app, as ``run/number``; "" for none.
    """

    release: str = ""
    pid: int = 0
    started_at: float = 0.0
    written_at: float = 0.0
    ended: str = ""
    connected_at: float = 0.0
    device_id: str = ""
    phase: str = ""
    served: str = ""
    place: SitePlace = SitePlace()
    link: SiteLink = SiteLink()
    work: SiteWork = SiteWork()
    tuned: SiteTuned = SiteTuned()
    compared: SiteCompared = SiteCompared()
    sent: Mapping[str, Sent] = field(default_factory=dict)
    errors: tuple[PastError, ...] = ()
    leaving: Leaving = Leaving()


T = TypeVar("T", SiteLink, SiteWork, SiteTuned, SiteCompared, Sent, PastError, Leaving, SitePlace, SiteRecord)


def to_json(record: SiteRecord) -> str:
    """Return the record as a line of JSON."""
    return json.dumps({"format": RECORD_FORMAT, **asdict(record)}, separators=(",", ":"))


def from_json(text: str) -> SiteRecord:
    """Return the record of a text. A part that is damaged or of another form is as if it were missing."""
    try:
        row = json.loads(text)
    except ValueError:
        return SiteRecord()
    if not isinstance(row, dict) or row.get("format") != RECORD_FORMAT:
        return SiteRecord()
    sent = row.get("sent")
    errors = row.get("errors")
    parts = {
        "place": _part(SitePlace, row.get("place")),
        "link": _part(SiteLink, row.get("link")),
        "work": _part(SiteWork, row.get("work")),
        "tuned": _part(SiteTuned, row.get("tuned")),
        "compared": _part(SiteCompared, row.get("compared")),
        "leaving": _part(Leaving, row.get("leaving")),
        "sent": {run: _part(Sent, each) for run, each in sent.items()} if isinstance(sent, dict) else {},
        "errors": tuple(_part(PastError, each, at=0.0, action="", code="", text="") for each in errors)
        if isinstance(errors, list)
        else (),
    }
    return _part(SiteRecord, {**row, **parts})


def read_record(folder: Path) -> SiteRecord | None:
    """Return the record of a device's folder; None if there is none. Raises OSError if it cannot be read."""
    try:
        return from_json((folder / RECORD_FILE).read_text("utf-8", errors="replace"))
    except FileNotFoundError:
        return None


def _part(kind: type[T], row: object, **defaults: object) -> T:
    """Return a part of the record. Values of another type than that of the field are left out."""
    types = {each.name: each.type for each in fields(kind)}
    values: dict[str, Any] = dict(defaults)
    for name, value in (row if isinstance(row, dict) else {}).items():
        if name in types and _fits(value, types[name]):
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _fits(value: object, kind: object) -> bool:
    if kind == Mapping[str, float]:
        return isinstance(value, dict) and all(isinstance(each, int | float) for each in value.values())
    if kind == tuple[str, ...]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return not isinstance(kind, type) or isinstance(value, (int, float) if kind is float else kind)

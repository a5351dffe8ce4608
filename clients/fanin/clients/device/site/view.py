"""The state of a device for its owner: read from its folder, as text and as a JSON object.

The file of a device that was killed still says that it runs. The lock of the folder does not: the kernel frees it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from fanin.clients.device.site.privacy import SitePrivacy, site_privacy
from fanin.clients.device.site.record import PastError, SiteCompared, SiteRecord, SiteTuned, SiteWork, read_record
from fanin.edge.files import is_held
from fanin.protos.codes import entries
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

NUM_SHOWN_ERRORS = 5
KILLED = "it was killed, or the machine lost power"
WITHOUT_WORK = {
    "idle": "waits for work",
    "enrolling": "enrolls",
    "refreshing": "downloads a newer version",
    "tuning": "fine-tunes a model for this device alone",
}
UNWRITTEN = "its state could not be written, or no device has run here yet"


class SiteState(Enum):
    """Whether a device is connected."""

    CONNECTED = "connected"
    DISCONNECTED = "not connected"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """The state of a device at a time."""

    folder: str
    state: SiteState
    record: SiteRecord
    privacy: SitePrivacy
    now: float

    def document(self) -> dict[str, object]:
        """Return the state as a JSON object."""
        row = {"state": self.state.value, "folder": self.folder, "now": self.now, **asdict(self.record)}
        return {**row, "privacy": self.privacy.document()}

    def text(self) -> str:
        """Return the state as lines for people."""
        privacy = [*_listed("floor", self.privacy.floor_texts()), *_listed("privacy", self.privacy.ledger_texts())]
        leaving = [
            *_listed("leaves", self.record.leaving.leaves),
            *_listed("never leaves", self.record.leaving.stays),
        ]
        rows = [*self._state_rows(), *self._work_rows(), *privacy, *self._error_rows(), *leaving]
        width = max(len(label) for label, _ in rows) + 2
        return "".join(f"{label:{width}}{text}\n" for label, text in rows)

    def _state_rows(self) -> Iterator[tuple[str, str]]:
        record, link = self.record, self.record.link
        since = f" since {_time(link.since)}" if link.since else ""
        yield "device", f"{record.device_id or 'unknown'} in {self.folder}"
        if self.state is SiteState.STOPPED:
            ended = "by an error" if link.reason and record.ended == link.reason else ended_text(record)
            yield "state", f"stopped: {ended}; last seen {_time(record.written_at)}"
        else:
            yield "state", f"{self.state.value}{since}"
        if self.state is not SiteState.CONNECTED:
            yield "connected", f"last at {_time(record.connected_at)}" if record.connected_at else "never"
        if link.reason:
            yield "reason", f"{link.reason}{_code(link.code, link.reason)}"
            if fix := remedy(link.code):
                yield "fix", fix
            yield (
                "",
                f"more: fanin doctor --state {self.folder}" + (f"; fanin explain {link.code}" if link.code else ""),
            )
        elif self.state is SiteState.DISCONNECTED:
            yield "reason", f"no answer yet, for {max(0.0, self.now - link.since):.0f} s"
        elif not record.written_at:
            yield "", f"more: fanin doctor --state {self.folder}"
        elif not record.connected_at:
            yield "reason", f"no answer until it ended, for {max(0.0, record.written_at - link.since):.0f} s"
        if link.next_try_at and self.state is SiteState.DISCONNECTED:
            yield "next try", f"in {max(0.0, link.next_try_at - self.now):.0f} s"
        place = record.place
        yield "coordinator", f"{place.server or 'unknown'}{f' through {place.proxy}' if place.proxy else ''}"
        yield "trusts", ", ".join(f"publisher {key[:16]}.." for key in place.publishers) or "unknown publishers"
        if record.served:
            yield "serves", f"version {record.served}"
        if record.tuned.run:
            yield "fine-tuned", tuned_text(record.tuned)
        if record.compared.run:
            yield "compared", compared_text(record.compared)

    def _work_rows(self) -> Iterator[tuple[str, str]]:
        record = self.record
        if self.state is not SiteState.STOPPED:
            yield "now", now_text(record.phase, record.work)
        for run, sent in sorted(record.sent.items(), key=lambda item: -item[1].last_at):
            last = f", last {_time(sent.last_at)}" if sent.last_at else ""
            rounds = counted(sent.num_rounds, "round")
            yield "sent", f"run {run}: {rounds}, {size_text(sent.num_bytes)}{last}"
            yield "", f"bundle {sent.bundle[:16]}.. of publisher {sent.publisher[:16]}.."
        if not record.sent:
            yield "sent", "nothing yet"

    def _error_rows(self) -> Iterator[tuple[str, str]]:
        for index, error in enumerate(reversed(self.record.errors[-NUM_SHOWN_ERRORS:])):
            yield "" if index else "errors", error_text(error, self.record.link.reason)


def site_view(folder: Path, now: float) -> SiteView:
    """Return the state of a device from its folder. The device may run, or be stopped.

    Raises:
        InvalidInput: The folder is not that of a device.
        OSError: A file in it cannot be read.
    """
    record = read_record(folder)
    # On a full disk the state cannot be written, but the lock exists.
    if record is None and not any((folder / name).exists() for name in ("device.key", "lock")):
        what = "is that of a coordinator" if (folder / "fanin.db").exists() else "has no device.key and no status.json"
        raise InvalidInput(
            f"--state: {folder} {what}, expected the folder of a device; pass that of fanin join --state. "
            "If fanin join has not been started with it yet, see fanin doctor --server HOST:PORT",
            code="FN-1484",
        )
    record = record or SiteRecord()
    if not is_held(folder):
        state = SiteState.STOPPED
    else:
        state = SiteState.CONNECTED if record.link.is_connected else SiteState.DISCONNECTED
    return SiteView(folder=str(folder), state=state, record=record, privacy=site_privacy(folder), now=now)


def tuned_text(tuned: SiteTuned) -> str:
    """Return the result of a fine-tuning."""
    text = f"version {tuned.run}/{tuned.version} for {counted(tuned.epochs, 'epoch')} at {_time(tuned.at)}"
    if not tuned.num_examples:
        return f"{text}; no validation examples"
    int8 = f" ({tuned.personal_int8:.4f} in int8)" if tuned.metric == "accuracy" else ""
    return (
        f"{text}; {tuned.metric} on {counted(tuned.num_examples, 'validation example')}: global model "
        f"{tuned.global_model:.4f}, own model {tuned.personal_model:.4f}{int8}"
    )


def compared_text(compared: SiteCompared) -> str:
    """Return the metrics of the global model and of the device's own one."""
    models = (("global model", compared.global_model), ("own model", compared.personal_model))
    texts = [
        f"{what} {', '.join(f'{name} {value:.4f}' for name, value in sorted(values.items()))}"
        for what, values in models
        if values
    ]
    return (
        f"round {compared.round} of run {compared.run}, version {compared.version}, on "
        f"{counted(compared.num_examples, 'validation example')}: {'; '.join(texts)}"
    )


def now_text(phase: str, work: SiteWork) -> str:
    """Return what a device does now."""
    if not work.run:
        return WITHOUT_WORK.get(phase, phase)
    steps = f", step {work.step} of {work.num_steps}" if work.num_steps else ""
    epoch = f", epoch {work.epoch} of {work.num_epochs}" if work.num_epochs else ""
    sent = f", {size_text(work.sent_bytes)} of {size_text(work.update_bytes)}" if work.update_bytes else ""
    text = {
        "fetching": "downloads",
        "exchanging": "exchanges messages",
        "training": f"trains{steps}{epoch}",
        "sending": f"sends its update{sent}",
    }
    return f"round {work.round} of run {work.run}, from version {work.version}: {text.get(phase, phase)}"


def ended_text(record: SiteRecord) -> str:
    """Return why a device is stopped."""
    return record.ended or (KILLED if record.written_at else UNWRITTEN)


def error_text(error: PastError, reason: str) -> str:
    """Return an error on one line, without its text if that is the reason which the reader has seen."""
    times = f" ({error.times} times)" if error.times > 1 else ""
    text = "the reason above" if error.text == reason else f"{error.text}{_code(error.code, error.text)}"
    return f"{_time(error.at)} {error.action}: {text}{times}"


def remedy(code: str) -> str:
    """Return what to do about an error of this code; "" for a code without an entry, such as one of a newer release."""
    entry = entries().get(code)
    return "" if entry is None else entry.remedy


def size_text(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _listed(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield rows with one label for all of them."""
    for index, text in enumerate(texts):
        yield "" if index else label, text


def _code(code: str, text: str) -> str:
    return f" [{code}]" if code and code not in text else ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S") if seconds else "never"

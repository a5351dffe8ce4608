"""The ledger of a device: what it sent in each Run, under which mechanism, and a bound of its privacy loss.

It is the file ``privacy.json`` in the device's folder. An entry is durable before the first byte of an Update leaves.
So a device counts too much after a crash, and never too little. The loss counts the Rounds to which this device sent an
Update, also those that failed or closed without it. Sampling is not counted in the device's favor. So epsilon is an
upper bound, and that of the coordinator's ledger may be smaller.

A file that is damaged is kept under another name, and a new one begins. From then on the device shows no epsilon.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from fanin.edge.files import replace_file, storage_error
from fanin.edge.floors.floor import promised_masks
from fanin.edge.noise.loss import Loss, loss_of_discrete_gaussian
from fanin.edge.noise.shares import share_of
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CLIP_BITS, Assignment, PrivacyTerms, UpdateHeader
from fanin.protos.plans import CENTRAL, SECAGG_PROTOCOL

LOG = logging.getLogger("fanin.clients")
LEDGER_FILE: Final = "privacy.json"
LEDGER_FORMAT: Final = 1
MAX_RUNS: Final = 64
"""Runs with an entry of their own, the newest ones. The Rounds and losses of the others are added up in one."""
MAX_TEXT_CHARS: Final = 500
MAX_SENT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrivacy:
    """What a device knows of its privacy in one Run.

    Attributes:
        bundle: The digest of the Run's Bundle.
        floor: The floor in its manifest, as a table.
        asked: The statistics that it asks for, as lines for the owner; none for a model.
        population: The ledger of the coordinator that the last Round was charged to; "" for none.
        protocol: The protocol of it.
        mechanism: Who added the noise in it; "" for nobody.
        clip_norm: Largest L2 norm of the change in it.
        noise_multiplier: Standard deviation of the noise, divided by the sensitivity.
        delta: The smallest delta of the Rounds; 0 without any.
        num_rounds: Rounds to which an Update was sent.
        num_bare: Those without differential privacy.
        num_unbounded: Those with a mechanism whose loss a device cannot bound.
        rho: Loss of the other ones (``edge.noise.loss``), as a fraction.
        xi: Its other part.
        sent: What the last Update had besides the change of the parameters.
        last_round: The number of the last Round.
        last_at: When it was sent.
        num_refused: Assignments that this device refused by its policy.
        refusal: Why, the last time.
        refused_at: When.
    """

    bundle: str = ""
    floor: Mapping[str, object] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    population: str = ""
    protocol: str = ""
    mechanism: str = ""
    clip_norm: float = 0.0
    noise_multiplier: float = 0.0
    delta: float = 0.0
    num_rounds: int = 0
    num_bare: int = 0
    num_unbounded: int = 0
    rho: str = "0"
    xi: str = "0"
    sent: tuple[str, ...] = ()
    last_round: int = 0
    last_at: float = 0.0
    num_refused: int = 0
    refusal: str = ""
    refused_at: float = 0.0

    @property
    def loss(self) -> Loss:
        """The loss of the Rounds that have a bound."""
        return Loss(Fraction(self.rho), Fraction(self.xi))

    @property
    def epsilon(self) -> float | None:
        """An upper bound of epsilon at ``delta``; None if there is none."""
        if self.num_bare or self.num_unbounded or not self.num_rounds or not 0 < self.delta < 1:
            return None
        return self.loss.epsilon(self.delta)


_EMPTY: Final = RunPrivacy()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyRecord:
    """The content of the file.

    Attributes:
        last_assignment: The Assignment whose Update was counted last.
        runs: The newest Runs by id.
        earlier: The Rounds and losses of all other Runs.
        damaged_at: When an earlier file was found damaged; 0 if none was.
    """

    last_assignment: str = ""
    runs: Mapping[str, RunPrivacy] = field(default_factory=dict)
    earlier: RunPrivacy = _EMPTY
    damaged_at: float = 0.0

    @property
    def total(self) -> RunPrivacy:
        """The Rounds and the loss of all Runs: they add up, because one device was in all of them."""
        return _sum((*self.runs.values(), self.earlier))

    @property
    def populations(self) -> Mapping[str, RunPrivacy]:
        """The totals of the populations with several Runs, by name; empty once ``earlier`` has Rounds."""
        names = Counter(run.population for run in self.runs.values() if run.population)
        if self.earlier.num_rounds:
            return {}
        return {
            name: _sum(run for run in self.runs.values() if run.population == name)
            for name, num_runs in sorted(names.items())
            if num_runs > 1
        }


class PrivacyLedger:
    """The ledger in a device's folder. One process at a time writes it.

    Args:
        folder: The device's folder.
        wall: The device's clock.
    """

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._path = folder / LEDGER_FILE
        self._wall = wall
        self._record: PrivacyRecord | None = None

    def charge(self, work: Assignment, header: UpdateHeader) -> None:
        """Count the Update of an Assignment, once. It is durable before this returns. Raises StorageFull."""
        record = self._read()
        if record.last_assignment == work.assignment_id:
            return
        run, terms = record.runs.get(work.run_id, RunPrivacy()), work.privacy
        loss = None if terms is None else loss_of(work, terms, header.payload.size_bytes)
        total = run.loss + (loss or Loss())
        after = replace(
            run,
            bundle=work.bundle.manifest.sha256,
            population="" if terms is None else terms.population,
            protocol=work.round_protocol.protocol,
            mechanism="" if terms is None else terms.mechanism,
            clip_norm=0.0 if terms is None else terms.clip_norm,
            noise_multiplier=0.0 if terms is None else terms.noise_multiplier,
            delta=run.delta if terms is None else min(terms.delta, run.delta or 1.0),
            num_rounds=run.num_rounds + 1,
            num_bare=run.num_bare + (terms is None),
            num_unbounded=run.num_unbounded + (terms is not None and loss is None),
            rho=str(total.rho),
            xi=str(total.xi),
            sent=_contents(work, header)[:MAX_SENT],
            last_round=work.round,
            last_at=self._wall(),
        )
        self._write(replace(record, last_assignment=work.assignment_id), work.run_id, after)

    def note_manifest(self, work: Assignment, floor: Mapping[str, object], asked: tuple[str, ...]) -> None:
        """Note the floor and the query in the manifest of a Run, for the owner. Raises StorageFull."""
        record, bundle = self._read(), work.bundle.manifest.sha256
        run = record.runs.get(work.run_id, RunPrivacy())
        asked = asked[:MAX_SENT]
        if (run.bundle, run.floor, run.asked) != (bundle, floor, asked):
            self._write(record, work.run_id, replace(run, bundle=bundle, floor=dict(floor), asked=asked))

    def refuse(self, work: Assignment, reason: str) -> None:
        """Count an Assignment that the device refuses. Raises StorageFull."""
        record = self._read()
        run = record.runs.get(work.run_id, RunPrivacy())
        after = replace(
            run,
            bundle=work.bundle.manifest.sha256,
            num_refused=run.num_refused + 1,
            refusal=reason[:MAX_TEXT_CHARS],
            refused_at=self._wall(),
        )
        self._write(record, work.run_id, after)

    def _read(self) -> PrivacyRecord:
        if self._record is None:
            try:
                self._record = read_ledger(self._path.parent)
            except ValueError as exc:
                aside = self._path.with_suffix(".damaged")
                LOG.warning("%s: damaged (%s); it is kept as %s, and a new ledger begins", self._path, exc, aside.name)
                try:
                    self._path.replace(aside)
                except OSError as error:
                    raise storage_error(str(self._path), error) from error
                self._record = PrivacyRecord(damaged_at=self._wall())
        return self._record

    def _write(self, record: PrivacyRecord, run_id: str, run: RunPrivacy) -> None:
        runs = {**record.runs, run_id: run}
        while len(runs) > MAX_RUNS:
            oldest = min(runs.keys() - {run_id}, key=lambda each: max(runs[each].last_at, runs[each].refused_at))
            record = replace(record, earlier=_sum((record.earlier, runs.pop(oldest))))
        record = replace(record, runs=runs)
        try:
            replace_file(self._path, to_json(record).encode(), mode=0o600)
        except OSError as exc:
            raise storage_error(str(self._path), exc) from exc
        self._record = record


def loss_of(work: Assignment, terms: PrivacyTerms, size_bytes: int) -> Loss | None:
    """Return a bound of the loss of one Round without sampling; None for a mechanism without one in closed form.

    Args:
        work: The Assignment.
        terms: Its privacy.
        size_bytes: Bytes of the Update, at least as many as it has values.
    """
    squared = terms.squared_sensitivity
    if terms.mechanism == CENTRAL:
        return loss_of_discrete_gaussian(squared, Fraction(terms.noise_multiplier) ** 2 * squared)
    if work.round_protocol.protocol != SECAGG_PROTOCOL:
        return None
    assumptions, min_survivors = promised_masks(work.round_protocol.options)
    try:
        return share_of(terms, size_bytes, min_survivors - assumptions.num_adversarial(work.max_devices)).loss
    except InvalidPlan:
        return None


def read_ledger(folder: Path) -> PrivacyRecord:
    """Return the ledger of a device's folder; an empty one if there is none. Raises ValueError if it is damaged."""
    try:
        row = json.loads((folder / LEDGER_FILE).read_text("utf-8"))
    except FileNotFoundError:
        return PrivacyRecord()
    try:
        if row["format"] != LEDGER_FORMAT:
            raise ValueError(f"format {row['format']}, expected {LEDGER_FORMAT}")
        return PrivacyRecord(
            last_assignment=str(row["last_assignment"]),
            runs={str(run): _run(each) for run, each in row["runs"].items()},
            earlier=_run(row["earlier"]),
            damaged_at=float(row["damaged_at"]),
        )
    except (TypeError, LookupError, AttributeError, ArithmeticError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc


def to_json(record: PrivacyRecord) -> str:
    """Return the record as a line of JSON."""
    return json.dumps({"format": LEDGER_FORMAT, **asdict(record)}, separators=(",", ":"))


def _run(row: Mapping[str, Any]) -> RunPrivacy:
    """Return an entry. Raises an error of Python for a wrong key, type or fraction."""
    run = RunPrivacy(
        **{
            **row,
            "floor": dict(row["floor"]),
            "sent": tuple(map(str, row["sent"])),
            "asked": tuple(map(str, row.get("asked", ()))),
        }
    )
    for each in fields(RunPrivacy):
        value, default = getattr(run, each.name), getattr(_EMPTY, each.name)
        if type(value) is not type(default) and not (type(value) is int and type(default) is float):
            raise TypeError(f"{each.name}: got {value!r}")
    _ = run.loss
    return run


def _sum(runs: Iterable[RunPrivacy]) -> RunPrivacy:
    total, loss = RunPrivacy(), Loss()
    for run in runs:
        loss += run.loss
        total = replace(
            total,
            delta=min(total.delta or 1.0, run.delta or 1.0) if total.delta or run.delta else 0.0,
            num_rounds=total.num_rounds + run.num_rounds,
            num_bare=total.num_bare + run.num_bare,
            num_unbounded=total.num_unbounded + run.num_unbounded,
            num_refused=total.num_refused + run.num_refused,
        )
    return replace(total, rho=str(loss.rho), xi=str(loss.xi))


def _contents(work: Assignment, header: UpdateHeader) -> tuple[str, ...]:
    """Return what an Update has besides the change. Under masks its statistics are part of the sum."""
    counts = sorted(header.statistics.counts)
    masked = () if counts else (f"{each.name} (masked)" for each in work.statistics)
    bit = (CLIP_BITS,) if work.privacy is not None and work.privacy.bits_noise else ()
    return (*counts, *bit, *masked, *(("ranges of activations",) if header.ranges.counts else ()))

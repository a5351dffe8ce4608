"""What the page of settings shows: the effective settings, certificates, the disk, and versions."""

import asyncio
import platform
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from markupsafe import Markup

from fanin.protos.messages import MAX_NUMBER, PrivacyPopulation
from fanin.protos.plans import RetentionPlan
from fanin.protos.release import __version__
from fanin.protos.texts import CHARGE_DUE, epsilon_text, listed
from fanin.server.access.authority import RENEW_DAYS
from fanin.server.access.limits import Limits
from fanin.server.access.rates import Sources
from fanin.server.care.backup import LastBackup, last_backup
from fanin.server.care.certificates import CertificateEnd, Certificates
from fanin.server.care.forecast import DiskWatch, Forecast
from fanin.server.settings import Settings
from fanin.server.storage.protocols.ledger import LedgerStore
from fanin.server.storage.protocols.tokens import AuditStore
from fanin.server.storage.retention import DAY_S
from fanin.server.web.rendering import duration, moment, number, size

LIBRARIES: Final = ("grpcio", "SQLAlchemy", "starlette", "uvicorn", "numpy", "cryptography")
Rows = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The facts of a coordinator.

    Attributes:
        settings: Its settings.
        limits: The limits of its load.
        certificates: Its certificate.
        disk: The forecast of its disk.
        audit: The audit log.
        ledger: The privacy ledgers.
        num_devices: Returns the number of enrolled devices.
        sources: The addresses that send wrong credentials.
        url: The address of the page.
    """

    settings: Settings
    limits: Limits
    certificates: Certificates
    disk: DiskWatch
    audit: AuditStore
    ledger: LedgerStore
    num_devices: Callable[[], int]
    sources: Sources
    url: str

    def alarms(self) -> tuple[str, ...]:
        """Return what needs a hand within weeks, in words: a disk that fills up, certificates that were not renewed."""
        texts, expected = [], self.disk.forecast
        if expected is not None and expected.is_short:
            left = duration((expected.days_left or 0.0) * DAY_S)
            texts.append(
                f"The disk is full in {left}: {size(expected.now.free_bytes)} are free, and it grows by "
                f"{size(expected.bytes_per_day)} a day. Free space, or let retention keep less: fanin prune RUN shows "
                "what would go."
            )
        if self.certificates.is_renewal_failed:
            until = min(each.ends_at for each in self.certificates.ends())
            texts.append(
                f"The renewal of the certificate failed: the one before is served, until {until:%Y-%m-%d}. The log has "
                "the reason."
            )
        texts += [
            f"The {each.title} ends on {each.ends_at:%Y-%m-%d}. No client connects from then on.{each.remedy}"
            for each in self.certificates.ending()
        ]
        return tuple(texts)

    async def sections(self, *, has_paths: bool) -> dict[str, Rows]:
        """Return the facts by section. Paths of the machine are for operators."""
        settings = self.settings
        own: Rows = (
            *((("Folder of the state", str(settings.state.absolute())),) if has_paths else ()),
            ("Address for devices and operators", settings.listen),
            ("Address of the page", self.url),
            ("Names in the certificate", ", ".join(sorted(settings.all_names))),
            ("Accepted Updates survive", f"a crash of the {settings.durability.value}"),
            ("Data sets for evaluations", ", ".join(sorted(settings.data)) or "none"),
            ("Flower strategies", ", ".join(settings.strategies) or "those of flwr"),
            ("Enrolled devices", number(self.num_devices())),
        )
        log = await self.audit.audit_page(MAX_NUMBER)
        populations = await self.ledger.populations()
        return {
            "Coordinator": own,
            "Audit log": (("Entries", number(log.num_entries)), ("Head, to keep elsewhere", log.head)),
            **({"Privacy budgets": tuple(map(budget_row, populations))} if populations else {}),
            "Disk": _disk(self.disk.forecast),
            "Backup": _backup(await asyncio.to_thread(last_backup, settings.state)),
            "Retention of Runs whose Plan has no limits": _retention(settings.retention),
            "Certificates": (
                *_certificates(self.certificates.ends()),
                ("Renewal", _renewal(is_own=settings.own_files is not None)),
            ),
            "Limits": _limits(self.limits),
            "Versions": _versions(),
        }


def budget_row(population: PrivacyPopulation) -> tuple[str, str]:
    """Return the name of a population, and what its Runs have spent."""
    newest = population.newest
    least = "at least " if population.uncharged else ""
    spent = f"epsilon {least}{epsilon_text(0.0 if newest is None else newest.epsilon)} of {population.epsilon:g}"
    waits = f"; {CHARGE_DUE} for {listed(population.uncharged)}" if population.uncharged else ""
    return population.name, f"{spent} at delta {population.delta:g}{waits}"


def _limits(limits: Limits) -> Rows:
    return (
        ("Devices that wait for work", number(limits.max_parked)),
        ("Uploads at a time", number(limits.max_uploads)),
        ("A check-in waits for", duration(limits.max_wait_s)),
        ("A transfer that stands still ends after", duration(limits.stall_s)),
    )


def _disk(expected: Forecast | None) -> Rows:
    if expected is None:
        return (("Use", "being measured"),)
    now = expected.now
    growth = left = "known after two hours"
    if expected.bytes_per_day is not None:
        growth = f"{size(expected.bytes_per_day)} a day" if expected.bytes_per_day > 0 else "none"
        left = "not expected" if expected.days_left is None else duration(expected.days_left * DAY_S)
    return (
        ("Free", size(now.free_bytes)),
        ("Used by this coordinator", size(now.used_bytes)),
        *((f"{name[:1].upper()}{name[1:]}", size(each)) for name, each in now.parts.items()),
        ("Growth, over at most a week", growth),
        ("Growth of a Round", size(expected.bytes_per_round)),
        ("Full in", left),
        ("Measured", moment(now.at_s)),
    )


def _backup(last: LastBackup | None) -> Rows:
    if last is None:
        return (("Last backup", "none of this folder is known"),)
    return ("Last backup", moment(last.at_s)), ("Files missing or damaged then", number(last.num_damaged))


def _retention(retention: RetentionPlan) -> Rows:
    days = "not set" if retention.keep_days is None else f"{retention.keep_days:g} days"
    everything = "all" if retention.keep_days is None else "those of these days"
    return (
        ("Parameters of Versions", everything if (kept := retention.keep_versions) is None else f"newest {kept:,}"),
        ("Updates of Rounds", everything if (kept := retention.keep_updates) is None else f"newest {kept:,}"),
        ("Everything for at least", days),
    )


def _renewal(*, is_own: bool) -> str:
    if is_own:
        return "by you: replace the files of --tls-cert and --tls-key"
    return f"by the coordinator, {RENEW_DAYS} days before the end"


def _certificates(ends: Iterable[CertificateEnd]) -> Rows:
    until = Markup("until {}")
    return tuple((each.name.removeprefix("CN="), until.format(moment(each.ends_at.timestamp()))) for each in ends)


def _versions() -> Rows:
    libraries = tuple((name, metadata.version(name)) for name in LIBRARIES)
    return (
        ("fanin", __version__),
        ("Python", platform.python_version()),
        ("SQLite", sqlite3.sqlite_version),
        *libraries,
    )

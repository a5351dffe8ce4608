"""What the page of settings shows: the effective settings, certificates, the disk, and versions."""

import platform
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Final

from cryptography import x509

from fanin.protos.messages import MAX_NUMBER
from fanin.protos.release import __version__
from fanin.server.access.limits import Limits
from fanin.server.settings import Settings
from fanin.server.storage.protocols.audit import AuditStore
from fanin.server.storage.stores import Files
from fanin.server.web.rendering import moment, number, size

LIBRARIES: Final = ("grpcio", "SQLAlchemy", "starlette", "uvicorn", "numpy", "cryptography")
Rows = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The facts of a coordinator.

    Attributes:
        settings: Its settings.
        limits: The limits of its load.
        files: Reads the disk.
        audit: The audit log.
        num_devices: Returns the number of enrolled devices.
        url: The address of the page.
    """

    settings: Settings
    limits: Limits
    files: Files
    audit: AuditStore
    num_devices: Callable[[], int]
    url: str

    async def sections(self) -> dict[str, Rows]:
        """Return the facts by section."""
        settings = self.settings
        own: Rows = (
            ("Folder of the state", str(settings.state.absolute())),
            ("Address for devices and operators", settings.listen),
            ("Address of the page", self.url),
            ("Names in the certificate", ", ".join(sorted(settings.all_names))),
            ("Accepted Updates survive", f"a crash of the {settings.durability.value}"),
            ("Data sets for evaluations", ", ".join(sorted(settings.data)) or "none"),
            ("Flower strategies", ", ".join(settings.strategies) or "those of flwr"),
            ("Enrolled devices", number(self.num_devices())),
        )
        log = await self.audit.audit_page(MAX_NUMBER)
        return {
            "Coordinator": own,
            "Audit log": (("Entries", number(log.num_entries)), ("Head, to keep elsewhere", log.head)),
            "Disk": await self.files.run(_disk, settings.state),
            "Certificates": await self.files.run(_certificates, settings.state / "tls"),
            "Limits": tuple((_words(each.name), _limit(getattr(self.limits, each.name))) for each in fields(Limits)),
            "Versions": _versions(),
        }


def _words(name: str) -> str:
    text = name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    return f"{text[:1].upper()}{text[1:]}" + (", seconds" if name.endswith("_s") else "")


def _limit(value: object) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _disk(folder: Path) -> Rows:
    usage = shutil.disk_usage(folder)
    database = sum(path.stat().st_size for path in folder.glob("fanin.db*"))
    return (
        ("Free", f"{size(usage.free)} of {size(usage.total)}"),
        ("Database", size(database)),
    )


def _certificates(folder: Path) -> Rows:
    rows = []
    for name, path in (("Coordinator's certificate ends", "server.pem"), ("Authority ends", "ca.pem")):
        certificate = x509.load_pem_x509_certificate((folder / path).read_bytes())
        rows.append((name, moment(certificate.not_valid_after_utc.timestamp())))
    return tuple(rows)


def _versions() -> Rows:
    libraries = tuple((name, metadata.version(name)) for name in LIBRARIES)
    return (
        ("fanin", __version__),
        ("Python", platform.python_version()),
        ("SQLite", sqlite3.sqlite_version),
        *libraries,
    )

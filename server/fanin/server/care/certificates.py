"""The certificate that the coordinator serves with, renewed while it serves.

There are two sources: the local authority, whose certificate is issued again 30 days before its end
(``access.authority``), and files of the operator, whose own authority renews them. Both are read again every hour and
on SIGHUP, files also within a minute after they change. New connections then get the new certificate, and open calls
live on. What cannot be read or would be refused by clients changes nothing: the certificate before is served, and the
log says why.

A certificate that ends soon is logged once a day. The local authority is, too, from a year before its end: its
certificates end with it, and every client needs the next one. ``ending`` and ``is_renewal_failed`` are the alarms of
pages and metrics: a certificate that the coordinator renews raises none while its renewal works.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fanin.protos.errors import FaninError, InvalidInput
from fanin.server.access.authority import RENEW_DAYS, SERVER_DAYS, ServerIdentity, covered_names, local_identity

LOG: Final = logging.getLogger("fanin.server.care.certificates")
LOOK_S: Final = 30.0
"""Seconds between two looks at the files of the operator."""
READ_EVERY_S: Final = 3600.0
WARN_EVERY: Final = timedelta(days=1)
ALARM_BEFORE: Final = timedelta(days=RENEW_DAYS - 1)
"""Time before an end from which it is an alarm. The renewal is due a day earlier, and is tried every hour."""
AUTHORITY_BEFORE: Final = timedelta(days=SERVER_DAYS)
"""Time before the end of the local authority from which the log has it. Each client must get the next one by then."""
REPLACE_AUTHORITY: Final = (
    "Remove tls/ca.pem, so that the same key issues it again, and give the new one to every client before: see "
    "docs/howto/operate.md."
)
_UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateEnd:
    """A certificate and its end.

    Attributes:
        name: Its subject.
        ends_at: When no client accepts it any more.
        is_local_authority: Whether it is the local authority.
    """

    name: str
    ends_at: datetime
    is_local_authority: bool

    @property
    def title(self) -> str:
        """What it is, for people."""
        return "local authority" if self.is_local_authority else f"certificate of {self.name.removeprefix('CN=')}"

    @property
    def remedy(self) -> str:
        """What to do before its end, "" for nothing but what renews it."""
        return f" {REPLACE_AUTHORITY}" if self.is_local_authority else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """The files of an operator's own certificate.

    Attributes:
        certificate: The certificate and those between it and the authority, in PEM.
        key: Its private key, in PEM, without a password.
        names: Host names and addresses that it must cover.
    """

    certificate: Path
    key: Path
    names: tuple[str, ...]

    def read(self, now: datetime) -> ServerIdentity:
        """Return the certificate. Raises InvalidInput if clients would refuse it."""
        chain_data, key_data = _bytes(self.certificate), _bytes(self.key)
        try:
            leaf = x509.load_pem_x509_certificates(chain_data)[0]
        except _UNREADABLE as exc:
            raise InvalidInput(
                f"--tls-cert {self.certificate}: not a certificate in PEM ({exc}); give the file with the "
                "certificate of this coordinator first",
                code="FN-1446",
            ) from exc
        try:
            key = serialization.load_pem_private_key(key_data, password=None)
        except _UNREADABLE as exc:
            raise InvalidInput(
                f"--tls-key {self.key}: not a private key in PEM without a password ({exc})", code="FN-1446"
            ) from exc
        if key.public_key() != leaf.public_key():
            raise InvalidInput(
                f"--tls-key {self.key}: does not fit the certificate in {self.certificate}; give the key with which "
                "it was requested",
                code="FN-1446",
            )
        begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not begins <= now < ends:
            raise InvalidInput(
                f"--tls-cert {self.certificate}: valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, but "
                f"the clock of this machine shows {now:%Y-%m-%d %H:%M}; renew it, or set the clock",
                code="FN-1447",
            )
        covered = covered_names(leaf)
        if missing := [name for name in self.names if not _covers(covered, name)]:
            raise InvalidInput(
                f"--tls-cert {self.certificate}: covers {', '.join(sorted(covered)) or 'no name'}, expected "
                f"{missing[0]}, too; request a certificate with this subject alternative name, or correct --name",
                code="FN-1448",
            )
        return ServerIdentity(key=key_data, certificate=chain_data, ca_certificate=b"")

    def state(self) -> tuple[object, ...]:
        """Return a value that differs after a change of the files."""
        with suppress(OSError):
            stats = [path.stat() for path in (self.certificate, self.key)]
            return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)
        return ()


class Certificates:
    """The certificate of a coordinator, as it is now.

    Args:
        read: Reads or issues it. It raises FaninError or OSError.
        clock: The time.
        state: Returns a value that differs once the certificate must be read again; default: only the hour decides.
    """

    def __init__(
        self,
        read: Callable[[datetime], ServerIdentity],
        clock: Callable[[], datetime],
        state: Callable[[], object] = lambda: None,
    ) -> None:
        self._read, self._clock, self._state = read, clock, state
        self._seen = state()
        self.current = read(clock())
        self.is_renewal_failed = False
        """Whether the last renewal failed. The log has its error."""
        self._warned_at: datetime | None = None
        self._again = asyncio.Event()

    def ends(self) -> tuple[CertificateEnd, ...]:
        """Return the ends of the certificate, of those in its chain and of the local authority."""
        authority = self.current.ca_certificate
        parts = {False: self.current.certificate} | ({True: authority} if authority else {})
        return tuple(
            CertificateEnd(
                name=each.subject.rfc4514_string(),
                ends_at=each.not_valid_after_utc,
                is_local_authority=is_local_authority,
            )
            for is_local_authority, data in parts.items()
            for each in x509.load_pem_x509_certificates(data)
        )

    def ending(self) -> tuple[CertificateEnd, ...]:
        """Return the certificates that end soon and were not renewed; of those that end with the authority, it."""
        ends = self.ends()
        last = {each.ends_at for each in ends if each.is_local_authority}
        soon = [each for each in ends if each.ends_at - self._clock() < ALARM_BEFORE]
        return tuple(each for each in soon if each.is_local_authority or each.ends_at not in last)

    def renew(self) -> None:
        """Read the certificate again. One that cannot be used is logged, and the one before is served."""
        try:
            fresh = self._read(self._clock())
        except (FaninError, OSError) as exc:
            self.is_renewal_failed = True
            LOG.error("the certificate was not renewed, and the one before is served: %s", exc)
            return
        self.is_renewal_failed = False
        if fresh != self.current:
            self.current = fresh
            LOG.info("a new certificate is served, until %s", f"{self.ends()[0].ends_at:%Y-%m-%d %H:%M} UTC")

    def request(self) -> None:
        """Renew it soon. For the handler of SIGHUP."""
        LOG.info("SIGHUP: the certificate is read again")
        self._again.set()

    def warn(self) -> None:
        """Log the certificates that end soon, at most once a day."""
        now = self._clock()
        if self._warned_at is not None and now < self._warned_at + WARN_EVERY:
            return
        early = [each for each in self.ends() if each.is_local_authority and each.ends_at - now < AUTHORITY_BEFORE]
        for each in (*early, *(each for each in self.ending() if not each.is_local_authority)):
            self._warned_at = now
            LOG.warning(
                "the %s ends in %d days, on %s. No client connects from then on.%s",
                *(each.title, (each.ends_at - now).days, f"{each.ends_at:%Y-%m-%d}", each.remedy),
            )

    async def watch(self, look_s: float = LOOK_S) -> None:
        """Renew and warn when it is due, until cancelled."""
        read_at = self._clock()
        while True:
            self.warn()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), look_s)
            state, now = await asyncio.to_thread(self._state), self._clock()
            if self._again.is_set() or state != self._seen or now >= read_at + timedelta(seconds=READ_EVERY_S):
                self._again.clear()
                self._seen, read_at = state, now
                await asyncio.to_thread(self.renew)


def local_certificates(folder: Path, names: frozenset[str], clock: Callable[[], datetime]) -> Certificates:
    """Return the certificate of the local authority in a folder. Raises the errors of ``local_identity``."""
    return Certificates(lambda now: local_identity(folder, names, now), clock)


def own_certificates(files: OwnFiles, clock: Callable[[], datetime]) -> Certificates:
    """Return the certificate of the operator. Raises InvalidInput if clients would refuse it."""
    return Certificates(files.read, clock, files.state)


def utc_now() -> datetime:
    """Return the time of this machine."""
    return datetime.now(UTC)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidInput(
            f"{path}: cannot be read ({exc.strerror}); check --tls-cert and --tls-key", code="FN-1446"
        ) from exc


def _covers(covered: frozenset[str], name: str) -> bool:
    """Return whether a certificate is valid for a host name. A wildcard covers one label.

    Reference: https://www.rfc-editor.org/rfc/rfc6125#section-6.4.3
    """
    label, _, rest = name.lower().partition(".")
    return name.lower() in covered or (bool(label and rest) and f"*.{rest}" in covered)

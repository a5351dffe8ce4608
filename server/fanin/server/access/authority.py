"""The local certificate authority, so that the coordinator never serves without TLS.

    tls/ca.pem      the authority's certificate: give it to devices and operators
    tls/ca.key      its key: never leaves this folder
    tls/server.pem  the coordinator's certificate, for the names that it is reached by
    tls/server.key

Everything is created on first use. Keys are ECDSA P-256, which every gRPC build on a device can verify.

The server's certificate can be issued again at any time, because clients trust the authority alone. The coordinator
issues a new one if clients would reject the old one: it is damaged, or does not match its key or the authority. Or it
lacks a name, is not valid yet, or ends within 30 days and before the authority. It never replaces the authority,
because no client would trust a new one. An unusable authority raises an error that names the remedy.
"""

import ipaddress
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fanin.protos.errors import Corrupted, InvalidInput
from fanin.server.storage.disk import write_file

LOG = logging.getLogger("fanin.server.access.authority")
CA_DAYS: Final = 3650
SERVER_DAYS: Final = 397
"""The longest that common TLS clients accept for a server certificate."""
RENEW_DAYS: Final = 30
BACKDATED: Final = timedelta(hours=1)
"""Time before its creation from which a certificate is valid. It tolerates devices with slow clocks, and a coordinator
whose clock is set back by less."""

_MAX_DNS_CHARS: Final = 253
_UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, InvalidSignature)
"""The errors of ``cryptography`` for damaged PEM, a key with a password, an unknown algorithm and a wrong signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """The key and the certificate of a TLS server, and the authority's certificate for its clients, all in PEM."""

    key: bytes
    certificate: bytes
    ca_certificate: bytes

    @property
    def chain(self) -> bytes:
        """The certificates that the server presents. A client that has only the fingerprint reads the authority's."""
        return self.certificate + self.ca_certificate

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate, hexadecimal: ``openssl x509 -fingerprint -sha256``.

        Empty if the authority is the operator's own.
        """
        if not self.ca_certificate:
            return ""
        return x509.load_pem_x509_certificate(self.ca_certificate).fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def local_identity(folder: Path, names: Collection[str], now: datetime) -> ServerIdentity:
    """Return the coordinator's identity for these host names and addresses. Create or renew it in ``folder``.

    Raises:
        InvalidInput: A name cannot be in a certificate.
        Corrupted: The authority is damaged, lacks its key, or is not valid now.
        StorageFull: A file cannot be written.
    """
    subjects = [_general_name(name) for name in sorted(names)]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _open_authority(folder, now)
    key_path, certificate_path = folder / "server.key", folder / "server.pem"
    problem = _problem(folder, authority, subjects, now)
    if problem:
        if certificate_path.exists():
            LOG.warning("%s: %s; a new certificate is issued by the same authority", certificate_path, problem)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _issue_server(authority, key, subjects, now)
        write_file(key_path, _key_pem(key))
        write_file(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return ServerIdentity(
        key=key_path.read_bytes(),
        certificate=certificate_path.read_bytes(),
        ca_certificate=(folder / "ca.pem").read_bytes(),
    )


def _open_authority(folder: Path, now: datetime) -> _Authority:
    key_path, certificate_path = folder / "ca.key", folder / "ca.pem"
    if not key_path.exists():
        if certificate_path.exists():
            raise Corrupted(
                f"{key_path}: missing in the folder of ca.pem, expected the authority's key; {_advice(folder)}",
                code="FN-0680",
            )
        write_file(key_path, _key_pem(ec.generate_private_key(ec.SECP256R1())))
    key = _read_ca_key(key_path)
    if not certificate_path.exists():
        # First use, a crash between the two files, or a lost certificate. Clients with an earlier certificate accept
        # signatures of the same key.
        certificate = _issue_ca(key, now)
        write_file(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    authority = _Authority(key=key, certificate=_read_ca_certificate(certificate_path))
    _check_authority(certificate_path, authority, now)
    return authority


def _read_ca_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except _UNREADABLE as exc:
        raise Corrupted(
            f"{path}: not readable as a private key without a password; {_advice(path.parent)}", code="FN-0681"
        ) from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Corrupted(
            f"{path}: got {type(key).__name__}, expected an ECDSA key; {_advice(path.parent)}", code="FN-0681"
        )
    return key


def _read_ca_certificate(path: Path) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        # It is self-signed, so its own signature covers every byte that is read later.
        certificate.verify_directly_issued_by(certificate)
        return certificate
    except _UNREADABLE as exc:
        raise Corrupted(
            f"{path}: damaged, or not a certificate; restore it from a backup or from a device, or remove this file "
            "alone: the same key issues it again, and devices continue with the one that they have",
            code="FN-0682",
        ) from exc


def _check_authority(path: Path, authority: _Authority, now: datetime) -> None:
    """Raise Corrupted unless clients that trust this authority can connect now."""
    certificate, advice = authority.certificate, _advice(path.parent)
    if certificate.public_key() != authority.key.public_key():
        raise Corrupted(f"{path}: does not match the key in ca.key; {advice}", code="FN-0681")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= now < ends:
        raise Corrupted(
            f"{path}: valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, but the clock of this machine "
            f"shows {now.astimezone(UTC):%Y-%m-%d %H:%M}; set the clock, or if it is right: {advice}",
            code="FN-0683",
        )


def _advice(folder: Path) -> str:
    return (
        f"restore {folder} from a backup, or move it away and create an empty folder in its place: a new authority is "
        "created there, whose ca.pem every device and operator needs"
    )


def _issue_ca(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fanin local authority")])
    return (
        _builder(name, name, key.public_key(), now, now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _issue_server(
    authority: _Authority, key: ec.EllipticCurvePrivateKey, subjects: list[x509.GeneralName], now: datetime
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(subjects[0].value)[:64])])
    ca_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    ends = min(now + timedelta(days=SERVER_DAYS), authority.certificate.not_valid_after_utc)
    return (
        _builder(subject, authority.certificate.subject, key.public_key(), now, ends)
        .add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(ca_id, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(ends)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    # DNS has no longer names, and certificates cannot represent other names.
    if not name or len(name) > _MAX_DNS_CHARS or not name.isascii() or not name.isprintable() or " " in name:
        raise InvalidInput(
            f"name: got {name[:_MAX_DNS_CHARS]!r}, expected a host name of ASCII letters (xn--... for others), or an "
            "address; check --name and --listen",
            code="FN-0684",
        )
    return x509.DNSName(name)


def covered_names(certificate: x509.Certificate) -> frozenset[str]:
    """Return the host names, in lower case, and the addresses that a certificate is valid for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(
        [each.lower() for each in names.get_values_for_type(x509.DNSName)]
        + [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    )


def _problem(folder: Path, authority: _Authority, subjects: list[x509.GeneralName], now: datetime) -> str:
    """Return why a client could not use the server's certificate now or soon, or an empty string if it can."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), password=None)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        is_of_key = key.public_key() == certificate.public_key()
        certificate.verify_directly_issued_by(authority.certificate)
    except FileNotFoundError:
        return "it or its key is missing"
    except InvalidSignature:
        return "it was issued by another authority"
    except (*_UNREADABLE, x509.ExtensionNotFound, x509.DuplicateExtension):
        return "it or its key is damaged"
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not is_of_key:
        # A renewal ended between the two files.
        return "it does not match its key"
    if not set(subjects) <= set(covered):
        return "it does not cover all names"
    if now < begins:
        return f"it is not valid before {begins:%Y-%m-%d %H:%M} UTC, because the clock was ahead when it was issued"
    # One that ends with its authority cannot be issued for longer.
    if ends - timedelta(days=RENEW_DAYS) <= now and ends < authority.certificate.not_valid_after_utc:
        return f"it ends on {ends:%Y-%m-%d}"
    return ""


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

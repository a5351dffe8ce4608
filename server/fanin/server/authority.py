"""A certificate authority of one's own, so that nothing is ever served without TLS.

    tls/ca.pem      the authority's certificate: give it to devices and operators
    tls/ca.key      its key: never leaves this folder
    tls/server.pem  the coordinator's certificate, for the names that it is reached by
    tls/server.key

Everything is made on first use; the server's certificate is made anew when a name is missing in it or when it
is within 30 days of its end. Keys are ECDSA P-256, which every gRPC build on a device can verify.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fanin.server.disk import full_disk_as_our_error

CA_DAYS: Final = 3650
SERVER_DAYS: Final = 397
"""The longest that common TLS clients accept for a server certificate."""
RENEW_DAYS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """What a TLS server needs, in PEM, and the authority's certificate for its clients."""

    key: bytes
    certificate: bytes
    ca_certificate: bytes


def local_identity(folder: Path, names: Collection[str], now: datetime) -> ServerIdentity:
    """The coordinator's identity for these host names and addresses, made or renewed in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_key, ca_certificate = _load_or_make_ca(folder, now)
    key_path, certificate_path = folder / "server.key", folder / "server.pem"
    if not _is_good(certificate_path, key_path, names, now):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _issue_server(ca_key, ca_certificate, key, sorted(names), now)
        _write(key_path, _key_pem(key))
        _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return ServerIdentity(
        key=key_path.read_bytes(),
        certificate=certificate_path.read_bytes(),
        ca_certificate=(folder / "ca.pem").read_bytes(),
    )


def _load_or_make_ca(folder: Path, now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_path, certificate_path = folder / "ca.key", folder / "ca.pem"
    if certificate_path.exists():
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path}: got {type(key).__name__}, expected an ECDSA key")
        return key, x509.load_pem_x509_certificate(certificate_path.read_bytes())
    fresh = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fanin local authority")])
    certificate = (
        _builder(name, name, fresh.public_key(), now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(fresh.public_key()), critical=False)
        .sign(fresh, hashes.SHA256())
    )
    _write(key_path, _key_pem(fresh))
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return fresh, certificate


def _issue_server(
    ca_key: ec.EllipticCurvePrivateKey,
    ca_certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    names: list[str],
    now: datetime,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    ca_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(subject, ca_certificate.subject, key.public_key(), now, SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(ca_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # An hour back, for devices whose clock is a little behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
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
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _is_good(path: Path, key_path: Path, names: Collection[str], now: datetime) -> bool:
    if not path.exists():
        return False
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    if key.public_key() != certificate.public_key():
        # A renewal that ended between its two files.
        return False
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ends = certificate.not_valid_after_utc
    return {_general_name(name) for name in names} <= set(found) and now.astimezone(UTC) < ends - timedelta(RENEW_DAYS)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file aside and rename it: a full disk leaves no half of it. Raises StorageFull."""
    draft = path.with_name(f"{path.name}.new")
    with full_disk_as_our_error(str(path)):
        draft.unlink(missing_ok=True)
        draft.touch(mode=mode)
        draft.write_bytes(data)
        draft.replace(path)

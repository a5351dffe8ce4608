"""The local authority: a chain that verifies, renewed in time, with keys for their owner only."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fanin.server.authority import CA_DAYS, RENEW_DAYS, SERVER_DAYS, ServerIdentity, local_identity

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = ("localhost", "127.0.0.1", "::1", "fanin.example")


def verify(identity: ServerIdentity, name: str, at: datetime = NOW) -> None:
    """What a TLS client does. Raises VerificationError."""
    builder = PolicyBuilder().time(at).store(Store([x509.load_pem_x509_certificate(identity.ca_certificate)]))
    builder.build_server_verifier(x509.DNSName(name)).verify(certificate(identity), [])


def certificate(identity: ServerIdentity) -> x509.Certificate:
    return x509.load_pem_x509_certificate(identity.certificate)


def test_the_chain_verifies_for_its_names_and_no_other(tmp_path: Path) -> None:
    identity = local_identity(tmp_path, NAMES, NOW)
    for name in ("localhost", "fanin.example"):
        verify(identity, name)
    with pytest.raises(VerificationError):
        verify(identity, "other.example")
    found = certificate(identity).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(address) for address in found.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}


def test_the_chain_verifies_for_no_other_authority_and_not_for_ever(tmp_path: Path) -> None:
    identity, other = (local_identity(tmp_path / name, NAMES, NOW) for name in "ab")
    mixed = ServerIdentity(key=identity.key, certificate=identity.certificate, ca_certificate=other.ca_certificate)
    with pytest.raises(VerificationError):
        verify(mixed, "localhost")
    with pytest.raises(VerificationError):
        verify(identity, "localhost", NOW + timedelta(days=SERVER_DAYS + 1))


def test_the_key_is_the_certificates(tmp_path: Path) -> None:
    identity = local_identity(tmp_path, NAMES, NOW)
    key = serialization.load_pem_private_key(identity.key, password=None)
    assert key.public_key() == certificate(identity).public_key()


def test_an_authority_signs_servers_and_a_server_signs_nobody(tmp_path: Path) -> None:
    identity = local_identity(tmp_path, NAMES, NOW)
    ca = x509.load_pem_x509_certificate(identity.ca_certificate)
    basics = [found.extensions.get_extension_for_class(x509.BasicConstraints) for found in (ca, certificate(identity))]
    assert [(found.critical, found.value.ca, found.value.path_length) for found in basics] == [
        (True, True, 0),
        (True, False, None),
    ]


def test_a_good_identity_is_kept(tmp_path: Path) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    assert local_identity(tmp_path, NAMES, NOW + timedelta(days=SERVER_DAYS - RENEW_DAYS - 1)) == first
    assert local_identity(tmp_path, NAMES[:2], NOW) == first


@pytest.mark.parametrize(
    ("names", "days"),
    [(NAMES, SERVER_DAYS - RENEW_DAYS + 1), ((*NAMES, "new.example"), 0)],
    ids=["renewal", "new name"],
)
def test_near_its_end_and_for_a_new_name_a_server_gets_a_new_one(
    tmp_path: Path, names: tuple[str, ...], days: int
) -> None:
    first, later = local_identity(tmp_path, NAMES, NOW), NOW + timedelta(days=days)
    second = local_identity(tmp_path, names, later)
    assert second.ca_certificate == first.ca_certificate
    assert second.key != first.key
    verify(second, names[-1], later + timedelta(days=SERVER_DAYS - 1))


def test_the_authority_outlives_its_servers(tmp_path: Path) -> None:
    ca = x509.load_pem_x509_certificate(local_identity(tmp_path, NAMES, NOW).ca_certificate)
    assert ca.not_valid_after_utc == NOW + timedelta(days=CA_DAYS)


def test_a_device_whose_clock_is_behind_can_connect(tmp_path: Path) -> None:
    verify(local_identity(tmp_path, NAMES, NOW), "localhost", NOW - timedelta(minutes=59))


def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    local_identity(folder, NAMES, NOW)
    local_identity(folder, (*NAMES, "new.example"), NOW)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes) == {"ca.key", "ca.pem", "server.key", "server.pem"}
    assert modes["ca.key"] == modes["server.key"] == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_whose_authority_is_no_ecdsa_key_is_said(tmp_path: Path) -> None:
    local_identity(tmp_path, NAMES, NOW)
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "ca.key").write_bytes(pem)
    with pytest.raises(ValueError, match=r"ca\.key: got Ed25519PrivateKey, expected an ECDSA key"):
        local_identity(tmp_path, NAMES, NOW)

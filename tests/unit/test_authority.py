"""The local certificate authority: chains that verify, renewal in time, and keys that only their owner can read."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from support.full_disk import full_disk, in_child
from support.synced import durable_files, synced

from fanin.protos.errors import Corrupted, InvalidInput, StorageFull
from fanin.server.access.authority import BACKDATED, CA_DAYS, RENEW_DAYS, SERVER_DAYS, ServerIdentity, local_identity

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = ("localhost", "127.0.0.1", "::1", "fanin.example")


def verify(identity: ServerIdentity, name: str, at: datetime = NOW) -> None:
    """Verify the identity as a TLS client does. Raises VerificationError."""
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
    names = certificate(identity).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(address) for address in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}


def test_the_chain_verifies_for_no_other_authority_and_expires(tmp_path: Path) -> None:
    identity, other = (local_identity(tmp_path / name, NAMES, NOW) for name in "ab")
    mixed_identity = ServerIdentity(
        key=identity.key, certificate=identity.certificate, ca_certificate=other.ca_certificate
    )
    with pytest.raises(VerificationError):
        verify(mixed_identity, "localhost")
    with pytest.raises(VerificationError):
        verify(identity, "localhost", NOW + timedelta(days=SERVER_DAYS + 1))


def test_the_key_matches_the_certificate(tmp_path: Path) -> None:
    identity = local_identity(tmp_path, NAMES, NOW)
    key = serialization.load_pem_private_key(identity.key, password=None)
    assert key.public_key() == certificate(identity).public_key()


def test_an_authority_signs_servers_and_a_server_signs_no_certificate(tmp_path: Path) -> None:
    identity = local_identity(tmp_path, NAMES, NOW)
    ca = x509.load_pem_x509_certificate(identity.ca_certificate)
    constraints = [
        constraint.extensions.get_extension_for_class(x509.BasicConstraints)
        for constraint in (ca, certificate(identity))
    ]
    assert [(constraint.critical, constraint.value.ca, constraint.value.path_length) for constraint in constraints] == [
        (True, True, 0),
        (True, False, None),
    ]


def test_a_valid_identity_is_reused(tmp_path: Path) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    assert local_identity(tmp_path, NAMES, NOW + timedelta(days=SERVER_DAYS - RENEW_DAYS - 1)) == first
    assert local_identity(tmp_path, NAMES[:2], NOW) == first


@pytest.mark.parametrize(
    ("names", "days"),
    [(NAMES, SERVER_DAYS - RENEW_DAYS + 1), ((*NAMES, "new.example"), 0)],
    ids=["renewal", "new name"],
)
def test_a_certificate_is_renewed_before_its_end_and_for_a_new_name(
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


def test_a_folder_whose_authority_is_no_ecdsa_key_is_refused(tmp_path: Path) -> None:
    local_identity(tmp_path, NAMES, NOW)
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "ca.key").write_bytes(pem)
    with pytest.raises(Corrupted, match="FN-0681"):
        local_identity(tmp_path, NAMES, NOW)


def test_a_server_certificate_from_a_clock_that_was_ahead_is_issued_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    future = local_identity(tmp_path, NAMES, NOW + timedelta(days=SERVER_DAYS))
    with pytest.raises(VerificationError):
        verify(future, "localhost")
    renewed = local_identity(tmp_path, NAMES, NOW)
    assert renewed.ca_certificate == first.ca_certificate
    verify(renewed, "localhost")
    assert "it is not valid before 2027-04-01 23:00 UTC, because the clock was ahead" in caplog.text


def test_a_certificate_survives_a_clock_that_is_set_back_a_little(tmp_path: Path) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    assert local_identity(tmp_path, NAMES, NOW - BACKDATED) == first
    verify(first, "localhost", NOW - BACKDATED)


@pytest.mark.parametrize("days", [-CA_DAYS, -1, CA_DAYS])
def test_an_authority_that_is_not_valid_now_is_refused_and_not_replaced(tmp_path: Path, days: int) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    with pytest.raises(Corrupted, match="FN-0683"):
        local_identity(tmp_path, NAMES, NOW + timedelta(days=days))
    assert local_identity(tmp_path, NAMES, NOW) == first


def test_a_server_certificate_ends_no_later_than_its_authority_and_is_not_issued_again_for_it(tmp_path: Path) -> None:
    local_identity(tmp_path, NAMES, NOW)
    late_identity = local_identity(tmp_path, NAMES, NOW + timedelta(days=CA_DAYS - 100))
    end = NOW + timedelta(days=CA_DAYS)
    assert certificate(late_identity).not_valid_after_utc == end
    assert local_identity(tmp_path, NAMES, end - timedelta(hours=1)) == late_identity


@pytest.mark.parametrize("name", ["server.key", "server.pem"])
@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_server_certificate_is_issued_again(tmp_path: Path, name: str, damage: bytes | None) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(damage)
    renewed = local_identity(tmp_path, NAMES, NOW)
    assert renewed.ca_certificate == first.ca_certificate
    verify(renewed, "localhost")


def test_a_certificate_of_another_authority_is_issued_again(tmp_path: Path) -> None:
    local_identity(tmp_path / "a", NAMES, NOW)
    local_identity(tmp_path / "b", NAMES, NOW)
    for name in ("ca.key", "ca.pem"):
        (tmp_path / "b" / name).replace(tmp_path / "a" / name)
    verify(local_identity(tmp_path / "a", NAMES, NOW), "localhost")


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("ca.key", b"", r"ca\.key: not readable as a private key without a password; restore .* from a backup"),
        ("ca.key", None, r"ca\.key: missing in the folder of ca\.pem, expected the authority's key; restore"),
        ("ca.pem", b"garbage", r"ca\.pem: damaged, or not a certificate; restore it from a backup or from a device"),
    ],
)
def test_a_damaged_authority_is_refused_and_not_replaced(
    tmp_path: Path, name: str, data: bytes | None, text: str
) -> None:
    local_identity(tmp_path, NAMES, NOW)
    if data is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Corrupted, match=text):
        local_identity(tmp_path, NAMES, NOW)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# One of the flipped bits can make the random serial number negative.
@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
def test_one_flipped_bit_anywhere_in_the_authority_is_refused_or_harmless(tmp_path: Path) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    path = tmp_path / "ca.pem"
    data = path.read_bytes()
    num_refused = 0
    for index in range(0, len(data), 3):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        try:
            identity = local_identity(tmp_path, NAMES, NOW)
        except Corrupted:
            num_refused += 1
        else:
            assert identity.certificate == first.certificate
    assert num_refused > len(data) // 6


def test_an_authority_with_the_key_of_another_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        local_identity(tmp_path / name, NAMES, NOW)
    (tmp_path / "b" / "ca.key").replace(tmp_path / "a" / "ca.key")
    with pytest.raises(Corrupted, match="FN-0681"):
        local_identity(tmp_path / "a", NAMES, NOW)


def test_a_lost_authority_certificate_is_issued_again_and_clients_can_use_the_old_one(tmp_path: Path) -> None:
    first = local_identity(tmp_path, NAMES, NOW)
    (tmp_path / "ca.pem").unlink()
    renewed = local_identity(tmp_path, (*NAMES, "new.example"), NOW)
    assert renewed.ca_certificate != first.ca_certificate
    for ca in (first.ca_certificate, renewed.ca_certificate):
        verify(ServerIdentity(key=renewed.key, certificate=renewed.certificate, ca_certificate=ca), "new.example")


@pytest.mark.parametrize("name", ["", "b\u00fccher.example", "two words", "x" * 254])
def test_a_name_that_no_certificate_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="FN-0684"):
        local_identity(tmp_path, (*NAMES, name), NOW)
    assert list(tmp_path.iterdir()) == []


def test_the_names_and_the_bytes_of_an_identity_are_synced(tmp_path: Path) -> None:
    with synced(tmp_path) as syncs:
        local_identity(tmp_path, NAMES, NOW)
    assert {path.name for path in durable_files(syncs)} == {"ca.key", "ca.pem", "server.key", "server.pem"}


def test_a_full_disk_leaves_no_partial_identity(tmp_path: Path) -> None:
    def work() -> None:
        with (
            full_disk(100),
            pytest.raises(StorageFull, match=r"ca\.key: cannot be written: the limit on file sizes is reached"),
        ):
            local_identity(tmp_path, NAMES, NOW)
        assert list(tmp_path.iterdir()) == []
        verify(local_identity(tmp_path, NAMES, NOW), "localhost")

    in_child(work)

"""``fanin device certify``: an authority that is not the operator certifies the keys of devices."""

import json
import stat
from pathlib import Path

import pytest

from fanin.clients.device.storage.cache import Cache
from fanin.commands.main import main
from fanin.edge.bundles.keys import is_signed
from fanin.edge.masking.agreement import IDENTITY_CONTEXT


def test_an_authority_certifies_devices_whose_folders_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    office = tmp_path / "office"
    office.mkdir()
    devices = [Cache(tmp_path / f"device-{index}") for index in range(2)]
    publics = [device.key().public for device in devices]
    for index in range(2):
        (office / f"{index}.pub").write_bytes((tmp_path / f"device-{index}" / "device.pub").read_bytes())
    words = [
        "device",
        "certify",
        str(office / "0.pub"),
        str(office / "1.pub"),
        "--authority",
        str(office / "authority.key"),
    ]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (office / "authority.pub").read_text().strip() == row["authority"]
    assert stat.S_IMODE((office / "authority.key").stat().st_mode) == 0o600
    assert [each["public_key"] for each in row["devices"]] == publics
    for index, device in enumerate(devices):
        (tmp_path / f"device-{index}" / "device.certificate").write_bytes(
            (office / f"{index}.certificate").read_bytes()
        )
        certificate = device.certificate()
        assert is_signed(row["authority"], certificate, IDENTITY_CONTEXT, bytes.fromhex(publics[index]))
        assert not is_signed(row["authority"], certificate, IDENTITY_CONTEXT, bytes.fromhex(publics[1 - index]))
    # Again, with the same key: the same certificates.
    before = (office / "0.certificate").read_bytes()
    assert main(words) == 0
    assert (office / "0.certificate").read_bytes() == before
    assert row["authority"] in capsys.readouterr().out


def test_a_wrong_key_certifies_nothing_and_a_private_one_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "device"
    private = Cache(folder).key().private_bytes().hex()
    (tmp_path / "good.pub").write_bytes((folder / "device.pub").read_bytes())
    (tmp_path / "bad.pub").write_text("no key")
    for wrong in (folder / "device.key", tmp_path / "bad.pub", tmp_path / "missing.pub"):
        words = [
            "device",
            "certify",
            str(tmp_path / "good.pub"),
            str(wrong),
            "--authority",
            str(tmp_path / "authority.key"),
        ]
        assert main(words) == 1
        assert wrong.name in (text := capsys.readouterr().err)
        assert private not in text
    assert not list(tmp_path.glob("*.certificate"))
    assert not (tmp_path / "authority.key").exists()


def test_the_key_of_an_authority_is_not_kept_with_a_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state" / "tls").mkdir(parents=True)
    (tmp_path / "state" / "fanin.db").touch()
    assert main(["device", "certify", "--authority", str(tmp_path / "state" / "tls" / "authority.key")]) == 1
    assert "FN-1723" in capsys.readouterr().err
    assert not list(tmp_path.rglob("authority.*"))

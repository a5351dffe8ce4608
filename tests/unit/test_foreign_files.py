"""Files of systems and tools, such as ``.DS_Store`` and ``._a.csv``, are never data and never make a folder used."""

from pathlib import Path

import pytest
from support.virtual import open_place

from fanin.datacenter.models.pretrained_folder import weights_in
from fanin.edge.files import new_folder, without_foreign
from fanin.protos.errors import Corrupted, InvalidInput
from fanin.server.folder import check_authority
from fanin.simulation import run_virtual
from fanin.simulation.data.tables import read_table


def foreign_in(folder: Path, *names: str) -> Path:
    """Put foreign files into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (".DS_Store", ".nfs0001", *names):
        (folder / name).write_bytes(b"\x00\x05\x16\x07")
    (folder / "lost+found").mkdir()
    return folder


def test_foreign_entries_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    assert without_foreign(foreign_in(tmp_path, "._a.csv").iterdir()) == (tmp_path / "a.csv",)


def test_a_folder_with_foreign_files_is_a_new_folder(tmp_path: Path) -> None:
    assert new_folder("--out", foreign_in(tmp_path)) == tmp_path
    (tmp_path / "a").touch()
    with pytest.raises(InvalidInput, match="FN-0397"):
        new_folder("--out", tmp_path)


def test_an_empty_tls_folder_may_have_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "fanin.db").touch()
    check_authority(foreign_in(tmp_path / "tls").parent)
    (tmp_path / "tls" / "server.pem").touch()
    with pytest.raises(Corrupted, match="FN-0680"):
        check_authority(tmp_path)


def test_foreign_files_prove_no_earlier_coordinator(tmp_path: Path) -> None:
    async def main() -> None:
        foreign_in(tmp_path / "state" / "tokens", "._device.token")
        foreign_in(tmp_path / "state" / "blobs" / "ab", "._blob")
        await open_place(tmp_path).runs.stop()

    run_virtual(main())


def test_foreign_tables_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "anna.csv").write_text("a,b,y\n1,2,0\n3,4,1\n")
    assert list(read_table(foreign_in(tmp_path, "._anna.csv")).ids) == ["anna", "anna"]


def test_foreign_files_are_no_weights(tmp_path: Path) -> None:
    assert weights_in(foreign_in(tmp_path, "._pytorch_model.bin", "._model.safetensors")) is None

"""The store of docs/howto/stores.md, from outside the package."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.outside import python_blocks
from support.values import PUBLISHER

from fanin.clients import Operator
from fanin.clients.operator import ref_of
from fanin.commands.evaluator import JobEvaluator
from fanin.server.evaluation.jobs import EvaluationJob
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import open_engine
from fanin.simulation import synthetic_bundle

PAGE = (ROOT / "docs/howto/stores.md").read_text()
EXAMPLE, CONTRACT, STATE, COORDINATOR, _ = python_blocks(PAGE)
USE = """
from fanin.protos.messages import Role
token = registry.new_token(Role.OPERATOR)
assert registry.has_token(token, Role.OPERATOR)
assert devices.tokens._tokens, "the registry asks another store"
"""


@pytest.mark.parametrize("program", [CONTRACT, STATE], ids=["contract", "composition"])
def test_the_example_is_shorter_than_40_lines_and_works(tmp_path: Path, program: str) -> None:
    assert len(EXAMPLE.splitlines()) < 40
    (tmp_path / "inventory_devices.py").write_text(EXAMPLE)
    code = program + (USE if "Registry" in program else "")
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(tmp_path)}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_an_example_that_breaks_the_contract_is_detected(tmp_path: Path) -> None:
    code = EXAMPLE.replace("enroll(devices, now_s, token_sha256)\n", "enroll(devices, now_s)\n")
    assert code != EXAMPLE
    (tmp_path / "inventory_devices.py").write_text(code)
    command = [sys.executable, "-c", CONTRACT]
    environment = {"PYTHONPATH": str(tmp_path)}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "AssertionError: enroll: accepts a token that is unknown" in completed.stderr


def test_a_program_serves_with_its_own_store(tmp_path: Path) -> None:
    (tmp_path / "inventory_devices.py").write_text(EXAMPLE)
    (tmp_path / "own_coordinator.py").write_text(COORDINATOR)
    command = [sys.executable, "own_coordinator.py"]
    state = tmp_path / "own-state"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as served:
        try:
            assert served.stdout is not None
            assert served.stdout.readline().startswith("serving on ")
            token = (state / "tokens" / "operator.token").read_text()
            ca, address = (state / "tls" / "ca.pem").read_bytes(), (state / "address").read_text().strip()
            with Operator.connect(address, ca, token) as operator:
                assert tuple(operator.runs()) == ()
        finally:
            served.terminate()
    assert served.returncode == 0
    # No token is in SQLite.
    devices = SqliteDevices(open_engine(state / "fanin.db", Durability.PROCESS))
    assert devices.find_token(hashlib.sha256(token.strip().encode()).hexdigest()) is None


class _Chunks:
    """Blobs whose folder is not the one of the job."""

    def __init__(self, folder: Path) -> None:
        self.opened: list[Path] = []
        self._folder = folder

    def __call__(self, folder: Path) -> FolderBlobs:
        """Open the other folder."""
        self.opened.append(folder)
        return FolderBlobs(self._folder, Durability.PROCESS)


def test_an_evaluation_reads_the_blobs_that_its_program_opens(tmp_path: Path) -> None:
    job = EvaluationJob(
        blobs=tmp_path / "blobs",
        data=tmp_path / "data.npz",
        bundle=ref_of(synthetic_bundle(tmp_path / "bundle", PUBLISHER, {"a": (1,)}).signed),
        best="loss",
    )
    chunks = _Chunks(tmp_path / "elsewhere")
    reply = JobEvaluator(chunks).reply(job)
    assert chunks.opened == [tmp_path / "blobs"]
    # The other folder has no Chunk.
    assert "chunk" in reply.problem

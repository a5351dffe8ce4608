"""The generated code agrees with the .proto files, and the wire is compatible with the last release."""

from pathlib import Path

from golden import protos
from golden.breaking import breaking_changes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(protos.GENERATED)}


def test_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    protos.generate(tmp_path)
    expected = contents(tmp_path / protos.PACKAGE)
    actual = contents(protos.INCLUDE / protos.PACKAGE)
    assert sorted(actual) == sorted(expected), "run `make protos` and commit what it wrote"
    stale = sorted(name for name in expected if actual[name] != expected[name])
    assert not stale, "run `make protos` and commit what it wrote"


def test_generated_code_imports_by_its_full_name() -> None:
    code = contents(protos.INCLUDE / protos.PACKAGE)
    assert b"from fanin.v1 import fleet_pb2 as " in code["control_pb2.py"]
    assert b"from fanin.v1 import fleet_pb2 as " in code["fleet_pb2_grpc.py"]


def test_no_released_element_has_changed_its_meaning(tmp_path: Path) -> None:
    changes = breaking_changes(protos.released(), protos.descriptor_set(tmp_path))
    assert not changes, "\n".join(("a released peer would not understand:", *changes))

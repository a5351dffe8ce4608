"""Generates the committed code of the .proto files, and the descriptor set of the last release.

    python tests/golden/protos.py             protos/fanin/v1/*_pb2*.py[i]
    python tests/golden/protos.py --release   the same, and fanin.v1.binpb in the folder of this script

``protos/`` is protoc's include root, so that generated code imports ``from fanin.v1 import fleet_pb2``.
The output depends only on the .proto files and the pinned tools. ``test_protos`` compares it byte by byte.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT: Final = Path(__file__).parents[2]
INCLUDE: Final = ROOT / "protos"
PACKAGE: Final = "fanin/v1"
RELEASED: Final = Path(__file__).with_name("fanin.v1.binpb")
GENERATED: Final = "*_pb2*.py*"


def generate(out: Path) -> None:
    """Write the generated code under ``out``, as ``out/fanin/v1/*_pb2*.py[i]``."""
    # The plugins are scripts in the folder of this Python interpreter. PATH may name others.
    plugins = [
        f"--plugin={name}={Path(sys.executable).with_name(name)}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    _protoc(*plugins, *outputs)


def descriptor_set(scratch: Path) -> FileDescriptorSet:
    """Return the descriptors of the current .proto files; protoc writes into the folder ``scratch``."""
    path = scratch / "now.binpb"
    _protoc(f"--descriptor_set_out={path}")
    return FileDescriptorSet.FromString(path.read_bytes())


def released() -> FileDescriptorSet:
    """Return the descriptors of the last release."""
    return FileDescriptorSet.FromString(RELEASED.read_bytes())


def _protoc(*options: str) -> None:
    files = sorted(str(path.relative_to(INCLUDE)) for path in (INCLUDE / PACKAGE).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={INCLUDE}", *options, *files]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"protoc: got exit status {completed.returncode}, expected 0\n{completed.stderr}")


def main() -> None:
    """Write into the source tree."""
    parser = argparse.ArgumentParser(description="Generate the code and descriptors of fanin.v1.")
    parser.add_argument("--release", action="store_true", help="also write the descriptors that releases are held to")
    release = parser.parse_args().release
    # Otherwise the files of a removed .proto would stay.
    for old in (INCLUDE / PACKAGE).glob(GENERATED):
        old.unlink()
    generate(INCLUDE)
    if release:
        _protoc(f"--descriptor_set_out={RELEASED}")


if __name__ == "__main__":
    main()

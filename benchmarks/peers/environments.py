"""The peers' environments: a venv for each, created if it is missing, with the peer and without fanin."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

PEERS: Final[Mapping[str, str]] = MappingProxyType({"flower": "flwr==1.41.*", "nvflare": "nvflare==2.9.*"})
"""The packages that pip installs. Neither depends on torch, which is not needed and whose import would count."""


def environment(name: str, folder: Path) -> Path:
    """Return the bin folder of a peer's venv, created if necessary. Raises RuntimeError if it contains torch."""
    venv = folder / f".venv-peer-{name}"
    stamp = venv / ".installed"
    if not stamp.exists():
        sys.stderr.write(f"{venv}: installing {PEERS[name]}\n")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/pip"), "install", "--quiet", PEERS[name]], check=True)
        stamp.touch()
    packages = installed(venv / "bin")
    if "torch" in packages:
        raise RuntimeError(f"{venv}: got torch {packages['torch']}, expected none; remove the folder")
    return venv / "bin"


def installed(bin_folder: Path) -> dict[str, str]:
    """Return the packages of an environment, with versions."""
    command = [str(bin_folder / "pip"), "freeze"]
    freeze = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (line.split("==") for line in freeze.splitlines() if "==" in line)
    return {name.lower(): version for name, version in pairs}

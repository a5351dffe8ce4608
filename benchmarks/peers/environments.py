"""The peers' environments: a venv each, made when it is missing, with the peer and nothing of ours."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

PEERS: Final[Mapping[str, str]] = MappingProxyType({"flower": "flwr==1.41.*", "nvflare": "nvflare==2.9.*"})
"""What pip is asked for. Neither brings torch: the work needs none, and its import would be counted."""


def environment(name: str, folder: Path) -> Path:
    """The bin folder of a peer's venv, made if need be. Raises RuntimeError if torch came with it."""
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
    """What an environment has, with versions."""
    command = [str(bin_folder / "pip"), "freeze"]
    freeze = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (line.split("==") for line in freeze.splitlines() if "==" in line)
    return {name.lower(): found for name, found in pairs}

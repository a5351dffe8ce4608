"""Packages are installed with uv or pip, as pip is configured. `make pythons` checks every version that is promised."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METADATA = {
    "pebble.py": "SIZE = 3\n",
    "pebble-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pebble\nVersion: 1.0\n",
    "pebble-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "pebble-1.0.dist-info/RECORD": "pebble.py,,\npebble-1.0.dist-info/METADATA,,\npebble-1.0.dist-info/WHEEL,,\n",
}


@pytest.mark.parametrize(
    ("arguments", "installer", "message"),
    [
        ([], "uv", ""),
        (["--progress-bar=off"], "pip", "uv could not install; pip tries it"),
    ],
    ids=["uv", "an option that uv lacks"],
)
def test_a_package_is_installed_from_the_links_of_pips_configuration(
    tmp_path: Path, arguments: list[str], installer: str, message: str
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "pebble-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in METADATA.items():
            wheel.writestr(name, text)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {tmp_path / 'nothing'}\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # An environment variable takes precedence over the file.
    variables |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": str(wheels)}

    install = [sys.executable, ".ci/install.py", environment, *arguments, "pebble"]
    outcome = subprocess.run(install, cwd=ROOT, env=variables, check=True, capture_output=True, text=True)

    assert message in outcome.stderr
    size = [environment / "bin/python", "-c", "import pebble; print(pebble.SIZE)"]
    assert subprocess.run(size, check=True, capture_output=True, text=True).stdout == "3\n"
    (record,) = environment.glob("lib/*/site-packages/pebble-1.0.dist-info/INSTALLER")
    assert record.read_text().strip() == installer


def test_a_python_that_is_not_here_is_named_as_skipped() -> None:
    command = ["make", "pythons", "PYTHONS=3.98 3.99", "PYENV=/pyenv"]
    outcome = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert outcome.stdout.splitlines() == [
        f"Python {version}: SKIPPED: no python{version} on PATH or in /pyenv; install it"
        for version in ("3.98", "3.99")
    ]


def test_every_python_of_the_classifiers_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    checked = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert promised == ["3.11", *checked[0].split()], "make test runs on 3.11, make pythons on the others"

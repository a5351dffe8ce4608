"""An external distribution: the example of a docs page, installed in a folder as by pip."""

import os
import re
import subprocess
import sys
from pathlib import Path


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python(?: title=\"[^\"\n]*\")?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def file_block(page: str, name: str) -> str:
    """Return the code of the fence whose title is the name of a file."""
    (code,) = re.findall(rf'^```python title="{re.escape(name)}"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    return str(code)


def install(folder: Path, page: str, group: str) -> None:
    """Write the distribution of a page's example to a folder."""
    ((name, value),) = re.findall(rf'^\[project.entry-points."{group}"\]\n(\w+) = "(.*)"$', page, re.MULTILINE)
    install_module(folder, (name, value), file_block(page, f"{value.split(':')[0]}.py"), group)


def install_module(folder: Path, entry: tuple[str, str], source: str, group: str) -> None:
    """Write a distribution of one module to a folder; ``entry`` is (name, object) of its entry point."""
    name, value = entry
    install_code(folder, value.split(":")[0], source, f"[{group}]\n{name} = {value}\n")


def install_code(folder: Path, module: str, source: str, entry_points: str) -> None:
    """Write a distribution of one module with any entry points to a folder."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def run(site: Path, code: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process that can import the distributions of a folder."""
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)

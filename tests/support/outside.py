"""A distribution from outside the package: the example of a docs page, installed in a folder as pip would do it."""

import re
from pathlib import Path


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def install(folder: Path, page: str, group: str) -> None:
    """Write the distribution of a page's example to a folder."""
    ((name, value),) = re.findall(rf'^\[project.entry-points."{group}"\]\n(\w+) = "(.*)"$', page, re.MULTILINE)
    install_module(folder, (name, value), python_blocks(page)[0], group)


def install_module(folder: Path, entry: tuple[str, str], source: str, group: str) -> None:
    """Write a distribution of one module to a folder; ``entry`` is (name, object) of its entry point."""
    name, value = entry
    module = value.split(":")[0]
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")

"""Five source roots, one namespace: the checks cover exactly the packages in the roots."""

import subprocess
from pathlib import Path

from house.tree import ROOT, SOURCE_ROOTS, portions, root_packages, tracked_names, tracked_pages, typed_packages

TOP_LEVEL = {
    *SOURCE_ROOTS,
    *("tests", "docs", "examples", "benchmarks", ".ci"),
    *("pyproject.toml", "Makefile", ".gitignore"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
}
"""The allowed entries at the top of the repository. A new entry is a decision, which is recorded here."""


def test_contracts_name_exactly_the_portions_on_disk() -> None:
    assert sorted(root_packages()) == sorted(portions())


def test_mypy_checks_exactly_the_portions_on_disk() -> None:
    assert sorted(typed_packages()) == sorted(portions())


def test_each_portion_is_a_typed_package() -> None:
    for name, folder in portions().items():
        assert (folder / "__init__.py").is_file(), f"{name}: got no __init__.py"
        assert (folder / "py.typed").is_file(), f"{name}: got no py.typed"


def test_a_source_root_contains_the_namespace_only() -> None:
    for root in SOURCE_ROOTS:
        assert tracked_names(ROOT / root) == {"fanin"}
        namespace = ROOT / root / "fanin"
        loose = [name for name in tracked_names(namespace) if (namespace / name).is_file()]
        # With an __init__.py, the first root on the path would hide the other four.
        assert not loose, f"{root}/fanin: got {loose}, expected packages only"


def test_a_root_contains_the_package_of_its_name() -> None:
    for root in SOURCE_ROOTS:
        assert portions()[f"fanin.{root}"].parent.parent.name == root


def test_the_top_level_has_no_other_entries() -> None:
    names = tracked_names(ROOT)
    assert names <= TOP_LEVEL, f"got {sorted(names - TOP_LEVEL)}, expected only what TOP_LEVEL names"
    assert names == TOP_LEVEL, f"got no {sorted(TOP_LEVEL - names)}"


def test_untracked_files_are_left_alone(tmp_path: Path) -> None:
    # An editor's folder, the files of an experiment and a note are in the root of many working copies.
    for name in ("kept.md", ".idea/workspace.xml", "scratch.py", "notes.md", "docs/page.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    for words in (["init", "-q"], ["add", "kept.md", "docs"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert tracked_names(tmp_path) == {"kept.md", "docs"}
    assert tracked_pages(tmp_path) == [tmp_path / "kept.md"]

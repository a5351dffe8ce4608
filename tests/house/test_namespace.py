"""Five source roots, one namespace: the checks cover exactly the packages in the roots."""

import fnmatch

from house.tree import ROOT, SOURCE_ROOTS, ignored_names, portions, root_packages, typed_packages

TOP_LEVEL = {
    *SOURCE_ROOTS,
    *("tests", "docs", "examples", "benchmarks", ".ci"),
    *("pyproject.toml", "Makefile", ".gitignore", ".git"),
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
        assert [path.name for path in (ROOT / root).iterdir()] == ["fanin"]
        loose = [path.name for path in (ROOT / root / "fanin").iterdir() if path.is_file()]
        # With an __init__.py, the first root on the path would hide the other four.
        assert not loose, f"{root}/fanin: got {loose}, expected packages only"


def test_a_root_contains_the_package_of_its_name() -> None:
    for root in SOURCE_ROOTS:
        assert portions()[f"fanin.{root}"].parent.parent.name == root


def test_the_top_level_has_no_other_entries() -> None:
    ignored = ignored_names()
    names = {path.name for path in ROOT.iterdir() if not any(fnmatch.fnmatch(path.name, each) for each in ignored)}
    assert names <= TOP_LEVEL, f"got {sorted(names - TOP_LEVEL)}, expected only what TOP_LEVEL names"
    assert names >= TOP_LEVEL - {".git", "docs", "examples", "benchmarks"}

"""``fanin study``: its file, its table, and the points that it keeps."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fanin.commands.main import main

pytestmark = pytest.mark.heavy
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "studies.md"
SMALL = (("rounds = 3", "rounds = 1"), ("seeds = [0, 1]", "seeds = [0]"), ("[0.02, 0.1]", "[0.1]"))


def files_of_the_page(folder: Path) -> str:
    """Write the files of the page, and return the study."""
    text = PAGE.read_text()
    for name, language in (("app.py", "python"), ("study.toml", "toml")):
        _, _, rest = text.partition(f'```{language} title="{name}"\n')
        content, end, _ = rest.partition("```\n")
        assert end
        (folder / name).write_text(content)
    return content


def test_the_file_of_the_page_runs_and_a_second_call_keeps_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = files_of_the_page(tmp_path)
    for before, after in (*SMALL, ("target = 0.7", "target = 1.0")):
        assert before in content
        content = content.replace(before, after)
    (tmp_path / "study.toml").write_text(content)
    assert main(["study", "study.toml", "--csv", "points.csv", "--json", "result.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "iid: FedAvg",
        "iid: FedProx",
        "skewed: FedAvg",
        "skewed: FedProx",
    ]
    assert all(line.endswith("not reached (0 of 1 seeds)") for line in lines)
    first: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert [row["rounds_to"]["rounds"] for row in first["best"]] == [[None]] * 4
    with (tmp_path / "points.csv").open() as file:
        assert [row["rounds_to"] for row in csv.DictReader(file)] == ["never"] * 4
    assert main(["study", "study.toml", "--json", "again.json", "--quiet"]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    # The duration of a point is measured, so an equal one was read from the folder.
    assert [point["seconds"] for point in again["points"]] == [point["seconds"] for point in first["points"]]


def test_a_column_that_no_metric_has_is_refused_before_the_first_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = files_of_the_page(tmp_path)
    assert "test_accuracy" in content
    (tmp_path / "study.toml").write_text(content.replace("test_accuracy", "accuracy"))
    assert main(["study", "study.toml"]) == 1
    assert "got the column 'accuracy', whose better direction is not known" in capsys.readouterr().err
    assert not list(tmp_path.glob("**/points"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("app = ", "study.toml: not TOML"),
        ('app = "a.py:app"', "study.toml: got no folder, cohort, rounds, expected them; add the keys"),
        ("cohrt = 3", "study.toml: got the keys ['cohrt'], expected only app, folder"),
        ("cohort = true", "study.toml: cohort: got True, expected int"),
        ("data = 3", "study.toml: data: got 3, expected dict"),
    ],
)
def test_a_wrong_file_is_one_error_that_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(text)
    assert main(["study", "study.toml"]) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"fanin study: {error}") and "FN-1893" in output

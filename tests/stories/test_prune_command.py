"""``fanin prune`` of a Run that has just ended: it names what is stored, what goes, and what is too young to go."""

import json
import re
from pathlib import Path

import pytest
from support.federations import PUBLISHER, SHAPES, bundle_in, plan
from support.processes import Site

from fanin.commands.care.prune import main as prune


@pytest.mark.nightly
def test_prune_names_what_is_too_young(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path)
    words = ["run", "--state", str(site.state)]

    def text(*more: str) -> str:
        assert prune([*words, *more]) == 0
        return capsys.readouterr().out

    try:
        site.serve()
        site.start_run(plan(3), bundle_in(site.folder, SHAPES), PUBLISHER)
        for index in range(3):
            site.device(index)
        site.events()
        assert "run run: no limits\n" in text() and "pass --keep-versions" in text()
        assert "nothing goes\n" in text("--keep-updates", "5") and "too young" not in text("--keep-updates", "5")
        limits = ("--keep-versions", "1", "--keep-updates", "0")
        for apply in ("", "--apply"):
            shown = text(*limits, *filter(None, [apply]))
            assert shown.startswith("run run: keep_versions = 1, keep_updates = 0\n")
            assert "stored      parameters of 4 versions, updates of 3 rounds\n" in shown
            assert re.search(f"{'removed' if apply else 'would go'} +9 updates of 3 rounds, ", shown)
            young = (
                r"too young   parameters of \d versions, .* The first may go from \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC on"
            )
            assert re.search(young, shown)
        row = json.loads(text(*limits, "--json"))
        assert row["num_stored_rounds"] == 0 and row["num_young_versions"] == 3 and row["old_enough_at"] > 0
    finally:
        site.close()

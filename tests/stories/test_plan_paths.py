"""The paths in a Plan: they are relative to its file, so that ``fanin run`` works from any folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted

PLAN = """
name = "story"
app = "model_app.py:app"
[cohort]
concurrency = 3
[training]
learning_rate = 0.1
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator without a Run."""
    host = Hosted(tmp_path / "host").start()
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    (host.folder / "publisher.key").write_text(f.PUBLISHER.private_bytes().hex())
    yield host
    host.stop()


def test_the_app_of_a_plan_is_relative_to_its_file(
    fanin: Fanin, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("project", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "project" / "model_app.py").write_text('from support.models import app_of\n\napp = app_of("mlp")\n')
    for folder in ("project", "other"):
        (tmp_path / folder / "plan.toml").write_text(PLAN)
    words = ("--state", host.state, "--key", host.folder / "publisher.key", "--set", "training.batch_size=5")
    monkeypatch.chdir(tmp_path / "other")
    loaded = fanin("run", "../project/plan.toml", *words)
    assert "training.batch_size 5, but the bundle's train graphs" in loaded.err, loaded
    missing = fanin("run", "plan.toml", *words)
    assert "no file model_app.py" in missing.err and "[FN-0702]" in missing.err, missing
    monkeypatch.chdir(tmp_path / "project")
    outcome = fanin("run", "../other/plan.toml", *words)
    assert outcome.status == 1 and 'write app = "../project/model_app.py:app" [FN-1512]' in outcome.err, outcome

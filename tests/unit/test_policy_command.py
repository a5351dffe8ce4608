"""``fanin policy``: the owner reads and sets the floor of a device."""

import json
import re
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process

from fanin.clients.device.policy.owner import POLICY_FILE, read_policy
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor, floor_keys


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def test_the_owner_sets_shows_and_removes_keys(fanin: Fanin, tmp_path: Path) -> None:
    state = ("--state", tmp_path / "device")
    outcome = fanin("policy", "set", *state, "protocol=secagg", "min_survivors=20", "clip_norm=1")
    # A folder whose name is mistyped has no device.
    assert outcome.status == 0 and f"note: no device has used {tmp_path / 'device'} yet" in outcome.err
    (tmp_path / "device" / "device.key").touch()
    assert fanin("policy", "set", *state, "protocol=secagg").err == ""
    assert outcome.out.startswith("floor  protocol secagg (owner), min_survivors 20 (owner), clip_norm 1 (owner)\n")
    assert "needs no restart" in outcome.out
    assert read_policy(tmp_path / "device") == PrivacyFloor(protocol="secagg", min_survivors=20, clip_norm=1.0)
    assert fanin("policy", "set", "min_survivors=", "mechanism='central'", *state).status == 0
    document = json.loads(fanin("policy", "show", *state, "--json").out)
    values = {"key": "protocol", "value": "secagg", "origins": ["owner"]}
    assert document["floor"][0] == values and document["file"] == str(tmp_path / "device" / POLICY_FILE)
    assert [each["key"] for each in document["floor"]] == ["protocol", "mechanism", "clip_norm"]
    assert fanin("policy", "set", *state, "protocol=", "mechanism=", "clip_norm=").status == 0
    assert read_policy(tmp_path / "device") == NO_FLOOR


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("min_survivors=2", "threat=x"), ("min_survivors: got 2", "threat: got 'x'")),
        (("min_survivors=5",), ('expected protocol = "secagg" with it',)),
        (("protcol=secagg",), ("did you mean protocol?",)),
        (("secagg",), ("expected KEY=VALUE",)),
        (("clip_norm=true",), ("clip_norm: got 'true', expected a number",)),
        (("authority=ab",), ("expected a string of 64 hexadecimal characters",)),
        ((), ("KEY=VALUE",)),
    ],
)
def test_a_wrong_change_names_each_key_and_changes_nothing(
    fanin: Fanin, tmp_path: Path, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    outcome = fanin("policy", "set", *words, "--state", tmp_path)
    assert outcome.status == 2 and outcome.err.startswith("fanin policy: ")
    assert all(text in outcome.err for text in texts), outcome.err
    assert not (tmp_path / POLICY_FILE).exists()


def test_a_policy_that_cannot_be_read_is_an_error(fanin: Fanin, tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).write_text("[privacy_floor]\nprotocol = 3")
    outcome = fanin("policy", "show", "--state", tmp_path)
    assert outcome.status == 1 and "takes part in nothing" in outcome.out
    outcome = fanin("policy", "set", "clip_norm=1", "--state", tmp_path)
    assert outcome.status == 1 and outcome.err.endswith("[FN-1701]\n")


def test_the_page_lists_each_key() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/privacy-floor.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == [key.name for key in floor_keys()]

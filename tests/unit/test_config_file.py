"""``fanin.toml``: its keys are the options of ``fanin serve``; variables override it, and the command line both."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from support.commands import Fanin, Outcome, fanin_in_process, one_line

from fanin.commands.console.terminal import typer_command
from fanin.commands.serve.command import serve
from fanin.commands.settings.keys import keys_of_command

FILE = """
[serve]
listen = "127.0.0.1:0"
state = "état"
name = ["a.example", "b.example"]
data = { test = "my data/x.npz" }
verbose = true
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line, without variables of the user."""
    for name in [name for name in os.environ if name.startswith("FANIN_SERVE_")]:
        monkeypatch.delenv(name)
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration in a folder with a space and a letter beyond ASCII in its name."""
    path = tmp_path / "⭐ dossier" / "fanin.toml"
    path.parent.mkdir()
    path.write_text(FILE, encoding="utf-8")
    return path


def shown(outcome: Outcome) -> dict[str, tuple[object, str]]:
    """Return the values of ``fanin config show --json`` with their origins."""
    assert outcome.status == 0, outcome.err
    return {key: (row["value"], row["origin"]) for key, row in json.loads(outcome.out)["values"].items()}


def test_every_option_of_serve_is_a_key_and_has_an_opposite_if_it_is_a_flag() -> None:
    command = typer_command(serve)
    keys = keys_of_command(command, "serve").values()
    options = [each for each in command.params if isinstance(each, click.Option) and each.name != "config"]
    assert [key.option for key in keys] == options
    names = {key.name for key in keys}
    without = [key.path for key in keys if key.kind is bool and not key.option.secondary_opts]
    assert [path for path in without if path.partition(".no_")[2] not in names] == []


def test_the_layers_override_each_other_and_show_has_the_origins(
    fanin: Fanin, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_SERVE_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("FANIN_SERVE_NAME", "c.example 'd.example'")
    monkeypatch.setenv("FANIN_SERVE_CONFIG", str(path))
    values = shown(fanin("config", "show", "--name", "e.example", "--no-verbose", "--json"))
    assert values["serve.listen"] == ("127.0.0.1:1", "variable FANIN_SERVE_LISTEN")
    assert values["serve.name"] == (["e.example"], "command line")
    assert values["serve.verbose"] == (False, "command line")
    assert values["serve.state"] == (str(path.parent / "état"), str(path))
    assert values["serve.data"] == ([f"test={path.parent / 'my data/x.npz'}"], str(path))
    assert values["serve.durability"] == ("host", "default")
    assert shown(fanin("config", "show", "--json"))["serve.name"][0] == ["c.example", "d.example"]


def test_the_text_of_show_is_a_file_with_the_same_effect(fanin: Fanin, path: Path) -> None:
    text = fanin("config", "show", "--config", path).out
    assert '# durability = "host"' in text
    again = path.with_name("again.toml")
    again.write_text(text, encoding="utf-8")
    first, second = (shown(fanin("config", "show", "--config", each, "--json")) for each in (path, again))
    assert {key: value for key, (value, _) in first.items()} == {key: value for key, (value, _) in second.items()}


def test_the_defaults_of_show_are_values_that_a_file_may_have(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uncommented = re.sub("^# ", "", fanin("config", "show").out, flags=re.MULTILINE)
    Path("fanin.toml").write_text(uncommented, encoding="utf-8")
    assert set(tomllib.loads(uncommented)["serve"]) >= {"state", "listen", "durability", "log_keep"}
    assert re.search(r"^# keep_days is not set +# default$", uncommented, re.MULTILINE)
    defaults, values = (
        shown(fanin("config", "show", "--json")),
        shown(fanin("config", "show", "--config", "fanin.toml", "--json")),
    )
    assert values.pop("serve.state")[0] == str(tmp_path / str(defaults.pop("serve.state")[0]))
    assert {key: value for key, (value, _) in values.items()} == {key: value for key, (value, _) in defaults.items()}


def test_the_schema_has_each_key_with_type_default_and_choices(fanin: Fanin) -> None:
    schema = json.loads(fanin("config", "schema").out)
    rows = schema["properties"]["serve"]["properties"]
    assert schema["properties"]["serve"]["additionalProperties"] is False
    assert rows["durability"]["enum"] == ["process", "host"] and rows["durability"]["default"] == "host"
    assert rows["verbose"]["type"] == "boolean" and rows["name"]["items"] == {"type": "string"}
    assert rows["data"]["additionalProperties"] == {"type": "string"}
    assert set(tomllib.loads(FILE)["serve"]) <= set(rows)


BAD = {
    "[serve]\nlistne = 'x'": ("FN-1461", "did you mean serve.listen?"),
    "[sevre]\nlisten = 'x'": ("FN-1461", "did you mean [serve]?"),
    "listen = 'x'": ("FN-1461", "serve.listen, below a line [serve]"),
    "[serve]\nlisten = 7443": ("FN-1462", "got an integer, expected a string"),
    "[serve]\nverbose = 'yes'": ("FN-1462", "got a string, expected a boolean"),
    "[serve]\nname = 'x'": ("FN-1462", "got a string, expected a list"),
    "[serve]\ndata = ['x=y']": ("FN-1462", "expected a table of paths by name"),
    "[serve]\ndurability = 'hots'": ("FN-1462", "'process', 'host'"),
    "serve = 1": ("FN-1462", "expected a table"),
    "[serve]\n[serve]": ("FN-1460", "write each table and each key once"),
    "[serve]\nlisten = 'x'\nlisten = 'y'": ("FN-1460", "write each table and each key once"),
    "[serve]\nlisten = x": ("FN-1460", "at line 2"),
    "[serve]\noperator_token = 'hunter2'": ("FN-1464", "serve.operator_token"),
    "[database]\nurl = 'postgresql://me:hunter2@host/db'": ("FN-1464", "database.url"),
    "[serve]\nname = ['-----BEGIN PRIVATE KEY-----hunter2']": ("FN-1464", "serve.name"),
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_file_is_one_error_that_names_the_key(fanin: Fanin, path: Path, text: str) -> None:
    path.write_text(text)
    outcome = fanin("serve", "--config", path)
    code, part = BAD[text]
    assert part in one_line(outcome, "serve") and code in outcome.err, outcome.err
    assert str(path) in outcome.err and "hunter2" not in outcome.err
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("FANIN_SERVE_LISTN", "x", "FN-1461"),
        ("FANIN_SERVE_VERBOSE", "perhaps", "FN-1462"),
        ("FANIN_SERVE_NAME", "'x", "FN-1462"),
        ("FANIN_SERVE_CONFIG", "/nowhere/fanin.toml", "FN-1460"),
    ],
)
def test_a_wrong_variable_is_one_error(
    fanin: Fanin, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str
) -> None:
    monkeypatch.setenv(name, value)
    outcome = fanin("serve")
    assert one_line(outcome, "serve") and code in outcome.err


def test_the_help_is_there_with_a_wrong_file(fanin: Fanin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_SERVE_CONFIG", "/nowhere/fanin.toml")
    assert "--durability" in fanin("serve", "--help").out


def test_a_key_and_its_opposite_contradict_in_one_layer_and_override_in_another() -> None:
    from fanin.commands.settings.layers import configured
    from fanin.protos.errors import InvalidInput

    options = [click.Option(["--web"], default="127.0.0.1:7480"), click.Option(["--no-web"], is_flag=True)]
    command = click.Command("serve", params=[*options, click.Option(["--config"])])
    file = Path("fanin.toml")
    for text, words, expected in (
        ("web = 'x'\nno_web = true", [], None),
        ("no_web = true", ["--web", "y"], {}),
        ("web = 'x'", ["--no-web"], {}),
        ("web = 'x'\nno_web = false", [], {"web": "x", "no_web": False}),
    ):
        file.write_text(f"[serve]\n{text}")
        line = ["--config", str(file), *words]
        if expected is None:
            with pytest.raises(InvalidInput) as error:
                configured(command, line)
            assert error.value.code == "FN-1463"
        else:
            assert configured(command, line).defaults == expected


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the checkout."""
    folder = tmp_path / "working directory"
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_a_coordinator_serves_as_its_file_says(path: Path) -> None:
    (path.parent / "my data").mkdir()
    (path.parent / "my data" / "x.npz").write_bytes(b"")
    command = [sys.executable, "-m", "fanin.commands.main", "serve", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        text = ""
        while "token for operators" not in text:
            text += next(lines)
        process.terminate()
        text += process.stdout.read()
    assert process.returncode == 0, text
    assert str(path.parent / "état") in text and "DEBUG" in text

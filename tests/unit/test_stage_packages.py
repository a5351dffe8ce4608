"""Wrong stages of other packages: the Run does not start, and one sentence names the stage."""

import sys
from pathlib import Path

import pytest
from support.errors import raises

from fanin.edge.codecs.scaffold import Scaffold
from fanin.edge.codecs.stages import stages_of
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan

CODE = """
class Plain:
    tensors = ("state",)

    def apply(self, vector, state, context):
        return state


class Text(Plain):
    tensors = "residual"


class Twice(Plain):
    tensors = ("a", "a")


class Spaced(Plain):
    tensors = ["a b"]


class Number(Plain):
    tensors = (1,)


class Failing(Plain):
    @property
    def tensors(self):
        raise KeyError("tensors")


class Grouped(Plain):
    groups = ("control",)

    def prepare(self, state, downlink):
        return {}

    def advance(self, auxiliary, aggregate, num_updates):
        return auxiliary


right = lambda options: Plain()
number = 5
raising = lambda options: options["nope"]
missing = lambda options: open("/srv/secret/weights")
nothing = lambda options: None
cls = lambda options: Plain
text = lambda options: Text()
twice = lambda options: Twice()
spaced = lambda options: Spaced()
numbers = lambda options: Number()
failing = lambda options: Failing()
grouped = lambda options: Grouped()
"""
NAMES = "expected a tuple of different names"
STAGE = "expected an object with the members of Stage"
WRONG = {
    "number": "got int as its entry point, expected a function of the options",
    "raising": "its package raised KeyError: 'nope'",
    "missing": "its package raised FileNotFoundError: No such file or directory",
    "nothing": f"got NoneType, {STAGE}",
    "cls": f"got the class Plain, {STAGE}",
    "text": f"tensors: got 'residual', {NAMES}",
    "twice": f"tensors: got ('a', 'a'), {NAMES}",
    "spaced": f"tensors: got ['a b'], {NAMES}",
    "numbers": f"tensors: got (1,), {NAMES}",
    "failing": "its package raised KeyError: 'tensors'",
    "grouped": "groups: got ('control',), expected a tuple of Group",
}


@pytest.fixture
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_stages.py").write_text(CODE)
    info = tmp_path / "wrong_stages-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong_stages\nVersion: 1.0\n")
    lines = (f"{name} = wrong_stages:{name}\n" for name in ("right", *WRONG))
    (info / "entry_points.txt").write_text(f"[fanin.stages]\n{''.join(lines)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong_stages", raising=False)


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize(("name", "text"), WRONG.items())
def test_a_wrong_stage_of_a_package_is_named(name: str, text: str) -> None:
    assert list(stages_of([m.StageSpec(name="right")])) == ["right"]
    with raises(InvalidPlan, f"plan: stages: {name}: {text}; correct that package"):
        stages_of([m.StageSpec(name=name)])


def test_the_options_of_a_stage_are_named() -> None:
    with raises(
        InvalidPlan,
        "plan: stages: scaffold: got the options ['devices'], expected ['num_devices']; add num_devices and remove "
        "devices",
    ):
        Scaffold.of({"devices": 1.0})

"""Wrong stages of other packages: the Run does not start, and one sentence names the stage."""

import sys
from pathlib import Path

import pytest
from support.errors import raises

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


right = lambda: Plain()
number = 5
raising = lambda: {}["nope"]
missing = lambda: open("/srv/secret/weights")
nothing = lambda: None
cls = lambda: Plain
text = lambda: Text()
twice = lambda: Twice()
spaced = lambda: Spaced()
numbers = lambda: Number()
failing = lambda: Failing()
grouped = lambda: Grouped()
"""
NAMES = "expected a tuple of different names"
STAGE = "expected an object with the members of Stage"
WRONG = {
    "number": " is no function",
    "raising": " raised KeyError: 'nope'",
    "missing": " raised FileNotFoundError: No such file or directory",
    "nothing": f"got NoneType, {STAGE}",
    "cls": f"got the class Plain, {STAGE}",
    "text": f"tensors: got 'residual', {NAMES}",
    "twice": f"tensors: got ('a', 'a'), {NAMES}",
    "spaced": f"tensors: got ['a b'], {NAMES}",
    "numbers": f"tensors: got (1,), {NAMES}",
    "failing": " raised KeyError: 'tensors'",
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
    subject = repr(name) if text.startswith(" ") else f"{name}: "
    with raises(InvalidPlan, f"plan: stages: {subject}{text}; correct it"):
        stages_of([m.StageSpec(name=name)])

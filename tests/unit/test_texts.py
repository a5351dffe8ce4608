"""Parts of sentences: a number with its noun."""

import pytest

from fanin.protos.texts import counted


@pytest.mark.parametrize(("num", "text"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds")])
def test_a_number_has_its_noun(num: int, text: str) -> None:
    assert counted(num, "round") == text


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [counted(num, "class", "classes") for num in (1, 10)] == ["1 class", "10 classes"]

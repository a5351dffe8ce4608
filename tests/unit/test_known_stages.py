"""The stages that a device announces: fanin's own first, and a warning if some are left out."""

import logging

import pytest
from support.errors import raises

from fanin.edge.codecs.known import announced
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput

OURS = ("error_feedback", "scaffold")
THEIRS = tuple(f"a{number:03}" for number in range(80))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_device_announces_up_to_64_stages_ours_first(caplog: pytest.LogCaptureFixture) -> None:
    assert announced("stages", OURS, reversed(THEIRS[:62]), m.MAX_KNOWN_STAGES) == (*OURS, *THEIRS[:62])
    assert warnings(caplog) == []


def test_stages_beyond_the_limit_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert announced("stages", OURS, THEIRS, m.MAX_KNOWN_STAGES) == (*OURS, *THEIRS[:62])
    (warning,) = warnings(caplog)
    assert warning == (
        "stages: got 82 installed stages, expected at most 64; 18 are not announced to the coordinator, from 'a062' "
        "on; uninstall stages that no run needs"
    )


def test_a_check_in_may_have_64_stages() -> None:
    def capabilities(count: int) -> m.Capabilities:
        return m.Capabilities(codecs=(), runtimes=(), graph_formats=(), stages=(*OURS, *THEIRS)[:count])

    assert len(capabilities(64).stages) == 64
    with raises(InvalidInput, "capabilities: got 65 stages, expected at most 64"):
        capabilities(65)

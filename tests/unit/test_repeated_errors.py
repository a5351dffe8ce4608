"""A device's error that recurs at each attempt: one log line each, and a single traceback."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from support.scripted import Script, run, scripted_coordinator

from fanin.protos import messages as m


@dataclass
class Stubborn(Script):
    """A coordinator whose check-in fails three times with the same error."""

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        self.faults = {"check_in": RuntimeError("boom")} if self.calls["check_in"] < 3 else {}
        return super().check_in(check_in)


def test_the_traceback_of_an_error_that_comes_back_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = scripted_coordinator(tmp_path)
    stubborn = Stubborn(bundle=script.bundle, work=script.work)
    assert run(stubborn, tmp_path).num_accepted == 1
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count("checkin: unexpected error: RuntimeError: boom") == 3

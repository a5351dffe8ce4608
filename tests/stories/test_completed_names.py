"""A shell completes the names of Runs and devices of a coordinator on this machine."""

from pathlib import Path

import pytest
from support.federations import PUBLISHER, SHAPES, bundle_in, plan
from support.processes import Site

from fanin.commands.main import main


@pytest.mark.nightly
def test_runs_and_devices_are_named_while_the_coordinator_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(kind: str) -> list[str]:
        assert main(["completion", kind, "--state", str(site.state)]) == 0
        return capsys.readouterr().out.split()

    site = Site(tmp_path)
    try:
        coordinator = site.serve()
        site.start_run(plan(1), bundle_in(tmp_path, SHAPES), PUBLISHER)
        for index in range(3):
            site.device(index)
        site.events()
        assert names("runs") == ["run"]
        assert len(names("devices")) == 3
        coordinator.kill()
        assert names("runs") == names("devices") == []
    finally:
        site.close()

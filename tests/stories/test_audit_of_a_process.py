"""The audit log of a coordinator in a process of its own, over a kill and a stop."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process
from support.peers import Peer
from support.processes import Running, Site

from fanin.edge.codecs.fixed import CODECS
from fanin.protos import messages as m

HEAD = re.compile(r"audit log: (\d+) entries, head ([0-9a-f]{64}); keep it elsewhere")


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose processes are killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


def last_head(running: Running) -> str:
    return HEAD.findall(running.text())[-1][1]


@pytest.mark.nightly
def test_a_kill_loses_no_entry_and_the_heads_of_the_log_verify(site: Site, fanin: Fanin, tmp_path: Path) -> None:
    running = site.serve()
    bundle = f.bundle_in(tmp_path)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    peer = Peer(site, bundle, 0, tmp_path / "device")
    peer.begin()
    first = last_head(running)
    running.kill()
    # At rest, after a kill.
    assert fanin("audit", "verify", "--state", site.state, "--head", first).status == 0
    running = site.serve()
    second = last_head(running)
    capabilities = m.Capabilities(codecs=tuple(CODECS), runtimes=("synthetic 2",), graph_formats=("onnx",))
    with peer.transport() as transport:
        transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.0))
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(20.0) == 0
    third = last_head(running)
    assert len({first, second, third}) == 3
    for head in (first, second, third):
        outcome = fanin("audit", "verify", "--state", site.state, "--head", head)
        assert outcome.status == 0, outcome
    report = json.loads(fanin("audit", "verify", "--state", site.state, "--json").out)
    assert (report["verified"], report["head"]) == (True, third)
    running = site.serve()
    words = ("--state", site.state, "--json")
    calls = [row["call"] for row in json.loads(fanin("audit", "list", *words).out)["entries"]]
    # Two tokens, then a start. The kill has no entry, the stop has one.
    assert calls[:3] == ["CreateToken", "CreateToken", "Start"]
    assert (calls.count("Start"), calls.count("Stop"), calls.count("Enroll")) == (3, 1, 1)
    # The stop recorded what was noticed of the device.
    info = json.loads(fanin("device", "show", peer.device_id, *words).out)
    assert info["runtimes"] == ["synthetic 2"]

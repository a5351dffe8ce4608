"""``fanin stats`` over devices in processes of their own: exact numbers, a killed coordinator, masks and refusals."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process
from support.processes import Site, start
from support.queries import Fleet, plain

from fanin.clients.device.policy.ledger import RunPrivacy, read_ledger
from fanin.clients.device.policy.owner import write_policy
from fanin.clients.statistics import plan_of, read_statistics, start_statistics
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.floors.floor import PrivacyFloor
from fanin.edge.queries import StatisticsQuery, read_query
from fanin.protos.messages import RunState, VersionPublished

WAIT_S = 120.0
PUBLISHER = SigningKey(bytes(range(32)))
QUERY = """
min_devices = {k}

[[features]]
input = "x"
by = "column"
names = ["height", "weight"]
low = 0
high = 200
step = 0.5
bins = 8
quantiles = [0.25, 0.5, 0.9]

[[features]]
input = "y"
classes = 4
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Subcommands in this process."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator's folder whose processes end with the test."""
    site = Site(tmp_path)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    yield site
    site.close()


def fleet_of(num_devices: int, num_examples: int = 400) -> Fleet:
    """Return the examples of devices. The last class is on two devices alone."""
    rng = np.random.default_rng(7)
    return [
        {
            "x": rng.integers((120, 200), (200, 260), (num_examples + 3 * device, 2)).astype(np.float32) / 2,
            "y": rng.integers(0, 4 if device < 2 else 3, num_examples + 3 * device).astype(np.int32),
        }
        for device in range(num_devices)
    ]


def join(site: Site, fleet: Fleet, first: int = 0, floors: Sequence[PrivacyFloor] = ()) -> None:
    """Start a process of ``fanin join`` for each device, from number ``first`` on."""
    token = site.state / "tokens" / "device.token"
    for index, examples in enumerate(fleet, first):
        data, folder = site.folder / f"{index}.npz", site.folder / f"device-{index}"
        np.savez(data, **examples)
        if floors:
            write_policy(folder, floors[index - first])
        options = ["--ca", site.state / "tls" / "ca.pem", "--token-file", token, "--state", folder, "--data", data]
        command = ["join", "--server", site.listen, "--publisher", site.folder / "publisher.pub", *options]
        running = start(["-m", "fanin.commands.main", *map(str, command)], site.folder / f"device-{index}.log")
        site.started.append(running)


def await_refusal(folder: Path) -> str:
    """Wait until a device has refused an Assignment, and return why."""
    until = time.monotonic() + WAIT_S
    while not (refusal := read_ledger(folder).runs.get("run", RunPrivacy()).refusal):
        assert time.monotonic() < until, f"{folder.name} has refused nothing"
        time.sleep(0.1)
    return refusal


def check(query: StatisticsQuery, features: Sequence[dict[str, object]], fleet: Fleet) -> None:
    """Compare the statistics of a command with plain numbers of all examples, and quantiles with numpy's."""
    rows = [(group, number) for group in query.groups for number in range(len(group.names))]
    for feature, (group, number) in zip(features, rows, strict=True):
        columns = [
            each[group.input].reshape(len(each[group.input]), -1)[:, number].astype(np.float64) for each in fleet
        ]
        expected = plain(group, columns, query.min_devices)
        expected["histogram"] = list(expected["histogram"])  # type: ignore[call-overload]  # a tuple
        assert {name: feature[name] for name in expected} == expected
        exact = np.quantile(np.concatenate(columns), group.quantiles, method="inverted_cdf").tolist()
        quantiles = feature["quantiles"]
        assert isinstance(quantiles, list)
        assert [(each["low"], each["high"]) for each in quantiles] == [(value, value) for value in exact]


@pytest.mark.nightly
def test_twenty_devices_equal_the_plain_numbers_over_a_killed_coordinator(
    site: Site, fanin: Fanin, tmp_path: Path
) -> None:
    fleet = fleet_of(20)
    (tmp_path / "query.toml").write_text(QUERY.format(k=5))
    query = read_query(tmp_path / "query.toml", 20)
    coordinator = site.serve(kill_at="before:Fold:2")
    with site.operator() as operator:
        start_statistics(operator, "run", query, plan_of(query), PUBLISHER)
    join(site, fleet)
    assert coordinator.wait(240.0) == -9, coordinator.text()
    site.serve()
    events = [entry.event for entry in site.events()]
    assert sum(isinstance(event, VersionPublished) for event in events) == query.num_versions == 3
    shown = fanin("stats", "--run-id", "run", "--state", site.state, "--json")
    assert shown.status == 0, shown.err
    check(query, json.loads(shown.out)["features"], fleet)
    y = json.loads(shown.out)["features"][2]
    assert None in y["histogram"]
    verified = fanin("verify", "run", "--state", site.state)
    assert verified.status == 0, verified.out + verified.err


@pytest.mark.nightly
def test_the_command_asks_under_masks_and_owners_see_and_refuse(site: Site, fanin: Fanin, tmp_path: Path) -> None:
    fleet = fleet_of(6)
    (tmp_path / "query.toml").write_text(QUERY.format(k=2))
    site.serve()
    refusing = [PrivacyFloor(statistics="refuse"), PrivacyFloor(min_cell_devices=3)]
    query = read_query(tmp_path / "query.toml", 4)
    with site.operator() as operator:
        plan = plan_of(query, ["round.protocol=secagg", "cohort.deadline_s=60.0"])
        start_statistics(operator, "run", query, plan, PUBLISHER)
        join(site, fleet[4:], 4, refusing)
        assert "got statistics of the examples" in await_refusal(tmp_path / "device-4")
        assert "got cells of 2 devices, expected at least 3" in await_refusal(tmp_path / "device-5")
        join(site, fleet[:4])
        for _ in operator.watch("run"):
            pass
        assert operator.run("run").state is RunState.FINISHED
        result = read_statistics(operator, "run", PUBLISHER.public)
    check(query, json.loads(json.dumps(result.row()))["features"], fleet[:4])
    assert fanin("verify", "run", "--state", site.state).status == 0
    assert result.version == query.num_versions
    asked = fanin("status", "--state", tmp_path / "device-0").out
    assert "asks for statistics of the examples: 2 of x (column)" in asked

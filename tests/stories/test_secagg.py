"""Secure aggregation over TLS: a coordinator and devices in processes of their own, which are killed."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Site
from support.secagg import UPLOAD, outcome

from fanin.clients.device.policy.owner import write_policy
from fanin.clients.device.storage.cache import Cache
from fanin.commands.administration.device import main as device_main
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.floors.floor import PrivacyFloor
from fanin.protos.messages import CodecSpec, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, RoundPlan, StopPlan
from fanin.simulation import synthetic_bundle

NOBODY: Mapping[int, str] = {}
PUBLISHER = SigningKey(bytes(range(32)))
NUM_DEVICES = 3
KILLS = {
    "advertising": "before:Freeze:1",
    "after the keys": "after:Freeze:1",
    "sharing": "before:Freeze:2",
    "after the shares": "after:Freeze:2",
    "training": "before:Accumulate:2",
    "closing": "before:Close:1",
    "after the closed set": "after:Close:1",
    "unmasking": "before:Freeze:3",
    "folding": "before:Fold:1",
    "after the fold": "after:Fold:1",
    "publishing": "before:Publish:1",
}
SHAPES = {"a": (60, 10), "b": (3,)}
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="int8", max_shift=0),
    aggregation=AggregationPlan(max_examples=4096),
    stop=StopPlan(max_rounds=1),
    round=RoundPlan(protocol="secagg"),
)


@pytest.fixture
def new_site(tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    """A function that creates sites."""
    sites: list[Site] = []

    def create(name: str) -> Site:
        site = Site(tmp_path / name)
        site.folder.mkdir()
        sites.append(site)
        return site

    yield create
    for site in sites:
        site.close()


def digests(site: Site) -> list[str]:
    """Check the Run with ``fanin verify``, and return the digests of its Versions."""
    events = [entry.event for entry in site.events()]
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [event.version_sha256 for event in events if isinstance(event, VersionPublished)]


def federate(site: Site, plan: Plan, kill_at: str = "", dies: Mapping[int, str] = NOBODY) -> list[str]:
    """Run the Rounds of a Plan, and return the digests of their Versions.

    Args:
        site: The folders and processes.
        plan: The Plan.
        kill_at: The effect at which the coordinator is killed.
        dies: The moments at which devices are killed, by index.
    """
    coordinator = site.serve(kill_at=kill_at)
    site.start_run(plan, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)
    for index in range(plan.cohort.concurrency):
        site.device(index, die_at=dies.get(index, ""))
    if kill_at:
        assert coordinator.wait(60.0) == -9, coordinator.text()
        site.serve()
    return digests(site)


def test_devices_with_masks_publish_the_bits_of_the_plain_sum(new_site: Callable[[str], Site], tmp_path: Path) -> None:
    masked = federate(new_site("masked"), PLAN)
    # In one process on a virtual clock: the trainers draw the same Updates.
    plain = outcome(replace(PLAN, round=RoundPlan()), tmp_path / "plain", shapes=SHAPES)
    assert (len(masked), tuple(masked)) == (1, plain.versions)


def lossy(protocol: str) -> Plan:
    """Return a Plan of five devices, two of which may drop out. A phase waits a second for them."""
    cohort = CohortPlan(
        concurrency=5, buffer=5, quorum=3, deadline_s=120.0, min_report_s=1.0, report_factor=2.0, max_extension_s=0.0
    )
    options = {"dropout_fraction": 0.4} if protocol == "secagg" else {}
    return replace(PLAN, cohort=cohort, round=RoundPlan(protocol=protocol, options=options))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["phase:sharing", "phase:upload", "phase:training", "phase:unmasking"])
def test_two_killed_devices_leave_the_bits_of_the_plain_sum(
    new_site: Callable[[str], Site], tmp_path: Path, moment: str
) -> None:
    """Killed after they advertised keys, after they shared and masked, after the upload, and before they unmask."""
    masked = federate(new_site("masked"), lossy("secagg"), dies={1: moment, 3: moment})
    absent = {1: {"gone_at": UPLOAD}, 3: {"gone_at": UPLOAD}} if moment in ("phase:sharing", "phase:upload") else {}
    assert tuple(masked) == outcome(lossy("plain"), tmp_path / "plain", absent, SHAPES).versions


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["phase:sharing", "phase:upload", "phase:training", "phase:unmasking"])
def test_a_device_that_is_killed_and_started_again_completes_the_round(
    new_site: Callable[[str], Site], tmp_path: Path, moment: str
) -> None:
    """The Round needs each device. The journal on its disk has the secrets and the messages that it sent."""
    site = new_site("killed")
    site.serve()
    site.start_run(PLAN, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)
    device = site.device(0, die_at=moment)
    for index in range(1, NUM_DEVICES):
        site.device(index)
    assert device.wait(60.0) == -9, device.text()
    site.device(0)
    plain = outcome(replace(PLAN, round=RoundPlan()), tmp_path / "plain", shapes=SHAPES)
    assert tuple(digests(site)) == plain.versions


@pytest.mark.nightly
def test_devices_certified_by_an_authority_confirm_the_survivors(
    new_site: Callable[[str], Site], tmp_path: Path
) -> None:
    """The floor of each device demands the threat ``active``. Its owner installed the authority and the certificate.

    The authority has a folder of its own, and never sees a folder of a device or of the coordinator.
    """
    site, office = new_site("active"), tmp_path / "office"
    office.mkdir()
    folders = [site.folder / f"device-{index}" for index in range(NUM_DEVICES)]
    for index, folder in enumerate(folders):
        Cache(folder).key()
        shutil.copy(folder / "device.pub", office / f"{index}.pub")
    keys = [str(office / f"{index}.pub") for index in range(NUM_DEVICES)]
    assert device_main(["certify", *keys, "--authority", str(office / "authority.key")]) == 0
    authority = (office / "authority.pub").read_text().strip()
    for index, folder in enumerate(folders):
        shutil.copy(office / f"{index}.certificate", folder / "device.certificate")
        write_policy(folder, PrivacyFloor(protocol="secagg", threat="active", authority=authority))
    options = {"threat": "active", "authority": authority}
    masked = federate(site, replace(PLAN, round=RoundPlan(protocol="secagg", options=options)))
    plain = outcome(replace(PLAN, round=RoundPlan()), tmp_path / "plain", shapes=SHAPES)
    assert (len(masked), tuple(masked)) == (1, plain.versions)


@pytest.mark.nightly
@pytest.mark.parametrize("phase", KILLS)
def test_a_coordinator_killed_in_each_phase_publishes_the_same_bits(
    new_site: Callable[[str], Site], tmp_path: Path, phase: str
) -> None:
    plain = outcome(replace(PLAN, round=RoundPlan()), tmp_path / "plain", shapes=SHAPES)
    assert tuple(federate(new_site("killed"), PLAN, KILLS[phase])) == plain.versions

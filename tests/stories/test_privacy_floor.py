"""Devices with a privacy floor over TLS: each process refuses a Run that promises less, and the others go on."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Site

from fanin.clients.device.policy.ledger import PrivacyRecord, read_ledger
from fanin.clients.device.policy.owner import write_policy
from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.protos.messages import CodecSpec, RoundClosed, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, PrivacyPlan, RoundPlan, StopPlan
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
SHAPES = {"a": (60, 10), "b": (3,)}
WAIT_S = 60.0
PLAIN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=2, buffer=1, quorum=1, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(max_examples=4096),
    stop=StopPlan(max_rounds=1),
)
PRIVATE = replace(
    PLAIN,
    aggregation=AggregationPlan(max_examples=1),
    privacy=PrivacyPlan(
        mechanism="central",
        clip_norm=0.5,
        noise_multiplier=1.25,
        epsilon=50.0,
        delta=1e-6,
        population="phones",
        population_size=1000,
    ),
)
MASKED = replace(
    PLAIN,
    cohort=replace(PLAIN.cohort, concurrency=3, buffer=3, quorum=3),
    round=RoundPlan(protocol="secagg"),
)
MASKS = PrivacyFloor(protocol="secagg")
NOISE = PrivacyFloor(mechanism="central", clip_norm=0.5, noise_multiplier=1.25)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator that serves."""
    site = Site(tmp_path)
    site.serve()
    yield site
    site.close()


def bundle_of(site: Site, floor: PrivacyFloor = NO_FLOOR) -> Bundle:
    """Return a Bundle whose publisher states a floor."""
    plain = synthetic_bundle(site.folder / "plain", PUBLISHER, SHAPES)
    artifacts = {name: plain.artifact(name) for name in plain.manifest.artifacts}
    manifest = dump_manifest(replace(plain.manifest, privacy_floor=floor))
    write_bundle(site.folder / "bundle", manifest, artifacts, PUBLISHER)
    return open_folder(site.folder / "bundle", trusted=[PUBLISHER.public])


def folder_of(site: Site, index: int) -> Path:
    """Return the folder of a device."""
    return site.folder / f"device-{index}"


def await_refusal(site: Site) -> str:
    """Return the reason of the refusal by policy that the operator sees."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with site.operator() as operator:
            failures = {each.code: each for each in operator.describe("run").live.failures}
        if "FN-1700" in failures:
            return failures["FN-1700"].newest
        time.sleep(0.05)
    raise AssertionError("no device refused the run")


def check_stayed_out(site: Site, index: int) -> PrivacyRecord:
    """Check that nothing of a Run is on a device, and return its ledger."""
    folder = folder_of(site, index)
    assert not list((folder / "chunks").iterdir()) and not list((folder / "updates").iterdir())
    ledger = read_ledger(folder)
    assert ledger.runs["run"].num_refused >= 1 and ledger.total.num_rounds == 0
    return ledger


def check_others_publish(site: Site, num_others: int) -> None:
    """Start other devices, and check that the Round has their Updates alone."""
    for index in range(1, 1 + num_others):
        site.device(index)
    (closed,) = [entry.event for entry in site.events() if isinstance(entry.event, RoundClosed)]
    assert closed.num_accepted == len(closed.accepted) <= num_others


def test_a_device_with_a_floor_of_masks_refuses_a_plain_run_and_harms_no_other_device(site: Site) -> None:
    site.start_run(PLAIN, bundle_of(site), PUBLISHER)
    write_policy(folder_of(site, 0), MASKS)
    site.device(0)
    reason = await_refusal(site)
    assert "privacy floor of the device's owner: got round protocol plain, expected secagg" in reason
    check_others_publish(site, 1)
    assert check_stayed_out(site, 0).runs["run"].refusal in reason
    sent = read_ledger(folder_of(site, 1)).runs["run"]
    assert (sent.num_rounds, sent.num_bare, sent.epsilon) == (1, 1, None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plan", "floor", "fault"),
    [
        (PLAIN, NOISE, "no differential privacy, expected mechanism central, clip_norm 0.5, noise_multiplier 1.25"),
        (PRIVATE, replace(NOISE, clip_norm=0.25), "clip norm 0.5, expected at most 0.25"),
        (PRIVATE, replace(NOISE, noise_multiplier=2.0), "noise multiplier 1.25, expected at least 2"),
        (PRIVATE, replace(NOISE, mechanism="distributed"), "mechanism 'central', expected distributed"),
        (MASKED, replace(MASKS, min_survivors=4), "survivors 3, expected at least 4"),
        (MASKED, replace(MASKS, threat="semi-malicious"), "threat model curious, expected at least semi-malicious"),
    ],
)
def test_a_device_refuses_less_than_its_floor_and_the_others_publish(
    site: Site, plan: Plan, floor: PrivacyFloor, fault: str
) -> None:
    site.start_run(plan, bundle_of(site), PUBLISHER)
    write_policy(folder_of(site, 0), floor)
    site.device(0)
    assert fault in await_refusal(site)
    check_others_publish(site, plan.cohort.quorum)
    check_stayed_out(site, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(("plan", "floor"), [(PRIVATE, NOISE), (MASKED, MASKS)], ids=["noise", "masks"])
def test_devices_whose_floor_is_satisfied_take_part(site: Site, plan: Plan, floor: PrivacyFloor) -> None:
    site.start_run(plan, bundle_of(site, floor), PUBLISHER)
    for index in range(plan.cohort.concurrency):
        write_policy(folder_of(site, index), floor)
        site.device(index)
    (closed,) = [entry.event for entry in site.events() if isinstance(entry.event, RoundClosed)]
    assert closed.num_accepted >= plan.cohort.quorum
    entries = [read_ledger(folder_of(site, index)).runs.get("run") for index in range(plan.cohort.concurrency)]
    sent = [each for each in entries if each is not None and each.num_rounds]
    assert len(sent) >= plan.cohort.quorum
    for each in sent:
        assert (each.num_bare == 0, each.epsilon is not None) == (plan is PRIVATE, plan is PRIVATE)

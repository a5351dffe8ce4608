"""Each pair of algorithms is refused when its Run starts, or runs over gRPC, is killed, and is verified.

docs/reference/algorithms.md lists the pairs. The coordinator and seven devices of ``fanin join`` are processes. The
coordinator is killed while a Round of each Run is open.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.combinations import (
    NUM_DEVICES,
    NUM_ROUNDS,
    Needs,
    Part,
    bundles_in,
    examples_of,
    needs_of,
    pairs,
    plan_of,
    refusals,
)
from support.joining import Device
from support.processes import Running, Site
from support.virtual import PUBLISHER

from fanin.edge.bundles.bundle import Bundle
from fanin.protos.messages import RunState
from fanin.protos.plans import Plan
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive

LIMIT_S: Final = 600.0
BATCH: Final = 24
"""Runs at once. Those with masks are alone: all devices of a masked Round wait for one another."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[Needs, Bundle]:
    return bundles_in(tmp_path_factory.mktemp("apps"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def batches(folder: Path, bundles: dict[Needs, Bundle]) -> list[list[tuple[Part, Part]]]:
    """Return the pairs that are not refused, by the Runs that are open at once."""
    refused = refusals(folder, bundles)
    tried = [pair for pair in pairs() if (pair[0].name, pair[1].name) not in refused]
    masked = [pair for pair in tried if any(part.is_masked for part in pair)]
    plain = [pair for pair in tried if pair not in masked]
    return [plain[at : at + BATCH] for at in range(0, len(plain), BATCH)] + [[pair] for pair in masked]


def plan_in(name: str, pair: tuple[Part, Part]) -> Plan:
    """Return the Plan of a pair. Each Run with privacy has a population, and so a budget, of its own."""
    plan = plan_of(*pair)
    return replace(plan, privacy=replace(plan.privacy, population=name)) if plan.privacy else plan


def join(site: Site, stack: ExitStack) -> None:
    """Start the devices."""
    for index in range(NUM_DEVICES):
        folder = site.folder / f"device-{index}"
        folder.mkdir()
        (folder / "ca.pem").write_bytes(site.ca)
        (folder / "token").write_text(site.device_token)
        (folder / "token").chmod(0o600)
        (folder / "publisher.pub").write_text(PUBLISHER.public)
        np.savez(folder / "data.npz", **examples_of(index))
        stack.enter_context(Device(folder).joining(site.address))


def rest(site: Site, coordinator: Running, names: dict[str, tuple[Part, Part]]) -> list[str]:
    """Wait until Runs rest. Return those that did not finish, or whose Versions do not verify."""
    until = time.monotonic() + LIMIT_S
    with site.operator() as operator:
        while running := operator.runs((RunState.RUNNING,)):
            assert time.monotonic() < until, (running, coordinator.text())
            time.sleep(0.1)
        infos = {name: operator.run(name) for name in names}
    archive, failures = open_archive(site.state), []
    for name, (first, second) in names.items():
        verdicts = list(verify_run(archive, name))
        problems = [verdict.problem for verdict in verdicts if verdict.problem]
        if infos[name].state is not RunState.FINISHED or len(verdicts) != NUM_ROUNDS + 1 or problems:
            failures.append(f"{first.name} with {second.name}: {infos[name]}, {problems}")
    return failures


@pytest.mark.nightly
def test_each_pair_is_verified_after_a_kill_in_an_open_round(
    site: Site, bundles: dict[Needs, Bundle], tmp_path_factory: pytest.TempPathFactory
) -> None:
    coordinator = site.serve()
    with site.operator() as operator:
        for bundle in bundles.values():
            operator.publish_bundle(bundle)
    failures: list[str] = []
    with ExitStack() as stack:
        join(site, stack)
        for number, batch in enumerate(batches(tmp_path_factory.mktemp("refused"), bundles)):
            names = {f"run-{number}-{index}": pair for index, pair in enumerate(batch)}
            with site.operator() as operator:
                for name, pair in names.items():
                    operator.start_run(name, plan_in(name, pair), bundles[needs_of(*pair)], PUBLISHER)
            coordinator.kill()
            coordinator = site.serve()
            failures += rest(site, coordinator, names)
    assert not failures, "\n".join(failures)

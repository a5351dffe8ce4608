"""The terms of a masked Round hold what its Assignments have in common: nobody trains otherwise without a trace."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.secagg import device_of, plan_of
from support.values import assignment
from support.virtual import bundle_in, open_place, start

from fanin.edge.basis import OWN_FIELDS, basis_of
from fanin.edge.masking.settings import MaskSettings
from fanin.protos import messages as m
from fanin.protos.plans import RoundPlan
from fanin.simulation import SyntheticTrainer, run_virtual
from fanin.v1 import fleet_pb2

WORK = replace(
    assignment(),
    max_devices=10,
    statistics=(m.Statistic(name="examples", bound=4096),),
    round_protocol=RoundPlan(protocol="secagg"),
)
PRIVACY = m.PrivacyTerms(
    mechanism="skellam",
    clip_norm=0.5,
    noise_multiplier=1.0,
    squared_sensitivity=9,
    epsilon=1.0,
    delta=1e-6,
    population="phones",
    population_size=9,
)
OTHER: dict[str, Callable[[m.Assignment], m.Assignment]] = {
    "run_id": lambda work: replace(work, run_id="another"),
    "round": lambda work: replace(work, round=2),
    "bundle": lambda work: replace(work, bundle=replace(work.bundle, public_key="cd" * 32)),
    "grid": lambda work: replace(work, grid=tuple(each + 1 for each in work.grid)),
    "codec": lambda work: replace(work, codec=replace(work.codec, options={"levels": 3})),
    "training": lambda work: replace(work, training=replace(work.training, learning_rate=1e-30)),
    "stages": lambda work: replace(work, stages=(m.StageSpec(name="error_feedback"),)),
    "statistics": lambda work: replace(work, statistics=(*work.statistics, m.Statistic(name="other", bound=3))),
    "flower": lambda work: replace(work, flower=replace(work.flower, config={"lr": 0.1})),
    "range_examples": lambda work: replace(work, range_examples=3),
    "round_protocol": lambda work: replace(work, round_protocol=RoundPlan(protocol="secagg", options={"x": 1})),
    "privacy": lambda work: replace(work, privacy=PRIVACY),
    "max_devices": lambda work: replace(work, max_devices=11),
}
OWN: dict[str, Callable[[m.Assignment], m.Assignment]] = {
    "assignment_id": lambda work: replace(work, assignment_id="run.1.other"),
    "deadline_s": lambda work: replace(work, deadline_s=7.0),
    "progress_s": lambda work: replace(work, progress_s=3.0),
}


def test_each_field_of_an_assignment_is_common_or_a_devices_own() -> None:
    fields = {field.name for field in fleet_pb2.Assignment.DESCRIPTOR.fields}
    assert fields == set(OTHER) | set(OWN_FIELDS)
    assert set(OWN) < set(OWN_FIELDS)


@pytest.mark.parametrize("name", OTHER)
def test_another_common_field_gives_other_terms(name: str) -> None:
    settings = MaskSettings(min_survivors=5)
    bases = [basis_of(work, 12) for work in (WORK, OTHER[name](WORK))]
    assert bases[0].work_sha256 != bases[1].work_sha256
    assert settings.terms(bases[0]).digest != settings.terms(replace(bases[0], work_sha256=bases[1].work_sha256)).digest


@pytest.mark.parametrize("name", OWN)
def test_the_own_fields_of_a_device_change_no_terms(name: str) -> None:
    assert basis_of(WORK, 12) == basis_of(OWN[name](WORK), 12)


class Isolating:
    """A coordinator that lets all devices but one train with a learning rate of almost 0."""

    def __init__(self, fleet: object, victim: str) -> None:
        self._fleet, self._victim = fleet, victim

    def __getattr__(self, name: str) -> object:
        return getattr(self._fleet, name)

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInReply:
        answer: m.CheckInReply = await self._fleet.check_in(device, check_in)  # type: ignore[attr-defined]
        if isinstance(answer, m.Assigned) and device != self._victim:
            work = answer.assignment
            return replace(answer, assignment=replace(work, training=replace(work.training, learning_rate=1e-30)))
        return answer


def test_devices_that_train_otherwise_share_no_sum(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan_of("secagg", 5, 5))
        fleet = Isolating(place.coordinator, "device-3")
        devices = [device_of(fleet, index, SyntheticTrainer(partition=index)) for index in range(5)]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        await asyncio.sleep(5_000.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        version = await place.state.stores.runs.newest_version("run")
        assert version.number == 0
        await place.coordinator.stop()
        await place.runs.stop()

    run_virtual(main())

"""Runs with a trimmed mean through the production coordinator: liars, restarts, damage, and impossible Plans."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.staleness import TABLE, assignment, check_in, settle, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import RoundFailed, RunState
from fanin.protos.plans import AggregationPlan, Plan
from fanin.protos.wire import from_proto, to_proto
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, run_virtual
from fanin.v1 import plan_pb2

SIZES = {"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.05, "liar": 1e4}
"""The change of every parameter by each device's Update."""
SEVEN = {"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.05, "e": 0.06, "f": 0.07, "liar": 1e4}
TRIMMED = plan(concurrency=5, buffer=5, quorum=5, max_rounds=1, rule="trimmed_mean", rule_options={"trim": 0.2})
MEAN = plan(concurrency=5, buffer=5, quorum=5, max_rounds=1)


async def send(place: Place, device: str) -> m.UploadReply:
    work = await assignment(place, device)
    transport = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    header, payload = update(work, (SIZES | SEVEN)[device])
    return await transport.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])


async def newest_parameters(place: Place) -> Float32s:
    version = await place.state.stores.runs.newest_version("run")
    assert version.number == 1
    return load_parameters(place.state.blobs, version, TABLE)


def outcome(folder: Path, run_plan: Plan, *, sizes: Mapping[str, float] = SIZES, restart_after: int = 99) -> Float32s:
    """Run and verify one Round of some devices, one of them a liar. Return the parameters.

    After ``restart_after`` devices, a new coordinator continues the Round.
    """

    async def main() -> Float32s:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        for index, device in enumerate(sizes):
            if index == restart_after:
                await place.runs.stop()
                place = open_place(folder)
                await place.runs.start()
                await settle()
            assert (await send(place, device)).update_state is m.UpdateState.ACCEPTED
        await settle()
        parameters = await newest_parameters(place)
        assert [verdict.problem for verdict in verify_run(place.state, "run")] == ["", ""]
        await place.runs.stop()
        return parameters

    return run_virtual(main())


def test_a_liar_of_five_moves_a_mean_and_no_trimmed_mean(tmp_path: Path) -> None:
    # The liar's values are the largest, and are trimmed. So are the smallest honest values at the other end.
    trimmed = outcome(tmp_path / "trimmed", TRIMMED)
    assert np.allclose(trimmed, (0.02 + 0.04 + 0.05) / 3, rtol=1e-3)
    mean = outcome(tmp_path / "mean", MEAN)
    assert mean.min() > 0.1


@pytest.mark.parametrize("restart_after", [1, 4])
def test_a_trimmed_mean_is_the_same_after_a_restart(tmp_path: Path, restart_after: int) -> None:
    expected = outcome(tmp_path / "one", TRIMMED)
    assert np.array_equal(outcome(tmp_path / "two", TRIMMED, restart_after=restart_after), expected)


ROBUST: dict[str, dict[str, object]] = {
    "median": {},
    "meamed": {"f": 1},
    "krum": {"f": 1},
    "multi_krum": {"f": 1, "m": 3},
    "bulyan": {"f": 1},
    "geometric_median": {"iterations": 20},
    "centred_clipping": {"radius": 0.2},
    "norm_bounding": {"radius": 0.2},
}
"""The options of each robust rule in a Run of seven devices with one liar."""


@pytest.mark.parametrize("name", ROBUST)
def test_a_liar_moves_no_robust_rule_and_a_restart_no_bit(tmp_path: Path, name: str) -> None:
    run_plan = plan(concurrency=7, buffer=7, quorum=7, max_rounds=1, rule=name, rule_options=ROBUST[name])
    expected = outcome(tmp_path / "one", run_plan, sizes=SEVEN)
    assert 0.01 <= expected.min() <= expected.max() <= 0.07
    assert np.array_equal(outcome(tmp_path / "two", run_plan, sizes=SEVEN, restart_after=4), expected)


def test_a_payload_that_is_damaged_before_it_is_read_again_fails_the_round(tmp_path: Path) -> None:
    """A column rule reads a payload twice: at its commit and in the fold."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), replace(TRIMMED, cohort=replace(TRIMMED.cohort, quorum=5)))
        await settle()
        for device in list(SIZES)[:4]:
            await send(place, device)
        await settle()
        (path,) = (tmp_path / "state" / "updates").glob("run/1/b.*.payload")
        path.write_bytes(path.read_bytes()[:-1])
        await send(place, "liar")
        await settle()
        events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
        failures = [event for event in events if isinstance(event, RoundFailed)]
        assert [event.reason for event in failures][:1] == [
            "the update of device b is damaged on the coordinator's disk; the coordinator's log has the details"
        ]
        await place.runs.stop()

    run_virtual(main())


def test_a_run_with_an_unknown_rule_does_not_start_and_leaves_no_record(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = replace(MEAN, aggregation=AggregationPlan(rule="crumb"))
        with pytest.raises(InvalidPlan, match="FN-0210"):
            await start(place.runs, bundle_in(tmp_path), run_plan)
        assert (await place.runs.listed()).runs == ()

    run_virtual(main())


def install_rule(site: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the rule ``own``, whose module has this source."""
    info_folder = site / "own_rule-1.0.dist-info"
    info_folder.mkdir(parents=True)
    (info_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rule\nVersion: 1.0\n")
    (info_folder / "entry_points.txt").write_text("[fanin.rules]\nown = own_rule:own\n")
    (site / "own_rule.py").write_text(source)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "own_rule", raising=False)


WRONG = """
from fanin.server.aggregation.rules import WeightedMean

class Odd(WeightedMean):
    def {method}:
        {body}

def own(plan):
    return Odd()
"""


@pytest.mark.parametrize(
    ("method", "body", "reason"),
    [
        ("accept(self, state, table, update)", "raise IndexError('column 6')", "accept raised IndexError: column 6"),
        ("accept(self, state, table, update)", "return None", "accept returned NoneType, expected a PartialSum"),
        (
            "finish(self, *arguments)",
            "return super().finish(*arguments).mean()",
            "finish returned float64 (), expected float64 (22,)",
        ),
    ],
)  # fmt: skip
def test_a_sum_rule_that_raises_or_returns_a_wrong_result_fails_the_round_at_once_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, body: str, reason: str
) -> None:
    async def main() -> None:
        install_rule(tmp_path / "site", WRONG.format(method=method, body=body), monkeypatch)
        place = open_place(tmp_path)
        await start(
            place.runs,
            bundle_in(tmp_path),
            replace(plan(concurrency=1, buffer=1, quorum=1), aggregation=AggregationPlan(rule="own")),
        )
        await settle()
        await send(place, "a")
        await settle()
        events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
        reasons = [event.reason for event in events if isinstance(event, RoundFailed)]
        assert reasons[:1] == [f"rule Odd: {reason}; correct the rule; the coordinator's log has the details"]
        await place.runs.stop()

    run_virtual(main())


def test_a_rule_that_leaves_no_weight_fails_the_round_and_the_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of each weight, the mean would be 0 / 0."""
    body = """zeros = (0,) * len(update.weights)
        from dataclasses import replace
        return super().accept(state, table, replace(update, weights=zeros, fresh_weights=zeros))"""

    async def main() -> None:
        source = WRONG.format(method="accept(self, state, table, update)", body=body)
        install_rule(tmp_path / "site", source, monkeypatch)
        place = open_place(tmp_path)
        one = plan(concurrency=1, buffer=1, quorum=1)
        await start(place.runs, bundle_in(tmp_path), replace(one, aggregation=AggregationPlan(rule="own")))
        await settle()
        before = (await place.runs.version("run", None)).version
        await send(place, "a")
        await settle()
        events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
        (reason,) = [event.reason for event in events if isinstance(event, RoundFailed)]
        assert reason.startswith("rule Odd: accept raised ValueError: weight: got 0 of 0, expected at least 1"), reason
        assert (await place.runs.version("run", None)).version == before
        assert [verdict.problem for verdict in verify_run(place.state, "run")] == [""]
        await place.runs.stop()

    run_virtual(main())


def test_a_run_whose_rule_is_gone_waits_for_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        install_rule(
            tmp_path / "site",
            "from fanin.server.aggregation.rules import WeightedMean\ndef own(plan): return WeightedMean()\n",
            monkeypatch,
        )
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), replace(MEAN, aggregation=AggregationPlan(rule="own")))
        await settle()
        await place.runs.stop()
        monkeypatch.undo()
        place = open_place(tmp_path)
        await place.runs.start()
        (info,) = (await place.runs.listed()).runs
        assert info.state is RunState.RUNNING
        assert info.reason.startswith("run run: cannot be taken up: plan: aggregation.rule: got 'own', expected one of")
        with pytest.raises(InvalidPlan, match="FN-0210"):
            list(verify_run(place.state, "run"))
        # The Run's devices wait for the repair.
        assert isinstance(await check_in(place, "a"), m.Wait)

    run_virtual(main())


def test_a_plan_without_a_rule_has_the_weighted_mean() -> None:
    message = to_proto(TRIMMED, plan_pb2.Plan)
    assert from_proto(Plan, message) == TRIMMED
    message.aggregation.ClearField("rule")
    message.aggregation.ClearField("rule_options")
    assert from_proto(Plan, message).aggregation == AggregationPlan(rule="weighted_mean")

"""``stop.target``: a Run and a simulation finish when the metric of a Version is good enough."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, network
from support.staleness import assignment, settle, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.clients.planfile import parse_plan
from fanin.edge.metrics.metric import Metric, metrics_of
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import Adopt, Command, RunRested, RunState, VersionEvaluation
from fanin.protos.plans import EvaluationPlan, Plan, StopPlan
from fanin.server.rounds.targets import check_target, target_text
from fanin.server.runs.data import NoData
from fanin.simulation import LoopbackTransport, Result, SimulationSettings, load_data, run_virtual, simulate


def targeted(best: str, target: float) -> Plan:
    return replace(
        plan(concurrency=2, buffer=2, quorum=2),
        stop=StopPlan(max_rounds=9, target=target),
        evaluation=EvaluationPlan(data="digits", best=best),
    )


@pytest.mark.parametrize(
    ("best", "target", "value", "is_reached"),
    [
        ("accuracy", 0.5, 0.5, True),
        ("accuracy", 0.5, 0.49, False),
        ("loss", 0.5, 0.5, True),
        ("loss", 0.5, 0.51, False),
        ("squared_error_int8", 2.0, 1.0, True),
        ("error", 2.0, 1.0, True),
        ("error_int8", 2.0, 3.0, False),
        ("gain_int8", 2.0, 3.0, True),
        ("loss", 0.5, float("nan"), False),
        ("shifted.loss", 0.5, 0.4, True),
        ("shifted.loss", 0.5, 2.3, False),
        ("shifted.error_int8", 2.0, 3.0, False),
        ("v1.0.accuracy", 0.5, 0.4, False),
    ],
)
def test_a_target_is_reached_from_the_side_of_its_metric(
    best: str, target: float, value: float, is_reached: bool
) -> None:
    metrics = {
        "error": Metric(function=lambda predictions, targets: 0.0, higher_is_better=False),
        "gain": Metric(function=lambda predictions, targets: 0.0),
    }
    text = target_text(targeted(best, target), 3, {best: value}, metrics)
    assert text == (
        f"version 3 has reached the target: {best} {value:g} (stop.target {target:g})" if is_reached else ""
    )
    assert target_text(targeted(best, target), 3, {}, metrics) == "", "a Version that was not evaluated"


@pytest.mark.parametrize(
    ("best", "target", "form"),
    [
        ("accuracy", 90.0, r"from 0 to 1; write 0\.9 for 90 %"),
        ("accuracy_int8", 1.01, r"from 0 to 1; write 0\.0101 for 1\.01 %"),
        ("shifted.accuracy", -0.5, "from 0 to 1; correct it, or evaluation.best"),
        ("squared_error", -1.0, "at least 0; correct it"),
        ("auc", 95.0, "write 0.95 for 95 %"),
        ("recall_3_int8", 95.0, "write 0.95 for 95 %"),
        ("share", 2.0, "from 0 to 1"),
    ],
)
def test_a_target_that_its_metric_cannot_have_is_refused(best: str, target: float, form: str) -> None:
    metrics = metrics_of(["auc", "recall_3"]) | {"share": Metric(function=lambda *_: 0.5, least=0.0, most=1.0)}
    with pytest.raises(InvalidPlan, match=rf"stop\.target: got {target:g} .*{form}") as error:
        check_target(targeted(best, target), metrics)
    assert error.value.code == "FN-1713"


@pytest.mark.parametrize(("best", "target"), [("accuracy", 1.0), ("accuracy", 0.0), ("loss", -3.0), ("own", 90.0)])
def test_a_target_that_its_metric_can_have_is_accepted(best: str, target: float) -> None:
    check_target(targeted(best, target), {"own": Metric(function=lambda *_: 90.0)})


class Digits(NoData):
    """A coordinator's data set. The evaluations are written by the test, as the evaluating process writes them."""

    @property
    def names(self) -> Collection[str]:
        return ("digits",)


async def evaluate(place: Place, version: int, accuracy: float) -> None:
    evaluation = VersionEvaluation(version=version, data="digits", values={"accuracy": accuracy}, time=1.0)
    await place.state.stores.evaluations.add_evaluation("run", evaluation, accuracy)


async def take_round(place: Place) -> None:
    for device in "ab":
        header, payload = update(await assignment(place, device), 0.01)
        transport = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
        reply = await transport.upload(
            header, lambda offset, size_bytes, data=payload: data[offset : offset + size_bytes]
        )
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


async def state(place: Place) -> RunState:
    run = await place.state.stores.runs.run("run")
    assert run is not None
    return run.state


def test_a_run_finishes_at_the_target_of_the_held_out_data_and_more_rounds_continue_it(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path, data=Digits())
        await start(place.runs, bundle_in(tmp_path), targeted("accuracy", 0.9))
        await settle()
        await take_round(place)
        await evaluate(place, 1, 0.7)
        await take_round(place)
        assert await state(place) is RunState.RUNNING
        await evaluate(place, 2, 0.95)
        await take_round(place)  # the Round was open when the evaluation ended
        assert await state(place) is RunState.FINISHED
        rested = [entry.event for entry in place.state.runs.events("run") if isinstance(entry.event, RunRested)]
        assert [each.reason for each in rested] == ["version 2 has reached the target: accuracy 0.95 (stop.target 0.9)"]
        # Back to Version 1, with 4 more Rounds: the earlier evaluations end nothing.
        await place.runs.command(
            Command(command_id="1", run_id="run", what=Adopt(from_run_id="run", number=1, rounds=4))
        )
        await settle()
        await take_round(place)
        assert await state(place) is RunState.RUNNING
        await evaluate(place, 5, 0.9)
        await take_round(place)
        assert await state(place) is RunState.FINISHED
        await place.runs.stop()

    run_virtual(main())


def test_a_target_beyond_its_metric_starts_no_run_and_no_simulation(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path, data=Digits())
        with pytest.raises(InvalidPlan) as error:
            await start(place.runs, bundle_in(tmp_path), targeted("accuracy", 90.0))
        assert error.value.code == "FN-1713"
        await place.runs.stop()

    run_virtual(main())
    with pytest.raises(InvalidPlan, match=r"write 0\.9 for 90 %"):
        trained(stop__target=90.0, evaluation__best="accuracy")


def trained(rounds: int = 20, **keys: object) -> Result:
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    settings = SimulationSettings(test=load_data("digits").test, plan=PLAN | changes, quiet=True)
    return simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=rounds, settings=settings)


def test_a_simulation_ends_with_the_first_version_at_its_target() -> None:
    result = trained(stop__target=0.6, evaluation__best="accuracy")
    accuracies = [row.test_accuracy for row in result.rounds]
    assert accuracies[-1] >= 0.6 > max(accuracies[:-1])
    assert result.is_complete and len(result.rounds) < 21
    assert (result.events[-1].event, result.events[-1].round) == ("target reached", result.rounds[-1].round)
    assert result.events[-1].detail.startswith(f"version {result.rounds[-1].version} has reached the target: accuracy")


@pytest.mark.nightly
def test_a_target_of_the_loss_is_an_upper_limit() -> None:
    losses = [row.test_loss for row in trained(stop__target=1.5).rounds]
    assert losses[-1] <= 1.5 < min(losses[:-1])
    assert len(trained(rounds=2, stop__target=0.0).rounds) == 3


def test_a_target_without_a_data_set_is_refused() -> None:
    text = "[cohort]\nconcurrency = 2\n[training]\nlearning_rate = 0.1\n[stop]\ntarget = 0.9\n"
    with pytest.raises(InvalidPlan, match=r"got stop\.target 0\.9 without evaluation\.data") as error:
        parse_plan(f'app = "digits"\n{text}', "plan.toml")
    assert error.value.code == "FN-1887"
    with pytest.raises((InvalidPlan, InvalidInput), match=r"stop\.target"):
        settings = SimulationSettings(plan=PLAN | {"stop.target": 0.9})
        simulate(app_of(network()), clients_of(), cohort=2, rounds=1, settings=settings)

"""Attacks of simulated devices: the values that they send, the data that they change, and the mistakes of a model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.scenarios import SHAPES, bundle_in
from support.virtual import PUBLISHER, plan

from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Float64s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunWarned
from fanin.protos.plans import Plan
from fanin.simulation import (
    Alie,
    Attack,
    Attackers,
    Backdoor,
    DeviceModel,
    GridManipulation,
    Habits,
    InnerProduct,
    LabelFlip,
    Member,
    Outcome,
    Partition,
    Scaling,
    Scenario,
    SignFlip,
    SyntheticTrainer,
    play,
    read_devices,
    synthetic_bundle,
)
from fanin.simulation.devices.attacks import largest_shift

NUM_DEVICES, NUM_ATTACKERS, EXAMPLES = 7, 2, 10
NUM_VALUES = sum(math.prod(shape) for shape in SHAPES.values())
CLAIM = 1 << 31
FIXED32, INT8 = m.CodecSpec(name="fixed32", max_shift=0), m.CodecSpec(name="int8", max_shift=12)
SLOW = (50.0, 100.0)
"""Honest devices are slower than the attackers, which wait for them if they collude."""
PLAN = plan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, max_rounds=1, deadline_s=1e6)


def outcome_of(
    folder: Path,
    attack: Attack | None,
    run_plan: Plan = PLAN,
    claim: int = 0,
    bundle: Bundle | None = None,
) -> Outcome:
    """Play a Run whose last devices attack, and recompute its Versions from the record."""
    habits = [
        Habits(work_s=SLOW) if index < NUM_DEVICES - NUM_ATTACKERS else Habits(attack=attack, claim=claim)
        for index in range(NUM_DEVICES)
    ]
    members = tuple(
        Member(device=f"device-{index}", trainer=SyntheticTrainer(partition=index), habits=each)
        for index, each in enumerate(habits)
    )
    scenario = Scenario(plan=run_plan, bundle=bundle or bundle_in(folder), publisher=PUBLISHER, members=members)
    outcome = play(scenario, folder)
    assert [verdict.problem for verdict in outcome.verdicts if verdict.problem] == []
    return outcome


def honest_changes() -> Float64s:
    """Return the change of each device in Round 1, as ``SyntheticTrainer`` draws it (devices, values)."""
    seeds = [np.random.SeedSequence((PLAN.training.seed, partition, 1)) for partition in range(NUM_DEVICES)]
    rows = [np.random.default_rng(seed).normal(0.0, 0.01, NUM_VALUES).astype(np.float32) for seed in seeds]
    return np.array(rows, np.float64)


def sent_by(attack: Attack) -> Float64s:
    """Return the Updates of the Round in plain numpy, by the equations of the papers (devices, values)."""
    rows = honest_changes()
    honest, own = rows[:-NUM_ATTACKERS], rows[-NUM_ATTACKERS:]
    match attack:
        case SignFlip():
            lies = -attack.factor * own
        case Scaling():
            lies = attack.factor * own
        case InnerProduct():
            lies = np.tile(-attack.epsilon * honest.mean(axis=0), (NUM_ATTACKERS, 1))
        case Alie():
            assert attack.z is not None
            lies = np.tile(honest.mean(axis=0) + attack.z * honest.std(axis=0, ddof=1), (NUM_ATTACKERS, 1))
        case _:
            raise AssertionError(attack)
    return np.concatenate([honest, lies])


@pytest.mark.parametrize("attack", [SignFlip(factor=2.0), Scaling(factor=5.0), InnerProduct(epsilon=0.5), Alie(z=1.5)])
def test_an_attack_sends_the_values_of_its_paper(tmp_path: Path, attack: Attack) -> None:
    outcome = outcome_of(tmp_path, attack)
    np.testing.assert_allclose(outcome.parameters, sent_by(attack).mean(axis=0), rtol=0, atol=1e-8)


def test_the_shift_of_alie_is_that_of_the_papers_example() -> None:
    """n = 50 and m = 24: s = 2 supporters, and the quantile of 24 / 26 = 0.923 is 1.43."""
    assert largest_shift(26, 24) == pytest.approx(1.43, abs=0.005)
    assert largest_shift(15, 5) == pytest.approx(0.2533, abs=1e-4)
    assert largest_shift(1, 5) == 0.0


def test_alie_has_the_shift_of_the_devices_that_it_knows(tmp_path: Path) -> None:
    shift = largest_shift(NUM_DEVICES - NUM_ATTACKERS, NUM_ATTACKERS)
    expected = sent_by(Alie(z=shift)).mean(axis=0)
    np.testing.assert_allclose(outcome_of(tmp_path, Alie()).parameters, expected, rtol=0, atol=1e-8)


def test_a_colluding_attacker_without_honest_devices_is_honest(tmp_path: Path) -> None:
    run_plan = plan(concurrency=1, buffer=1, quorum=1, max_rounds=1)
    digests = []
    for attack in (None, Alie()):
        folder = tmp_path / str(attack is None)
        member = Member(device="a", trainer=SyntheticTrainer(partition=0), habits=Habits(attack=attack))
        scenario = Scenario(plan=run_plan, bundle=bundle_in(folder), publisher=PUBLISHER, members=(member,))
        digests.append(play(scenario, folder).digests)
    assert digests[0] == digests[1]


def test_the_same_seed_gives_the_same_attack_in_each_round(tmp_path: Path) -> None:
    run_plan = replace(PLAN, stop=replace(PLAN.stop, max_rounds=3))
    first, second = (outcome_of(tmp_path / name, Alie(z=1.0), run_plan) for name in ("one", "two"))
    assert first.digests == second.digests and first.log == second.log


@pytest.mark.parametrize(
    ("attack", "codec"),
    [
        (GridManipulation(), INT8),
        pytest.param(GridManipulation(), FIXED32, marks=pytest.mark.nightly),
        pytest.param(GridManipulation(size=1e-30, saturated=0), INT8, marks=pytest.mark.nightly),
        pytest.param(GridManipulation(size=1e-30, saturated=0), FIXED32, marks=pytest.mark.nightly),
    ],
)
def test_the_grid_and_a_trimmed_mean_survive_an_attack_on_the_grid(
    tmp_path: Path, attack: Attack, codec: m.CodecSpec
) -> None:
    """The attackers are 2 of 7, less than a third. A mean would be 1e6 and more."""
    run_plan = plan(
        concurrency=NUM_DEVICES,
        buffer=NUM_DEVICES,
        quorum=NUM_DEVICES,
        deadline_s=1e6,
        max_rounds=3,
        rule="trimmed_mean",
        rule_options={"trim": 0.3},
        codec=codec,
    )
    honest, attacked = (outcome_of(tmp_path / str(each is None), each, run_plan) for each in (None, attack))
    # Each of three changes is among those of honest devices, which have a deviation of 0.01.
    assert np.abs(attacked.parameters).max() < 3 * 0.05
    assert np.abs(attacked.parameters).max() > 0.5 * np.abs(honest.parameters).max(), "the grid is not too coarse"


def test_a_false_count_of_saturated_values_is_reported_as_sent(tmp_path: Path) -> None:
    """The telemetry has the claim, and nothing else depends on it: the Version is that of an honest count."""
    large, hidden = (outcome_of(tmp_path / str(each), GridManipulation(saturated=each)) for each in (None, 0))
    assert large.digests == hidden.digests
    assert (large.versions[0].num_saturated, hidden.versions[0].num_saturated) == (2 * NUM_VALUES, 0)


@pytest.mark.parametrize("limit", [0, EXAMPLES])
def test_a_claim_of_two_billion_examples_has_the_share_that_the_plan_allows(tmp_path: Path, limit: int) -> None:
    run_plan = replace(PLAN, aggregation=replace(PLAN.aggregation, max_examples=limit))
    outcome = outcome_of(tmp_path, Scaling(factor=2.0), run_plan, claim=CLAIM)
    weights = np.array([EXAMPLES] * (NUM_DEVICES - NUM_ATTACKERS) + [limit or CLAIM] * NUM_ATTACKERS, np.float64)
    expected = np.average(sent_by(Scaling(factor=2.0)), axis=0, weights=weights)
    np.testing.assert_allclose(outcome.parameters, expected, rtol=0, atol=1e-8)
    texts = [entry.event.text for entry in outcome.events if isinstance(entry.event, RunWarned)]
    assert any("max_examples" in text for text in texts) == bool(limit), texts


def test_running_statistics_of_an_attacker_stay_its_own(tmp_path: Path) -> None:
    """A negative variance would be refused with the Update."""
    shapes = {"a": (NUM_VALUES - 7,), "running_mean": (7,)}
    outcome = outcome_of(tmp_path, SignFlip(factor=2.0), bundle=synthetic_bundle(tmp_path / "bn", PUBLISHER, shapes))
    expected = sent_by(SignFlip(factor=2.0))
    expected[:, -7:] = honest_changes()[:, -7:]
    np.testing.assert_allclose(outcome.parameters, expected.mean(axis=0), rtol=0, atol=1e-8)


def clients_of(labels: Sequence[int]) -> Partition:
    """Return two clients of half of these examples each, as images of 4 x 4 pixels."""
    y = np.array(labels, np.int32)
    x = np.zeros((y.size, 1, 4, 4), np.float32)
    half = y.size // 2
    return Partition(examples=Examples(inputs={"x": x}, y=y), indices=(np.arange(half), np.arange(half, y.size)))


def test_flipped_labels_are_those_of_the_attackers_alone() -> None:
    clients = clients_of([0, 1, 2, 3, 0, 1, 2, 3])
    poisoned = Attackers(clients=[1], attack=LabelFlip()).poison(clients)
    assert poisoned.examples.y.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert clients.examples.y.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_backdoor_is_a_patch_in_a_share_of_the_examples_with_the_target_as_label() -> None:
    clients = clients_of([0, 1, 2, 3] * 4)
    backdoor = Backdoor(target=2, size=2, value=0.5, share=0.25)
    poisoned = Attackers(clients=[0], attack=backdoor).poison(clients)
    patched = np.flatnonzero(poisoned.examples.inputs["x"].any(axis=(1, 2, 3)))
    assert patched.tolist() == [3, 7]
    assert poisoned.examples.y[patched].tolist() == [2, 2]
    image = poisoned.examples.inputs["x"][3, 0]
    assert image[2:, 2:].tolist() == [[0.5, 0.5], [0.5, 0.5]] and image.sum() == 2.0


def test_test_examples_with_a_trigger_are_those_of_other_labels() -> None:
    triggered = Backdoor(target=1).triggered(clients_of([0, 1, 2, 1]).examples)
    assert (len(triggered), triggered.y.tolist()) == (2, [1, 1])
    assert triggered.inputs["x"][:, 0, 1:, 1:].min() == 1.0


def test_a_model_of_devices_names_its_attackers_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text('attackers = { clients = [1, 3], attack = { name = "alie", z = 1.5 }, claim = 5 }\n')
    model = read_devices(path)
    assert model.attackers == Attackers(clients=[1, 3], attack=Alie(z=1.5), claim=5)
    assert [model.habits(client, 1, 0).attack for client in range(4)] == [None, Alie(z=1.5), None, Alie(z=1.5)]
    assert [model.habits(client, 1, 0).claim for client in range(2)] == [0, 5]
    path.write_text('attackers = { clients = [0], attack = "label_flip" }\n')
    assert read_devices(path).attackers == Attackers(clients=[0], attack=LabelFlip())


@pytest.mark.parametrize(
    ("table", "code", "text"),
    [
        ('"alie"', "FN-1850", "expected a table such as"),
        ("{ clients = [0] }", "FN-1850", "expected a table such as"),
        ('{ clients = [0], attack = "none" }', "FN-1850", "expected the name of an attack"),
        ('{ clients = [], attack = "alie" }', "FN-1850", "expected different indices"),
        ('{ clients = [1, 1], attack = "alie" }', "FN-1850", "expected different indices"),
        ('{ clients = [-1], attack = "alie" }', "FN-1850", "expected different indices"),
        ('{ clients = [0], attack = "alie", claim = -1 }', "FN-1850", "expected examples from 0"),
        ('{ clients = [0], attack = { name = "alie", tau = 1.0 } }', "FN-1151", "expected numbers for z"),
        ('{ clients = [0], attack = { name = "alie", z = inf } }', "FN-1152", "expected a finite number"),
        ('{ clients = [0], attack = { name = "scaling", factor = 0.0 } }', "FN-1152", "above 0"),
        ('{ clients = [0], attack = { name = "backdoor" } }', "FN-1151", "without target"),
        ('{ clients = [0], attack = { name = "backdoor", target = 0, share = 1.5 } }', "FN-1152", "up to 1"),
    ],
)
def test_a_mistake_in_a_file_of_attackers_names_its_key(tmp_path: Path, table: str, code: str, text: str) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(f"attackers = {table}\n")
    with pytest.raises(InvalidInput, match=text) as refused:
        read_devices(path)
    assert refused.value.code == code and "attackers" in str(refused.value)


def test_attackers_that_are_no_clients_or_do_not_fit_the_data_are_refused() -> None:
    clients = clients_of([0, 1, 2, 3])
    for attackers, code in (
        (Attackers(clients=range(3), attack=SignFlip()), "FN-1850"),
        (Attackers(clients=[0], attack=Backdoor(target=4)), "FN-1851"),
    ):
        with pytest.raises(InvalidInput) as refused:
            attackers.poison(clients)
        assert refused.value.code == code
    values = Examples(inputs={"x": np.zeros((4, 2), np.float32)}, y=np.zeros((4, 1), np.float32))
    with pytest.raises(InvalidInput, match="expected labels") as refused:
        Attackers(clients=[0], attack=LabelFlip()).poison(replace(clients, examples=values))
    assert refused.value.code == "FN-1851"
    with pytest.raises(InvalidInput) as refused:
        Attackers(clients=[0], attack="alie")  # type: ignore[arg-type]
    assert refused.value.code == "FN-1850"
    with pytest.raises(InvalidInput) as refused:
        DeviceModel(attackers=SignFlip())  # type: ignore[arg-type]
    assert refused.value.code == "FN-1850"

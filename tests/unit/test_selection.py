"""The selection of waiting devices, the requirements of a Run on devices, and retry windows."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.errors import raises
from support.values import plan

from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import Capabilities, StageSpec
from fanin.protos.plans import Plan
from fanin.protos.wire import from_proto, to_proto
from fanin.server.fleet.retries import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S, retry_window
from fanin.server.runs.suitability import unsuitable
from fanin.server.selection.contract import check_policy
from fanin.server.selection.participation import Participation
from fanin.server.selection.policies import (
    POLICIES,
    BrokenPolicy,
    SelectionPolicy,
    WaitingDevice,
    least_recent,
    policy_of,
    select,
    uniform,
)
from fanin.v1 import plan_pb2

CAPABILITIES = Capabilities(codecs=("fixed32",), runtimes=(), graph_formats=("onnx",))


def crowd(**last_rounds: int) -> tuple[WaitingDevice, ...]:
    return tuple(
        WaitingDevice(device_id=name, capabilities=CAPABILITIES, last_round=last_round)
        for name, last_round in last_rounds.items()
    )


WAITING = crowd(a=0, b=0, c=0, d=0, e=0, f=0)


def ids(devices: Sequence[WaitingDevice]) -> str:
    return "".join(device.device_id for device in devices)


def with_policy(name: str) -> Plan:
    base_plan = plan()
    return replace(base_plan, cohort=replace(base_plan.cohort, selection=name))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_our_policies_keep_the_contract(policy: SelectionPolicy) -> None:
    check_policy(policy)


def test_uniform_selects_all_devices_while_places_last() -> None:
    assert uniform(WAITING, 6, 1, random.Random(1)) == WAITING


def test_uniform_is_without_replacement_seeded_and_uniform() -> None:
    rng, counts = random.Random(7), Counter[str]()
    for _ in range(6000):
        selection = ids(uniform(WAITING, 2, 1, rng))
        assert len(set(selection)) == 2
        counts.update(selection)
    assert uniform(WAITING, 2, 1, random.Random(3)) == uniform(WAITING, 2, 1, random.Random(3))
    # Each device is expected 2000 times, with a standard deviation of 37.
    assert all(abs(counts[device] - 2000) < 200 for device in "abcdef")


def test_least_recent_selects_new_devices_first_and_then_those_of_the_oldest_rounds() -> None:
    waiting = crowd(a=7, b=0, c=3, d=5, e=0)
    assert set(ids(least_recent(waiting, 2, 8, random.Random(1)))) == {"b", "e"}
    assert ids(least_recent(waiting, 4, 8, random.Random(1)))[2:] == "cd"


def test_least_recent_breaks_ties_at_random() -> None:
    rng, counts = random.Random(7), Counter[str]()
    for _ in range(3000):
        counts.update(ids(least_recent(crowd(a=4, b=2, c=2, d=2), 2, 5, rng)))
    assert counts["a"] == 0
    assert all(abs(counts[device] - 2000) < 150 for device in "bcd")


def select_first(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return waiting[:num_places]


def select_unknown(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return [replace(waiting[0], device_id="ghost")]


def select_twice(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return [waiting[0], waiting[0]]


def select_all(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return waiting


def select_ids(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return [waiting[0].device_id]


def select_none(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return None


def raise_error(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    raise KeyError("/home/author/secret")


def raise_later(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    yield waiting[0]
    raise KeyError("beta")


def select_unseeded(waiting: Sequence[WaitingDevice], num_places: int, number: int, rng: random.Random) -> object:
    return random.sample(waiting, 1)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (select_unknown, "got something at index 0 that is not one of the 6 waiting devices"),
        (select_ids, "got something at index 0 that is not one of the 6 waiting devices"),
        (select_twice, "got a device twice among 2, expected each device once"),
        (select_all, "got more than 2 devices, expected at most one for each of 2 places"),
        (select_none, "got NoneType, expected a sequence of waiting devices"),
        (raise_error, "raised KeyError: '...', expected a sequence of waiting devices"),
        (raise_later, "raised KeyError: 'beta', expected a sequence of waiting devices"),
        (
            lambda waiting: waiting,
            (
                "raised TypeError: <lambda>() takes 1 positional argument but 4 were given, expected a sequence of "
                "waiting devices"
            ),
        ),
    ],
)
def test_a_result_that_breaks_the_contract_is_refused(policy: SelectionPolicy, text: str) -> None:
    with raises(BrokenPolicy, text):
        select(policy, WAITING, 2, 1, random.Random(1))


def test_a_result_within_the_contract_is_returned_in_its_order() -> None:
    assert ids(select(select_first, WAITING, 2, 1, random.Random(1))) == "ab"
    assert select(lambda waiting, places, number, rng: (), WAITING, 2, 1, random.Random(1)) == ()


@pytest.mark.parametrize(
    "policy", [select_unknown, select_ids, select_twice, select_all, select_none, raise_error, select_unseeded]
)
def test_the_contract_catches_a_breach(policy: SelectionPolicy) -> None:
    with pytest.raises(AssertionError, match=r"^policy: "):
        check_policy(policy)


def test_a_policy_of_the_contract_is_accepted() -> None:
    check_policy(select_first)


def test_a_plan_names_a_policy() -> None:
    assert policy_of(with_policy("least_recent")) is least_recent
    assert policy_of(plan()) is uniform


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    text = (
        "plan: cohort.selection: got 'least_recnt', expected one of ['least_recent', 'uniform'], which are installed "
        "here; did you mean least_recent?"
    )
    with raises(InvalidPlan, text):
        policy_of(with_policy("least_recnt"))


@pytest.mark.parametrize(("policy", "kind"), [(Participation, "the class Participation"), ("uniform", "str")])
def test_a_policy_that_is_no_function_is_refused(policy: object, kind: str) -> None:
    text = f"plan: cohort.selection: 'own': got {kind}, expected a function; correct it"
    with raises(InvalidPlan, text):
        policy_of(with_policy("own"), {"own": policy})  # type: ignore[dict-item]


def test_a_plan_without_a_policy_selects_uniformly() -> None:
    message = to_proto(with_policy("least_recent"), plan_pb2.Plan)
    assert from_proto(Plan, message).cohort.selection == "least_recent"
    message.cohort.ClearField("selection")
    assert from_proto(Plan, message).cohort.selection == "uniform"


def test_participation_has_the_last_round_of_each_device() -> None:
    participation = Participation()
    for device, number in [("a", 1), ("b", 1), ("a", 3), ("b", 2), ("a", 2)]:
        participation.note(device, number)
    assert [participation.last_round(device) for device in "abc"] == [3, 2, 0]


def test_participation_forgets_the_devices_that_took_part_longest_ago() -> None:
    participation = Participation(max_devices=2)
    for device, number in [("a", 1), ("b", 2), ("a", 3), ("c", 4)]:
        participation.note(device, number)
    assert [participation.last_round(device) for device in "abc"] == [3, 0, 4]


def test_recalled_devices_are_older_than_those_of_this_process() -> None:
    participation = Participation(max_devices=3)
    participation.note("a", 9)
    for device, number in [("b", 8), ("a", 8), ("c", 7), ("d", 6)]:
        participation.recall(device, number)
    assert participation.is_full
    assert [participation.last_round(device) for device in "abcd"] == [9, 8, 7, 0]
    participation.note("e", 10)
    assert [participation.last_round(device) for device in "abce"] == [9, 8, 0, 10]


def capabilities_with(**changes: object) -> Capabilities:
    fields = {"codecs": ("fixed32",), "runtimes": (), "graph_formats": ("onnx",), "max_download_bytes": 0} | changes
    return Capabilities(**fields)


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        (capabilities_with(), ""),
        (capabilities_with(max_download_bytes=1000), ""),
        (capabilities_with(graph_formats=("tflite", "onnx"), codecs=("int8", "fixed32")), ""),
        (capabilities_with(codecs=("int8",)), "codec: got ['int8'], expected fixed32"),
        (capabilities_with(codecs=()), "codec: got [], expected fixed32"),
        (capabilities_with(graph_formats=("tflite",)), "graph format: got ['tflite'], expected one of ['onnx']"),
        (capabilities_with(max_download_bytes=999), "download: a limit of 999 bytes, expected at least 1000"),
    ],
)
def test_a_device_must_meet_the_requirements(capabilities: Capabilities, text: str) -> None:
    assert unsuitable(capabilities, plan(), ("onnx",), 1000) == text


def test_a_device_must_have_the_stages_of_the_plan() -> None:
    staged_plan = replace(plan(), stages=(StageSpec(name="error_feedback"),))
    assert unsuitable(capabilities_with(), staged_plan, ("onnx",), 0) == "stages: got [], expected ['error_feedback']"
    assert unsuitable(capabilities_with(stages=("scaffold", "error_feedback")), staged_plan, ("onnx",), 0) == ""


@pytest.mark.parametrize("num_devices", [0, 1, 500, 10_000, 100_000, 10_000_000])
def test_a_retry_window_spreads_the_population(num_devices: int) -> None:
    shortest, longest = retry_window(num_devices)
    assert 0 < shortest < longest
    assert MIN_WINDOW_S <= longest <= MAX_WINDOW_S
    assert longest >= min(num_devices / RETRY_PER_S, MAX_WINDOW_S)

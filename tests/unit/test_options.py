"""Options of the parts that a Plan names: they are checked against the signature of the part."""

import random
from collections.abc import Sequence
from typing import Annotated

import pytest
from support.errors import raises
from support.virtual import plan

from fanin.edge.codecs.codec import codec_of
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import Capabilities, CodecSpec
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import Key
from fanin.protos.plans.named import Choice, created
from fanin.protos.wire import from_proto, to_proto
from fanin.server.aggregation.checked import optimizer_of, rule_of
from fanin.server.selection.policies import WaitingDevice, policy_of
from fanin.v1 import plan_pb2

CAPABILITIES = Capabilities(codecs=("fixed32",), runtimes=(), graph_formats=("onnx",))
RATE = "expected a number above 0 and below inf; correct it"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"outer_options": {"learning_rate": 0.0}}, f"aggregation.outer_options.learning_rate: got 0.0, {RATE}"),
        ({"outer_options": {"learning_rate": "1"}}, f"aggregation.outer_options.learning_rate: got '1', {RATE}"),
        ({"outer_options": {"learning_rate": True}}, f"aggregation.outer_options.learning_rate: got True, {RATE}"),
        (
            {"outer_options": {"learning_rte": 1.0}},
            (
                "aggregation.outer_options.learning_rte: unknown option, expected learning_rate; did you mean "
                "learning_rate?"
            ),
        ),
        (
            {"outer_options": {"momentum": 0.9}},
            "aggregation.outer_options.momentum: unknown option, expected learning_rate; remove it",
        ),
        (
            {"outer_optimizer": "nesterov", "outer_options": {"momentum": 1}},
            "aggregation.outer_options.momentum: got 1, expected a number of at least 0 and below 1; correct it",
        ),
        ({"rule_options": {"trim": 0.1}}, "aggregation.rule_options.trim: unknown option, expected none; remove it"),
        (
            {"rule": "trimmed_mean", "rule_options": {"trim": 0.5}},
            "aggregation.rule_options.trim: got 0.5, expected a number above 0 and below 0.5; correct it",
        ),
        (
            {"codec": CodecSpec(name="int08", max_shift=0)},
            (
                "codec.name: got 'int08', expected one of ['fixed32', 'int16', 'int4', 'int8', 'topk'], which are "
                "installed here; did you mean int8?"
            ),
        ),
        (
            {"codec": CodecSpec(name="int8", max_shift=0, options={"levels": 7})},
            "codec.options.levels: unknown option, expected none; remove it",
        ),
        (
            {"selection_options": {"separation": 2}},
            "cohort.selection_options.separation: unknown option, expected none; remove it",
        ),
    ],
)
def test_an_option_that_its_part_does_not_have_is_named(changes: dict[str, object], text: str) -> None:
    def parts(of: Plan) -> None:
        codec_of(of.codec)
        rule_of(of)
        optimizer_of(of)
        policy_of(of)

    with raises(InvalidPlan, f"plan: {text}"):
        parts(plan(**changes))


def later(  # a policy has four arguments
    waiting: Sequence[WaitingDevice], num: int, _round: int, _rng: random.Random, *, skipped: int, name: str = ""
) -> Sequence[WaitingDevice]:
    return [device for device in waiting[skipped:] if device.device_id != name][:num]


def test_a_policy_receives_its_options() -> None:
    policy = policy_of(plan(selection="later", selection_options={"skipped": 1, "name": "c"}), {"later": later})
    devices = [WaitingDevice(device_id=name, capabilities=CAPABILITIES, last_round=0) for name in "abcd"]
    assert [device.device_id for device in policy(devices, 4, 1, random.Random(0))] == ["b", "d"]
    with raises(InvalidPlan, "plan: cohort.selection_options.skipped: missing, expected an integer; add it"):
        policy_of(plan(selection="later"), {"later": later})


def test_a_factory_receives_integers_as_its_floats_and_keeps_its_defaults() -> None:
    def own(
        _plan: Plan, alpha: Annotated[float, Key(text="", at_least=0)], beta: int = 3, *, gamma: bool = True
    ) -> object:
        return alpha, beta, gamma

    choice = Choice(key="rule", name="own", options_key="options", options={"alpha": 2, "gamma": False})
    made = created(choice, {"own": own}, "fanin.rules", plan())
    assert made == (2.0, 3, False)
    assert type(made[0]) is float  # type: ignore[index]


def test_an_option_may_be_absent() -> None:
    def own(_plan: Plan, *, alpha: float | None = None) -> list[object]:
        return [alpha]

    def choice(**options: float) -> Choice:
        return Choice(key="rule", name="own", options_key="options", options=options)

    assert created(choice(), {"own": own}, "fanin.rules", plan()) == [None]
    assert created(choice(alpha=2), {"own": own}, "fanin.rules", plan()) == [2.0]


def test_options_survive_the_wire() -> None:
    options = {"a": 1, "b": 0.5, "c": "x", "d": True}
    codec = CodecSpec(name="own", max_shift=0, options=options)
    sent = plan(rule="own", rule_options=options, outer_options=options, selection_options=options, codec=codec)
    received = from_proto(Plan, to_proto(sent, plan_pb2.Plan))
    assert received == sent
    assert list(map(type, received.aggregation.rule_options.values())) == [int, float, str, bool]


def test_a_plan_with_a_key_of_a_newer_version_is_refused() -> None:
    text = (
        "got field 1023, which this version of fanin does not know, expected the keys of docs/reference/plan.md; use "
        "the version of fanin that wrote the Plan"
    )
    message = to_proto(plan(), plan_pb2.Plan)
    message.aggregation.MergeFromString(b"\xf8\x3f\x01")
    with raises(InvalidPlan, f"plan: aggregation: {text}"):
        from_proto(Plan, message)
    message = to_proto(plan(), plan_pb2.Plan)
    message.MergeFromString(b"\xf8\x3f\x01")
    with raises(InvalidPlan, f"plan: {text}"):
        from_proto(Plan, message)

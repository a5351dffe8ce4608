"""The manifest is parsed strictly: each mistake has its own error message."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.errors import raises
from support.manifests import ACTIVATION, manifest, slots

from fanin.edge.bundles.manifest_json import FORMAT, dump_manifest, parse_manifest
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.protos.errors import InvalidBundle

Row = dict[str, Any]


def test_a_dumped_manifest_parses_to_the_same_facts_and_bytes() -> None:
    data = dump_manifest(manifest())
    assert parse_manifest(data) == manifest()
    assert dump_manifest(parse_manifest(data)) == data


def edited(change: Callable[[Row], object]) -> bytes:
    """Return the manifest's JSON after a change."""
    row = json.loads(dump_manifest(manifest()))
    change(row)
    return json.dumps(row).encode()


ROOT_KEYS = sorted(json.loads(dump_manifest(manifest())))
BOUND = "below a bound of at most 1.70141e+38"
WRONG: list[tuple[Callable[[Row], object], str]] = [
    (
        lambda row: row.update(extra=1),
        f"manifest: got unknown ['extra'], expected {ROOT_KEYS}",
    ),
    (
        lambda row: row.pop("slots"),
        f"manifest: got no ['slots'], expected {ROOT_KEYS}",
    ),
    (lambda row: row.update(name=3), "manifest.name: got int, expected str"),
    (lambda row: row.update(batch_size=True), "manifest.batch_size: got bool, expected int"),
    (
        lambda row: row.update(batch_size=0),
        "manifest: got batch_size 0 and num_classes 3, expected at least 1 and 0",
    ),
    (
        lambda row: row.update(num_classes=-1),
        "manifest: got batch_size 16 and num_classes -1, expected at least 1 and 0",
    ),
    (
        lambda row: row.update(num_tokens={"x": 0}),
        "manifest: got num_tokens {'x': 0}, expected numbers of at least 1 for inputs of ['x']",
    ),
    (
        lambda row: row.update(num_tokens={"ids": 3}),
        "manifest: got num_tokens {'ids': 3}, expected numbers of at least 1 for inputs of ['x']",
    ),
    (lambda row: row.update(parameters=[]), "manifest.parameters: got list, expected an object"),
    (
        lambda row: row["parameters"].update(gain=[-1]),
        "manifest.parameters.gain: got [-1], expected integers of at least 0",
    ),
    (lambda row: row["parameters"].update({"": []}), "manifest: tensor name: got an empty one"),
    (
        lambda row: row["roles"].update(other={"role": "statistic"}),
        "manifest.roles: got 'other', expected only names of the parameters",
    ),
    (
        lambda row: row["roles"]["gain"].update(role="trained"),
        "manifest.roles.gain.role: got 'trained', expected one of ['parameter', 'statistic', 'counter', 'sum']",
    ),
    (lambda row: row["roles"]["gain"].update(lowest=0), "manifest.roles.gain.lowest: got int, expected float"),
    (
        lambda row: row["roles"]["gain"].update(highest=-1.0),
        "manifest: role: got the range from 0.0 to -1.0, expected finite numbers of float32 in rising order",
    ),
    (
        lambda row: row["roles"].update({"dense.weight": {"role": "parameter"}}),
        "manifest.roles.dense.weight: got a parameter without a range, expected another role; leave the key out",
    ),
    (
        lambda row: row["signatures"]["train"].update(code="x"),
        "manifest.signatures.train: got unknown ['code'], expected ['graphs', 'inputs', 'outputs']",
    ),
    (
        lambda row: row["signatures"]["train"]["graphs"].update(onnx="other"),
        "manifest: signature 'train' names artifact 'other', which is not listed",
    ),
    (
        lambda row: row["signatures"]["infer"]["inputs"][0].update(dtype="float64"),
        (
            "manifest.signatures.infer.inputs[0].dtype: got 'float64', "
            "expected one of ['float32', 'int32', 'int8', 'uint8']"
        ),
    ),
    (
        lambda row: row["signatures"]["infer"]["outputs"][0].update(shape=[-2, 3]),
        "manifest.signatures.infer.outputs[0].shape: got [-2, 3], expected integers of at least -1",
    ),
    (
        lambda row: row["signatures"]["infer"].update(inputs={}),
        "manifest.signatures.infer.inputs: got dict, expected list",
    ),
    (lambda row: row["slots"].update(onnx=[3]), "manifest.slots.onnx[0]: got int, expected an object"),
    (
        lambda row: row["slots"]["onnx"][4].update(kind="int4"),
        (
            "manifest.slots.onnx[4].kind: got 'int4', "
            "expected one of ['weight', 'weight_scale', 'bias', 'bias_scale', 'float', 'activation_scale', "
            "'zero_point', 'zero_point64']"
        ),
    ),
    (
        lambda row: row["slots"]["onnx"][0].update(permutation=1),
        "manifest.slots.onnx[0].permutation: got int, expected list",
    ),
    (
        lambda row: row["slots"]["onnx"][0].update(input_scale=0),
        "manifest.slots.onnx[0].input_scale: got int, expected float",
    ),
    (
        lambda row: row["slots"].clear(),
        "manifest: got no slots in 'onnx', expected at least one; without slots no Version changes the int8 model",
    ),
    (
        lambda row: row["derived"].update(more={}),
        "manifest.derived: got unknown ['more'], expected ['constants', 'folded']",
    ),
    (
        lambda row: row["derived"]["constants"].update(spread="AAA"),
        "manifest.derived.constants.spread: not base64 (Incorrect padding)",
    ),
    (
        lambda row: row["derived"]["constants"].update(spread="AAAA"),
        "manifest: constant 'spread': got 3 bytes, expected a multiple of 4 for float32 numbers",
    ),
    (
        lambda row: row["derived"]["constants"].update(spread="AADAfw=="),
        "manifest: constant 'spread': got NaN or infinity, expected finite float32 numbers",
    ),
    (
        lambda row: row["derived"]["constants"].update(gain=""),
        "manifest: derived tensor 'gain': expected a unique, non-empty name",
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(epsilon=0.0),
        "manifest: folded 'dense.weight:folded': got epsilon 0.0, expected more than 0.0",
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(variance="other"),
        "manifest: folded 'dense.weight:folded' names unknown parameters ['other']",
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(variance=""),
        "manifest: folded 'dense.weight:folded' names unknown parameters ['']",
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(value="dense.weight:folded"),
        "manifest: folded 'dense.weight:folded' names unknown parameters ['dense.weight:folded']",
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(axis=0),
        (
            "manifest: folded 'dense.weight:folded': got (4, 3) along axis 0 and vectors [(3,)], "
            "expected one value for each channel"
        ),
    ),
    (
        lambda row: row["derived"]["folded"]["dense.weight:folded"].update(mean="gain"),
        (
            "manifest: folded 'dense.weight:folded': got (4, 3) along axis 1 and vectors [(), (3,)], "
            "expected one value for each channel"
        ),
    ),
    (
        lambda row: row["optimizer"]["momentum"].update(default=1.0),
        f"manifest.optimizer.momentum: got the default 1.0 below 1.0, expected at least 0.0, {BOUND}",
    ),
    (
        lambda row: row["optimizer"]["momentum"].update(below="1"),
        "manifest.optimizer.momentum.below: got str, expected float",
    ),
    (lambda row: row.update(initial="other"), "manifest: initial parameters 'other' are not among the artifacts"),
    (
        lambda row: row["artifacts"]["initial"].update(size_bytes=1),
        f"manifest: artifact: got chunks of {manifest().artifacts['initial'].size_bytes} bytes in all, expected 1",
    ),
    (
        lambda row: row["artifacts"]["initial"].update(sha256="../../etc"),
        "manifest: artifact: got digest '../../etc', expected 64 hexadecimal characters",
    ),
    (
        lambda row: row["artifacts"]["initial"]["chunks"][0].update(offset=0),
        "manifest.artifacts.initial.chunks[0]: got unknown ['offset'], expected ['sha256', 'size_bytes', 'url']",
    ),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text for _, text in WRONG])
def test_each_mistake_has_its_error(change: Callable[[Row], object], text: str) -> None:
    with raises(InvalidBundle, text):
        parse_manifest(edited(change))


@pytest.mark.parametrize("number", [FORMAT + 1, 0, None, "1", True, 1.0, [1]])
def test_another_format_is_reported_before_any_other_mistake(number: object) -> None:
    text = (
        f"manifest: got format {number!r}, expected {FORMAT}; install a fanin that knows this format, "
        "or export the Bundle again"
    )
    with raises(InvalidBundle, text):
        parse_manifest(json.dumps({"format": number, "new": "things"}).encode())


OTHER_CODES = [
    dump_manifest(manifest()).decode().encode(code) for code in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig")
]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000, *OTHER_CODES])
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidBundle, match="FN-0305"):
        parse_manifest(data)


def test_json_that_is_no_object_is_refused() -> None:
    with raises(InvalidBundle, "manifest: got list, expected an object"):
        parse_manifest(b"[]")


WEIGHT, SCALE, BIAS, BIAS_SCALE, FLOAT, *GRID = slots()
NO_BIAS = "expected a weight, and either an activation or an input_scale, in a bias only"
OF_MANIFEST = "expected names of the manifest's parameters"
WRONG_SLOTS: list[tuple[tuple[Slot, ...], str]] = [
    ((replace(FLOAT, parameter="other"),), f"manifest: slot 'g' names unknown parameters ['other'], {OF_MANIFEST}"),
    ((replace(FLOAT, parameter=""),), "manifest: slot 'g': got no parameter, expected the name of one"),
    ((SCALE, replace(BIAS, weight="other")), f"manifest: slot 'b' names unknown parameters ['other'], {OF_MANIFEST}"),
    (
        (SCALE, replace(BIAS, weight="")),
        f"manifest: slot 'b': got weight '', activation '' and input_scale 0.0625, {NO_BIAS}",
    ),
    (
        (SCALE, replace(BIAS, input_scale=0.0)),
        f"manifest: slot 'b': got weight 'dense.weight', activation '' and input_scale 0.0, {NO_BIAS}",
    ),
    (
        (SCALE, replace(BIAS_SCALE, input_scale=float("nan"))),
        f"manifest: slot 'bs': got weight 'dense.weight', activation '' and input_scale nan, {NO_BIAS}",
    ),
    (
        (SCALE, replace(BIAS_SCALE, input_scale=2.0**-61)),
        f"manifest: slot 'bs': got weight 'dense.weight', activation '' and input_scale {2.0**-61}, {NO_BIAS}",
    ),
    (
        (SCALE, replace(WEIGHT, input_scale=1.0)),
        f"manifest: slot 'w': got weight '', activation '' and input_scale 1.0, {NO_BIAS}",
    ),
    (
        (replace(SCALE, weight="dense.weight"),),
        f"manifest: slot 'ws': got weight 'dense.weight', activation '' and input_scale 0.0, {NO_BIAS}",
    ),
    ((replace(FLOAT, shape=(1,)),), "manifest: slot 'g': got shape (1,), expected ()"),
    ((SCALE, replace(WEIGHT, permutation=())), "manifest: slot 'w': got shape (3, 4), expected (4, 3)"),
    ((replace(SCALE, shape=(4,)),), "manifest: slot 'ws': got shape (4,), expected (3,)"),
    ((replace(SCALE, axis=2),), "manifest: slot 'ws': got axis 2, expected one of 2 dimensions"),
    ((replace(SCALE, axis=-1),), "manifest: slot 'ws': got axis -1, expected one of 2 dimensions"),
    (
        (replace(FLOAT, permutation=(1, 0)),),
        "manifest: slot 'g': got permutation (1, 0), expected one of 0 dimensions, and of a weight or a float only",
    ),
    (
        (replace(SCALE, permutation=(1, 0)),),
        "manifest: slot 'ws': got permutation (1, 0), expected one of 2 dimensions, and of a weight or a float only",
    ),
    (
        (replace(SCALE, axis=0, shape=(4,)), replace(BIAS, axis=0, shape=(4,))),
        "manifest: slot 'b': got a bias of shape (3,), expected (4,) as its weight has",
    ),
    (
        (WEIGHT,),
        "manifest: slot 'w': got axis 1, expected that of the weight_scale slot of 'dense.weight', None",
    ),
    (
        (SCALE, replace(WEIGHT, axis=0)),
        "manifest: slot 'w': got axis 0, expected that of the weight_scale slot of 'dense.weight', 1",
    ),
    (
        (BIAS,),
        "manifest: slot 'b': got axis 1, expected that of the weight_scale slot of 'dense.weight', None",
    ),
    (
        (replace(SCALE, initializer="ws0", axis=0, shape=(4,)), SCALE),
        "manifest: slot 'ws0': got axis 0, expected that of the weight_scale slot of 'dense.weight', 1",
    ),
    (
        (SCALE, BIAS),
        "manifest: slot 'b': got no bias_scale slot with its weight, activation and input_scale, expected one",
    ),
    (
        (replace(WEIGHT, parameter="spread", shape=(3,), axis=0, permutation=()),),
        "manifest: slot 'w': got axis 0, expected that of the weight_scale slot of 'spread', None",
    ),
    (
        (replace(BIAS, weight="spread"), replace(BIAS_SCALE, weight="spread")),
        "manifest: slot 'b': got axis 1, expected one of 1 dimensions",
    ),
    ((FLOAT, FLOAT), "manifest: two slots name the same initializer"),
    (
        (replace(WEIGHT, offset=40), replace(SCALE, offset=51)),
        "manifest: slots 'w' and 'ws' overlap in the file",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG_SLOTS, ids=[text for _, text in WRONG_SLOTS])
def test_slots_that_could_not_be_filled_are_refused(wrong: tuple[Slot, ...], text: str) -> None:
    with raises(InvalidBundle, text):
        replace(manifest(), slots={"onnx": wrong}, activations=())


SCALE_OF_ACTIVATION, ZERO, _ = GRID
WRONG_ACTIVATIONS: list[tuple[dict[str, object], str]] = [
    ({"slots": {"onnx": (FLOAT,)}}, "FN-0319"),
    ({"slots": {"onnx": (FLOAT, SCALE_OF_ACTIVATION)}}, "FN-0319"),
    ({"slots": {"onnx": (FLOAT, ZERO)}}, "FN-0319"),
    ({"activations": ()}, "FN-0319"),
    ({"activations": (ACTIVATION, ACTIVATION)}, "FN-0319"),
    ({"activations": (replace(ACTIVATION, graph_format="tflite"),)}, "FN-0319"),
    ({"activations": (ACTIVATION, replace(ACTIVATION, name="onnx:other"))}, "FN-0319"),
    ({"slots": {"onnx": (SCALE, replace(BIAS_SCALE, activation="onnx:other", input_scale=0.0), *GRID)}}, "FN-0319"),
    ({"slots": {"onnx": (SCALE, replace(BIAS_SCALE, activation=ACTIVATION.name), *GRID)}}, "FN-0320"),
    ({"slots": {"onnx": (SCALE, replace(SCALE, initializer="o", activation=ACTIVATION.name), *GRID)}}, "FN-0320"),
    ({"slots": {"onnx": (FLOAT, ZERO, replace(SCALE_OF_ACTIVATION, activation=""))}}, "FN-0320"),
    ({"slots": {"onnx": (FLOAT, ZERO, replace(SCALE_OF_ACTIVATION, parameter="gain"))}}, "FN-0320"),
    ({"slots": {"onnx": (FLOAT, ZERO, replace(SCALE_OF_ACTIVATION, axis=0))}}, "FN-0320"),
    ({"slots": {"onnx": (FLOAT, ZERO, replace(SCALE_OF_ACTIVATION, shape=(2,)))}}, "FN-0320"),
]


@pytest.mark.parametrize(("facts", "code"), WRONG_ACTIVATIONS, ids=[f"{n}" for n in range(len(WRONG_ACTIVATIONS))])
def test_activations_and_slots_that_do_not_fit_are_refused(facts: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidBundle) as caught:
        replace(manifest(), **facts)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("low", "high"), [(0.5, 1.0), (-1.0, -0.5), (float("nan"), 1.0), (-1.0, float("inf")), (-0.1, 1.0), (-1.0, 1e300)]
)
def test_a_range_is_finite_float32_and_has_zero(low: float, high: float) -> None:
    with pytest.raises(InvalidBundle) as caught:
        replace(ACTIVATION, low=low, high=high)
    assert caught.value.code == "FN-0319"


def test_a_bias_may_use_an_activation() -> None:
    refreshed = tuple(replace(slot, activation=ACTIVATION.name, input_scale=0.0) for slot in (BIAS, BIAS_SCALE))
    bias_manifest = replace(manifest(), slots={"onnx": (SCALE, *refreshed, *GRID)})
    assert parse_manifest(dump_manifest(bias_manifest)) == bias_manifest


def test_a_bias_may_use_frozen_scales() -> None:
    on_spread = tuple(replace(slot, weight="spread", axis=0) for slot in (BIAS, BIAS_SCALE))
    bias_manifest = replace(manifest(), slots={"onnx": (*on_spread, *GRID)})
    assert parse_manifest(dump_manifest(bias_manifest)) == bias_manifest


def test_the_slots_here_are_of_every_kind() -> None:
    assert {slot.kind for slot in slots()} == set(SlotKind)

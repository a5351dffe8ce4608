"""The inputs of an App (a tensor, a tuple or a dict), the path of its output, and the errors of both."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.several import Reader, several_app, several_examples
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.app.inputs.outputs import paths_of, picked
from fanin.edge.export.graph.examples import example_batch, other_batch
from fanin.edge.export.graph.vocabulary import count_tokens
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.refusals import NOWHERE
from fanin.protos.errors import UnsupportedModel

INPUTS = dict(several_examples(16, seed=1).inputs)
IDS, MASK, NUMBERS = INPUTS.values()


class Scaled(nn.Module):
    """A module with a parameter that has the name of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, gain: Tensor, numbers: Tensor) -> Tensor:
        """Return the sum."""
        return gain + numbers * self.gain


class Positional(nn.Module):
    """A module whose forward takes its first two arguments by position only."""

    def forward(self, ids: Tensor, mask_of_ids: Tensor, /, numbers: Tensor) -> Tensor:
        """Return a sum."""
        return (ids * mask_of_ids).sum(1, keepdim=True) + numbers


class Many(nn.Module):
    """A module whose forward has no named arguments."""

    def forward(self, *parts: Tensor) -> Tensor:
        """Return the first argument."""
        return parts[0]


@pytest.mark.parametrize(
    "calibration",
    [
        (IDS, MASK, NUMBERS),
        tuple(map(torch.from_numpy, (IDS, MASK, NUMBERS))),
        {"numbers": NUMBERS, "ids": IDS, "attention_mask": MASK},
        (IDS.astype(np.int64), MASK, NUMBERS),
    ],
    ids=["arrays", "tensors", "dict", "int64"],
)
def test_inputs_have_the_names_of_the_parameters_of_forward(calibration: object) -> None:
    app = replace(several_app(), calibration=calibration)
    assert {name: value.numpy().tobytes() for name, value in app.inputs.items()} == {
        name: value.tobytes() for name, value in INPUTS.items()
    }
    assert app.input_shapes == {"ids": (6,), "attention_mask": (6,), "numbers": (3,)}
    output = app.call(app.module.eval(), app.examples(20))
    assert isinstance(output, Tensor) and output.shape == (20, 4)
    assert count_tokens(prepare(app)) == {"ids": 20}


@pytest.mark.parametrize("module", [nn.Linear(3, 2), nn.Flatten()], ids=["Linear", "Flatten"])
@pytest.mark.parametrize("calibration", [NUMBERS, {"x": NUMBERS}], ids=["array", "dict"])
def test_a_tensor_is_the_only_input_x(module: nn.Module, calibration: object) -> None:
    app = App(name="one", module=module, calibration=calibration, batch_size=2)
    assert [*app.inputs] == ["x"]
    assert isinstance(app.call(module, app.examples(2)), Tensor)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ({**INPUTS, "y": NUMBERS}, r"got an input of the name 'y', expected .* that is not one of \[.*; rename"),
        ({**INPUTS, "mask": MASK}, r"got an input of the name 'mask', expected the name of a parameter of forward"),
        ({**INPUTS, "a b": MASK}, r"got an input of the name 'a b', expected the name of a parameter of forward"),
        ({**INPUTS, 3: MASK}, r"got an input of the name 3, expected the name of a parameter of forward"),
        (
            {"ids": IDS, "numbers": NUMBERS},
            r"expected those of Reader.forward\(ids.*missing .*'attention_mask'\); pass",
        ),
        ({**INPUTS, "more": MASK}, r"got the inputs .*'more'\], expected those of Reader.forward\(.*'more'\); pass a"),
        (NUMBERS, r"got the inputs \['x'\], expected those of Reader.forward\(ids.*missing .*\); pass a tensor"),
        ((IDS, MASK, NUMBERS, NUMBERS), r"got a tuple of 4 tensors, expected at most 3, one for each named parameter"),
        ((), r"got a tuple of 0 tensors, expected at most 3"),
        ((IDS, MASK[:3], NUMBERS), r"got {'ids': 16, 'attention_mask': 3, 'numbers': 16} samples, expected the same"),
        ((IDS + np.int64(2**31), MASK, NUMBERS), r"ids: got integers from 2147483\d+ to .*, expected int32 numbers"),
        (
            (IDS, MASK > 0, NUMBERS),
            r"attention_mask: got torch.bool .*; convert a mask by x.int\(\), and back by",
        ),
        (
            {**INPUTS, "file": MASK},
            r"got an input of the name 'file', expected .* or arguments of numpy.savez have",
        ),
        ({**INPUTS, "allow_pickle": MASK}, r"got an input of the name 'allow_pickle'"),
        ((IDS, MASK, NUMBERS[:, 0]), r"numbers: got torch.float32 \(16,\), expected .* one number in each sample"),
        ((IDS, MASK, np.full((16, 3), np.nan, np.float32)), r"numbers: got NaN in sample 0"),
        ((IDS, MASK, [[1.0]] * 16), r"numbers: got list, expected one tensor"),
    ],
)
def test_wrong_inputs_raise_one_error(calibration: object, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"App several: calibration data.*{message}"):
        replace(several_app(), calibration=calibration)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"calibration": (NUMBERS, NUMBERS), "module": Scaled(), "output": "", "num_classes": 0},
            "the input 'gain' and the parameter 'gain' have the same name, .*; rename the parameter of forward",
        ),
        ({"calibration": (IDS, MASK), "module": Many()}, "got a tuple of 2 tensors, expected at most 0"),
        (
            {"validation": ((IDS, MASK, NUMBERS[:, :2]), np.zeros(16, np.int32))},
            "x like the calibration data ids int32",
        ),
        (
            {"preprocess": nn.Identity(), "raw": NUMBERS},
            "preprocess: got a module with the inputs .* expected a single",
        ),
        ({"output": 0}, "output: got 0, expected a path such as 'logits' or '0', a str"),
        ({"output": ()}, r"output: got \(\), expected a path .* or a tuple of different paths"),
        (
            {"output": ("logits", "logits")},
            r"output: got \('logits', 'logits'\), expected .* a tuple of different paths",
        ),
        ({"output": ("logits", "")}, r"output: got \('logits', ''\), expected a path"),
        ({"output": ("logits", "scores")}, r"without a part 'scores', expected one of \['states.0', 'states.1', 'lo"),
        ({"output": ("states.1", "logits")}, r"returned \(2, 16\), expected logits of shape \(batch, 4\)"),
        (
            {"output": ("logits", "states")},
            r"returned tuple at the path 'states', expected a tensor \(batch, ...\), or a scalar",
        ),
        (
            {"output": "scores"},
            r"without a part 'scores', expected one of \['states.0', 'states.1', 'logits'\]; set out",
        ),
        ({"output": "states"}, r"returned tuple, expected logits of shape \(batch, 4\); set output= .*\['0', '1'\]"),
        (
            {"output": ""},
            r"returned dict, expected logits .*; set output= .* one of \['states.0', 'states.1', 'logits'",
        ),
        ({"output": "states.1"}, r"returned \(2, 16\), expected logits of shape \(batch, 4\)"),
        (
            {"calibration": NUMBERS, "module": nn.Linear(3, 4), "output": "logits"},
            r"returned Tensor without a part 'logits', expected one of \[\]; remove output=",
        ),
    ],
)
def test_a_wrong_part_of_an_app_of_several_inputs_raises_one_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"App several.*{message}"):
        example_batch(prepare(replace(several_app(), **change)))


@pytest.mark.parametrize(
    "calibration",
    [(IDS, MASK, NUMBERS), {"numbers": NUMBERS, "mask_of_ids": MASK, "ids": IDS}],
    ids=["tuple", "dict"],
)
def test_arguments_may_be_positional_only(calibration: object) -> None:
    app = replace(several_app(), module=Positional(), calibration=calibration, num_classes=0, output="")
    assert app.inputs.keys() == {"ids", "mask_of_ids", "numbers"}
    np.testing.assert_allclose(
        app.call(app.module, app.inputs), (IDS * MASK).sum(1, keepdims=True) + NUMBERS, rtol=1e-6
    )
    with pytest.raises(UnsupportedModel, match="FN-0732"):
        replace(app, calibration={"mask_of_ids": MASK, "numbers": NUMBERS})


def test_a_path_picks_a_tensor_of_nested_tuples_and_dicts() -> None:
    output = OrderedDict(logits=torch.zeros(1), states=(torch.ones(1), [torch.ones(2)]), loss=None)
    assert [*paths_of(output)] == ["logits", "states.0", "states.1.0"]
    assert picked("App", NOWHERE, output, "states.1.0") is output["states"][1][0]
    assert picked("App", NOWHERE, output, "") is output


def test_the_other_batch_has_other_samples_and_keeps_their_inputs_together() -> None:
    prepared = prepare(several_app())
    traced, (inputs, _, _) = example_batch(prepared), other_batch(prepared, example_batch(prepared))
    words = {(ids.tobytes(), mask.tobytes()) for ids, mask in zip(*_arrays(prepared.app.inputs), strict=True)}
    assert {(ids.tobytes(), mask.tobytes()) for ids, mask in zip(*_arrays(inputs), strict=True)} <= words
    assert not (inputs["ids"] == traced[0]["ids"]).all(dim=1).any()
    assert not torch.isin(inputs["numbers"], traced[0]["numbers"]).any()


def _arrays(inputs: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    return inputs["ids"].numpy(), inputs["attention_mask"].numpy()


@pytest.mark.parametrize("forward", [Reader.forward, None], ids=["defined", "keywords"])
def test_keyword_arguments_are_accepted(forward: Callable[..., object] | None) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reader()

        def forward(self, **parts: Tensor) -> object:
            return self.inner(**parts)

    module = Reader() if forward else Wrapped()
    assert replace(several_app(), module=module).target_shape == ()

"""Mistakes in a first App: one error each, with the remedy and the line. Numpy arrays are accepted."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.values import PUBLISHER
from torch import Tensor, nn

from fanin.edge.export import Adam, App, Recipe, Sgd, check_app, cross_entropy, export, load_app
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.examples import example_batch
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.protos.errors import UnsupportedModel

X = torch.linspace(0.0, 1.0, 8 * 4).reshape(8, 4)
Y = torch.arange(8) % 3


class ChangedOutput(nn.Module):
    """A module whose output has another form than logits."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> object:
        return self.change(self.inner(x))


def computed_weight() -> nn.Module:
    """Return a layer whose weight is a computed tensor, as after torch.nn.utils.weight_norm."""
    layer = nn.Linear(4, 3)
    weight = layer.weight
    del layer.weight
    vars(layer)["weight"] = weight * 2.0
    return nn.Sequential(layer)


def app(**fields: Any) -> App:
    """Return an App of one linear layer, with some fields changed."""
    return App(
        **{
            "name": "first",
            "module": nn.Linear(4, 3),
            "calibration": X,
            "batch_size": 4,
            "num_classes": 3,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calibration": (X, Y)}, "calibration data: got a tuple of 2 tensors, expected at most 1, .*without labels"),
        ({"calibration": torch.utils.data.DataLoader(X)}, "got DataLoader, expected .* of some batches by torch.cat"),  # type: ignore[arg-type]  # a tensor is a data set
        ({"calibration": None}, "calibration data: got NoneType, expected one tensor or numpy array"),
        ({"calibration": X.double()}, r"got torch.float64 \(8, 4\), expected float32 .*; convert it by x.float\(\)"),
        ({"calibration": X.numpy().astype(np.float64)}, r"got torch.float64 .* or x.astype\('float32'\) for an array"),
        ({"calibration": X.to(torch.uint8)}, r"got torch.uint8 .*; convert pixels by x.float\(\) / 255.* preprocess="),
        ({"calibration": np.array([["a"], ["b"]])}, "got a numpy array of <U1, expected one of numbers"),
        ({"calibration": X.to("meta")}, "calibration data: is on meta, expected cpu"),
        ({"validation": X}, r"validation data: got Tensor, expected a pair \(x, y\)"),
        ({"validation": (X, Y, Y)}, "validation data: got tuple of 3, expected a pair"),
        ({"validation": (X, torch.eye(3)[Y])}, r"expected integers .*; convert one-hot values by y.argmax\(-1\)"),
        ({"validation": (X, torch.tensor(1))}, "expected one y for each x"),
        ({"batch_size": "4"}, "batch_size: got '4', expected an int"),
        ({"batch_size": 4.0}, "batch_size: got 4.0, expected an int"),
        ({"num_classes": "3"}, "num_classes: got '3', expected an int"),
        ({"class_axis": 1.0}, "class_axis: got 1.0, expected an int"),
        ({"class_axis": 0}, "got class_axis 0 and num_classes 3, expected the axis of the classes in the logits"),
        ({"class_axis": 1, "num_classes": 0}, "got class_axis 1 and num_classes 0, .* -1 for a model of values"),
        ({"module": nn.Linear}, r"got the class Linear as module, expected an instance; write Linear\(...\)"),
        ({"module": nn.DataParallel(nn.Linear(4, 3))}, "inside torch's DataParallel, .*; pass module.module"),
        (
            {"module": computed_weight()},
            r"module 0 \(Linear\) keeps weight, .*; replace torch.nn.utils.weight_norm by ",
        ),
        ({"recipe": Sgd()}, r"recipe: got Sgd\(.*\), expected a Recipe; write recipe=Recipe\(optimizer=...\)"),
        ({"loss": "cross_entropy"}, "loss: got 'cross_entropy', expected a function"),
        ({"loss": nn.CrossEntropyLoss}, r"loss: got <class .*>, expected .*reduction='none'"),
        ({"preprocess": lambda raw: raw / 255, "raw": X}, "preprocess: got function, expected a torch.nn.Module"),
    ],
)
def test_a_mistake_in_a_field_is_named_with_its_remedy(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"App first: .*{message}"):
        app(**fields)


def test_a_scripted_module_is_refused() -> None:
    with pytest.warns(DeprecationWarning):
        module = torch.jit.script(nn.Linear(4, 3))  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(UnsupportedModel, match="FN-0714"):
        app(module=module)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD([X], lr=0.1), r"an object of torch.optim.sgd.SGD, .* without parameters and learning rate"),
        (torch.optim.AdamW, "the class torch.optim.adamw.AdamW, .* the Plan sets the learning rate"),
        (Sgd, r"the class fanin.edge.export.app.optimizers.rules.Sgd, .*; write Sgd\(\)"),
        ("sgd", r"an object of builtins.str, expected an optimizer of fanin.edge.export; write optimizer=Sgd\(\)"),
    ],
)
def test_an_optimizer_of_torch_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"recipe: optimizer: got {message}"):
        Recipe(optimizer=optimizer)


def test_a_clip_norm_that_is_no_number_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0746"):
        Recipe(clip_norm="1")  # type: ignore[arg-type]  # the mistake


def test_numpy_arrays_are_accepted_like_tensors() -> None:
    x = X.numpy().copy()
    x.flags.writeable = False
    numpy_app = app(calibration=x[::-1], validation=[x, Y.numpy()], num_classes=np.int64(3))
    torch.testing.assert_close(numpy_app.inputs["x"], X.flip(0), rtol=0.0, atol=0.0)
    torch.testing.assert_close(numpy_app.held_out, ({"x": X}, Y), rtol=0.0, atol=0.0)
    assert type(numpy_app.num_classes) is int


def test_data_with_a_gradient_loses_it() -> None:
    assert not app(calibration=X.clone().requires_grad_()).inputs["x"].requires_grad


@pytest.mark.parametrize(
    ("change", "num_classes", "message"),
    [
        (lambda y: [y], 3, r"returned list, expected logits of shape \(batch, 3\); set output= .* one of \['0'\]"),
        (lambda y: y, 5, r"returned \(2, 3\), expected logits of shape \(batch, 5\); set num_classes=3 in the App"),
        (
            lambda y: y[:, :, None],
            3,
            r"returned \(2, 3, 1\), expected .*; the classes are in axis 1: set class_axis=1 in the App",
        ),
        (lambda y: y[:, 0], 3, r"returned \(2,\), .*; return one row of logits for each sample"),
        (lambda y: y[:, 0], 0, r"returned \(2,\), .*; return output.unsqueeze\(-1\) in forward"),
    ],
)
def test_an_output_of_another_form_is_explained(
    change: Callable[[Tensor], object], num_classes: int, message: str
) -> None:
    line = ChangedOutput.forward.__code__.co_firstlineno + 1
    place = rf"App first: module itself \(ChangedOutput\) at test_first_mistakes\.py:{line}"
    with pytest.raises(UnsupportedModel, match=f"{place} {message}"):
        example_batch(prepare(app(module=ChangedOutput(change), num_classes=num_classes)))


class Auxiliary(nn.Module):
    """A module that returns one more output in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.inner(x)
        if self.training:
            return (y,)
        return y, y


def test_the_check_names_the_line_of_an_output_that_lacks_a_path_in_training() -> None:
    (finding,) = check_app(app(module=Auxiliary(), output="1"), ["onnx"])
    line = f"test_first_mistakes.py:{Auxiliary.forward.__code__.co_firstlineno + 3}"
    assert (finding.module, finding.kind, finding.line) == ("", "Auxiliary", line)
    assert (
        f"module itself (Auxiliary) at {line} returned tuple without a part '1', expected one of ['0']"
        in finding.reason
    )


def test_inputs_that_the_module_does_not_accept_are_shown() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0775"):
        example_batch(prepare(app(calibration=X.int())))


def test_a_buffer_without_values_is_named() -> None:
    module = nn.Linear(4, 3)
    module.register_buffer("mean", torch.zeros(3, device="meta"))
    with pytest.raises(UnsupportedModel, match="FN-0729"):
        prepare(app(module=module))


def test_an_error_of_an_app_names_the_line_that_creates_it(tmp_path: Path) -> None:
    path = tmp_path / "mistaken.py"
    text = "import torch\nfrom fanin.edge.export import App\n\n\ndef app():\n    return App(\n        {}\n    )\n"
    path.write_text(text.format('name="a", module=torch.nn.Linear(4, 3), calibration=None, batch_size=2.0'))
    with pytest.raises(
        UnsupportedModel, match=rf"^App a: batch_size: got 2.0, .* \(at {path}:6, while '{path}:app' is loaded\)\n"
    ):
        load_app(f"{path}:app")


def test_an_error_of_another_app_of_the_file_names_both(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    options = "module=torch.nn.Linear(4, 3), batch_size=2, num_classes=3"
    path.write_text(
        "import torch\nfrom fanin.edge.export import App\n\n"
        f"good = App(name='good', calibration=torch.ones(4, 4), {options})\n"
        f"wide = App(name='wide', calibration=torch.ones(4, 4).double(), {options})\n"
    )
    expected = r"^App wide: calibration data: got torch.float64 \(4, 4\), expected float32 values .*; convert it by "
    with pytest.raises(UnsupportedModel, match=rf"{expected}.* \(at {path}:5, while '{path}:good' is loaded\)\n"):
        load_app(f"{path}:good")


class Locked(nn.Linear):
    """A layer with a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.lock = threading.Lock()


class CopiedLock(Locked):
    """The same with a copy of its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> "CopiedLock":
        return CopiedLock()


def test_a_module_that_cannot_be_copied_is_refused_with_its_attribute() -> None:
    expected = r"App first: module 1 \(Locked\) with lock cannot be copied \(TypeError: cannot pickle '_thread.lock'"
    with pytest.raises(UnsupportedModel, match=expected):
        app(module=nn.Sequential(nn.Identity(), Locked()))
    prepare(app(module=nn.Sequential(nn.Identity(), CopiedLock())))


@pytest.mark.parametrize(
    ("body", "message"),
    [("return torch.nn.Linear(4, 3)", "got Linear, .*; put the module into an App"), ("pass", "end the function with")],
)
def test_a_function_that_returns_no_app_is_explained(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "without_app.py"
    path.write_text(f"import torch\n\n\ndef app():\n    {body}\n")
    with pytest.raises(UnsupportedModel, match=message):
        load_app(f"{path}:app")


def test_the_loss_of_torch_without_reduction_is_accepted() -> None:
    loss = nn.CrossEntropyLoss(reduction="none")
    torch.testing.assert_close(app(loss=loss).loss(X[:, :3], Y), cross_entropy(X[:, :3], Y))


def hooked_layer() -> nn.Module:
    """Return a layer with a hook that changes its gradient."""
    layer = nn.Linear(4, 3)
    layer.weight.register_hook(lambda gradient: gradient * 0.0)
    return nn.Sequential(layer)


def test_a_hook_on_a_gradient_is_refused() -> None:
    message = r"App first: parameter 0\.weight has a hook on its gradient, which no train graph would call; expected"
    with pytest.raises(UnsupportedModel, match=message):
        prepare(app(module=hooked_layer()))


class Center(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) + (output - self.centers[y]).square().mean(1)


def test_parameters_of_a_loss_are_refused_unless_they_are_frozen() -> None:
    message = r"loss: Center has parameters of its own, \['centers'\], which no device would train; move them into"
    with pytest.raises(UnsupportedModel, match=message):
        app(loss=Center())
    assert app(loss=Center().requires_grad_(False)).num_classes == 3


class Bfloat16Layer(nn.Module):
    """A module that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def test_autocast_is_refused_with_its_line() -> None:
    message = (
        r"module inner \(Linear\) at test_first_mistakes\.py:\d+ computes in torch\.bfloat16 by torch\.autocast, "
        r"expected float32, in which devices compute; remove torch\.autocast from the forward"
    )
    with pytest.raises(UnsupportedModel, match=message):
        trace_train(prepare(app(module=Bfloat16Layer())), ONNX)
    with pytest.raises(UnsupportedModel, match=message):
        trace_infer(prepare(app(module=Bfloat16Layer())))


def test_labels_of_two_classes_may_be_true_and_false() -> None:
    _, y = app(num_classes=2, module=nn.Linear(4, 2), validation=(X, Y > 0)).held_out
    assert y.dtype == torch.int32 and y.tolist() == (Y > 0).int().tolist()


def test_a_key_of_an_output_may_have_dots() -> None:
    module = ChangedOutput(lambda logits: {"a.b": logits, "a": {"c": logits}})
    for path in ("a.b", "a.c"):
        assert prepare(app(module=module, output=path)).learned.keys() == {"inner.weight", "inner.bias"}
    with pytest.raises(UnsupportedModel, match="FN-0737"):
        trace_train(prepare(app(module=module, output="a.d")), ONNX)


class UnusedLayer(nn.Module):
    """A module with a layer that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_parameter_without_a_gradient_never_changes(tmp_path: Path) -> None:
    """torch's optimizers skip such a parameter, and do not decay it."""
    recipe = Recipe(optimizer=Adam(weight_decay=0.1))
    result = export(app(module=UnusedLayer(), recipe=recipe), tmp_path / "bundle", PUBLISHER, ["onnx"])
    assert (
        "the output does not depend on unused.bias, unused.weight: they travel, but never change; call "
        "requires_grad_(False) on them to leave them out"
    ) in result.notes
    bundle = result.bundle
    step, values = open_runtime("onnx").open_train(bundle), bundle.completed(bundle.initial_parameters())
    batch = PaddedBatch(inputs={"x": X[:4].numpy()}, y=Y[:4].int().numpy(), mask=np.ones(4, np.float32))
    state, _ = step(step.begin(values), batch, StepSettings(learning_rate=0.1))
    changes = {
        name: bool((after != before).any())
        for (name, after), before in zip(
            bundle.manifest.model_table.views(state.parameters).items(),
            bundle.manifest.model_table.views(values).values(),
            strict=True,
        )
    }
    assert changes == {"unused.bias": False, "unused.weight": False, "used.bias": True, "used.weight": True}


@pytest.mark.parametrize(
    ("num_classes", "y", "message"),
    [
        (
            3,
            torch.eye(3, dtype=torch.int32)[Y],
            r"got \(8, 3\), expected \(8,\); convert one-hot values by y\.argmax\(-1\)",
        ),
        (3, Y[:, None], r"got \(8, 1\), expected \(8,\); write y\.squeeze\(-1\)"),
        (0, X[:, 0], r"got \(8,\), expected \(8, 1\); write y\.unsqueeze\(-1\)"),
    ],
)
def test_targets_of_another_shape_are_refused_before_anything_is_traced(
    tmp_path: Path, num_classes: int, y: Tensor, message: str
) -> None:
    module = nn.Linear(4, num_classes or 1)
    with pytest.raises(UnsupportedModel, match=rf"App first: validation data: y: {message} \(at .*\.py:\d+\)\n"):
        export(app(module=module, num_classes=num_classes, validation=(X, y)), tmp_path / "bundle", PUBLISHER)

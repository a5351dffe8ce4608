"""An App's own decompositions: each mistake has one error, and a wrong form is not exported."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.models import app_of, export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.export import App, check_app, check_decomposition
from fanin.edge.export.app.decompositions import Decompositions
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.protos.errors import InvalidInput, UnsupportedModel

aten = torch.ops.aten
HYPOT = aten.hypot.default


def hypot(x: Tensor, other: Tensor) -> Tensor:
    return torch.sqrt(x * x + other * other)


def with_forms(forms: Decompositions) -> App:
    return replace(app_of("mlp"), decompositions=forms)


def of_one(x: Tensor) -> Tensor:
    return x


def of_other_names(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def of_any(*args: Tensor) -> Tensor:
    return args[0]


def test_a_key_must_be_an_operator_overload() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0791"):
        with_forms({aten.hypot: hypot})  # type: ignore[dict-item]  # the mistake itself


@pytest.mark.parametrize("form", [of_one, of_other_names, of_any])
def test_a_form_must_have_the_arguments_of_its_operator(form: Callable[..., object]) -> None:
    with pytest.raises(UnsupportedModel, match="FN-0791"):
        with_forms({HYPOT: form})


@pytest.mark.parametrize("wrong", [lambda value: value.double(), lambda value: value[:1]], ids=["dtype", "shape"])
def test_a_form_must_return_the_shape_and_dtype_of_its_operator(wrong: Callable[[Tensor], Tensor]) -> None:
    def form(x: Tensor, other: Tensor) -> Tensor:
        return wrong(hypot(x, other))

    table = ONNX.for_training({HYPOT: form})
    with pytest.raises(UnsupportedModel, match="FN-0792"):
        table[HYPOT](torch.ones(3), torch.ones(3))


def test_an_own_form_takes_precedence_and_a_wrong_one_is_not_exported() -> None:
    def doubled(dy: Tensor, x: Tensor, threshold: float) -> Tensor:
        return 2.0 * dy * (x > threshold).to(dy.dtype)

    error = (
        r"train step 1: the next momentum\.1\.bias of module 1 \(Linear\) of the exported graph differs from torch's"
    )
    forms = {aten.threshold_backward.default: doubled}
    with pytest.raises(UnsupportedModel, match=error):
        export_bundle(with_forms({**forms}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.T
    return product if bias is None else product + bias


def test_a_form_of_an_operator_that_torch_composes_of_others_is_exported() -> None:
    # In a graph with a dynamic batch size, torch would call the form to compute the operator's own result.
    assert export_bundle(with_forms({aten.linear.default: linear})).manifest.slots


def test_the_contract_compares_values_and_gradients() -> None:
    pairs = [(torch.tensor([3.0, 1.0]), torch.tensor([4.0, 2.0]))]
    check_decomposition(HYPOT, hypot, pairs)
    with pytest.raises(AssertionError, match=r"example 1: value 0 differs"):
        check_decomposition(HYPOT, lambda x, other: hypot(x, other) + 1.0, pairs)
    with pytest.raises(AssertionError, match=r"example 1: gradient 1 differs"):
        check_decomposition(HYPOT, lambda x, other: hypot(x, other.detach()), pairs)
    with pytest.raises(AssertionError, match=r"got no examples"):
        check_decomposition(HYPOT, hypot, [])


def constant_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return (powers / powers.sum(dim, keepdim=True)).detach()


def test_the_contract_compares_gradients_that_add_up_to_zero() -> None:
    with pytest.raises(AssertionError, match=r"example 1: gradient 0 differs"):
        check_decomposition(aten._softmax.default, constant_softmax, [(torch.tensor([[1.0, 2.0, 4.0]]), 1, False)])


def by_value(x: Tensor, other: Tensor) -> Tensor:
    return hypot(x, other) if x.sum() > 0 else hypot(other, x)


def in_float32(x: Tensor, other: Tensor) -> Tensor:
    return hypot(x, other) if x.dtype == torch.float64 else hypot(x, other.bfloat16().to(x.dtype) * 1.01)


def test_the_contract_calls_a_form_as_an_export_does() -> None:
    pairs = [(torch.tensor([-3.0, 1.0]), torch.tensor([4.0, 2.0]))]
    with pytest.raises(UnsupportedModel, match=r"reads values of a tensor at test_own_.*; use torch.where"):
        check_decomposition(HYPOT, by_value, pairs)
    with pytest.raises(AssertionError, match=r"example 1: value 0 differs .* expected at most 1e-03"):
        check_decomposition(HYPOT, in_float32, pairs)
    with pytest.raises(
        AssertionError, match="example 1: the function returned NotImplemented, so an export leaves the"
    ):
        check_decomposition(HYPOT, lambda x, other: NotImplemented, pairs)


def test_an_operator_without_a_derivative_is_compared_by_its_values() -> None:
    operator = aten.nextafter.default
    examples = [(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))]
    check_decomposition(operator, lambda x, other: x + (other - x).sign() * 1e-7 * x.abs(), examples)
    with pytest.raises(AssertionError, match="value 0 differs"):
        check_decomposition(operator, lambda x, other: other + 0 * x, examples)


class Modulus(nn.Module):
    """A module with an operator that no format supports."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the lengths (B, 4) of pairs (B, 8)."""
        real, imaginary = x.chunk(2, dim=-1)
        return torch.hypot(real, imaginary)


OUTSIDE = torch.tensor([[1.5], [0.25]])


def with_constants(x: Tensor, other: Tensor) -> Tensor:
    """Return the length times 1.0. The factor comes from constants inside and outside of the form."""
    inside = torch.tensor([0.5, -0.25], dtype=x.dtype)
    return (
        hypot(x, other) * (inside.sum() * torch.tensor(4)) * (OUTSIDE.to(x.dtype) * torch.tensor([[0.5], [1.0]])).sum()
    )


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_form_may_have_constant_tensors(graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(
        name="modulus",
        module=nn.Sequential(nn.Linear(6, 8), Modulus(), nn.Linear(4, 3)),
        calibration=torch.randn(16, 6),
        batch_size=4,
        num_classes=3,
        decompositions={HYPOT: with_constants},
    )
    # The export compares its graphs with eager torch.
    assert set(export_bundle(app, (graph_format,)).manifest.slots) == {graph_format}
    check_decomposition(HYPOT, with_constants, [(torch.ones(3), torch.arange(3.0))])


def test_a_form_with_a_large_constant_is_refused() -> None:
    form = {HYPOT: lambda x, other: hypot(x, other) * torch.tensor([1.0] * 300).mean()}
    with pytest.raises(UnsupportedModel, match="FN-0792"):
        ONNX.for_training(form)[HYPOT](torch.ones(3), torch.ones(3))


LGAMMA = aten.lgamma.default
LARGE = torch.ones(1000)


class LogGamma(nn.Module):
    """A module with an operator that ONNX lacks; ONNX lacks its gradient too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the shape of x."""
        return torch.lgamma(x * x + 1.0)


def lgamma(x: Tensor) -> Tensor:
    """Compute log-gamma by Stirling's series at x + 6."""
    z = x + 6.0
    product = torch.ones_like(x)
    for step in range(6):
        product = product * (x + float(step))
    return (
        (z - 0.5) * z.log()
        - z
        + 0.9189385332046727
        + 1 / (12 * z)
        - 1 / (360 * z**3)
        + 1 / (1260 * z**5)
        - product.log()
    )


def digamma(x: Tensor) -> Tensor:
    z, total = x + 6.0, torch.zeros_like(x)
    for step in range(6):
        total = total + 1.0 / (x + float(step))
    return z.log() - 0.5 / z - 1 / (12 * z**2) + 1 / (120 * z**4) - 1 / (252 * z**6) - total


def gamma_app(form: Callable[..., object], digamma: Callable[..., object] | None = None) -> App:
    torch.manual_seed(0)
    others = {} if digamma is None else {aten.digamma.default: digamma}
    return App(
        name="gamma",
        module=nn.Sequential(nn.Linear(6, 8), LogGamma(), nn.Linear(8, 3)),
        calibration=torch.randn(16, 6),
        batch_size=4,
        num_classes=3,
        decompositions={LGAMMA: form, **others},
    )


def writes(x: Tensor) -> Tensor:
    x += 1.0
    return lgamma(x - 1.0)


def writes_to_its_own(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = y[0] * 1.0
    return lgamma(y)


def in_a_tuple(x: Tensor) -> tuple[Tensor]:
    return (lgamma(x),)


def by_itself(x: Tensor) -> Tensor:
    return torch.lgamma(x + 1.0) - x.log()


def failing(x: Tensor) -> Tensor:
    raise KeyError("table")


MISTAKES = [
    (
        writes,
        r"the function writes to a tensor \(aten\.add_\.Tensor\), expected one that writes to none; compute a new",
    ),
    (writes_to_its_own, r"the function writes to a tensor \(aten\.copy_\.default\), expected"),
    (
        lambda x: lgamma(x) * LARGE.mean() * (x.sum() + LARGE).mean(),
        "got a constant tensor of 1000 numbers, expected at most 256",
    ),
    (
        in_a_tuple,
        r"got a tuple \(torch\.float\d+ \(.*\)\), expected torch\.float\d+ \(.*\) like the operator; return tensors",
    ),
    (by_itself, "the function calls its own operator, or another form that does, expected other operators alone"),
    (failing, r"the function fails at test_own_decompositions\.py:\d+ \(KeyError: 'table'\), expected a result"),
]


@pytest.mark.parametrize(("form", "error"), MISTAKES)
def test_the_contract_and_the_export_refuse_a_form_alike(form: Callable[..., object], error: str) -> None:
    expected = rf"^decomposition of aten\.lgamma\.default: {error}[^\n]*\n"
    with pytest.raises(UnsupportedModel, match=expected):
        check_decomposition(LGAMMA, form, [(torch.rand(4, 8) + 1.0,)])
    with pytest.raises(UnsupportedModel, match=expected):
        export_bundle(gamma_app(form, digamma=digamma))


def test_forms_that_call_each_other_are_refused() -> None:
    app = gamma_app(lambda x: torch.digamma(x), digamma=lambda x: torch.lgamma(x))
    with pytest.raises(UnsupportedModel, match="FN-0792"):
        export_bundle(app)


def test_a_small_part_of_a_large_constant_is_a_constant() -> None:
    def form(x: Tensor) -> Tensor:
        return lgamma(x) * LARGE[:1] * float(LARGE.mean())

    check_decomposition(LGAMMA, form, [(torch.rand(4, 8) + 1.0,)])
    export_bundle(gamma_app(form, digamma=digamma))


@pytest.mark.parametrize(
    ("examples", "error"),
    [
        ([torch.ones(2)], r"example 1: got Tensor, expected a tuple of the arguments aten::lgamma\(.*write \(x,\)"),
        (torch.ones(2), r"examples: got Tensor, expected a list of tuples; write \[\(x,\)\]"),
        ([()], "example 1: torch refuses the arguments .*missing value.*correct the example"),
        ([("one",)], "example 1: torch refuses the arguments .*correct the example"),
    ],
)
def test_an_example_is_a_tuple_of_the_arguments(examples: list[tuple[object]], error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        check_decomposition(LGAMMA, lgamma, examples)


def test_the_contract_requires_an_overload() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0791"):
        check_decomposition(aten.lgamma, lgamma, [(torch.ones(2),)])  # type: ignore[arg-type]  # the mistake itself


def test_the_advice_considers_the_forms_of_the_app() -> None:
    (finding,) = check_app(gamma_app(lgamma), ["onnx"])
    assert (finding.module, finding.operator) == ("1", "aten.digamma")
    assert finding.advice.startswith("replace it, or train only the layers after it: its forward has a form")
    app = gamma_app(lgamma)
    app.module.get_submodule("0").requires_grad_(False)
    assert not check_app(app, ["onnx"])

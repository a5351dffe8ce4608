"""An App's own decompositions: validated when the App is created, and checked on each call while a graph is traced."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from fanin.protos.errors import UnsupportedModel

Decompositions = Mapping[OpOverload, Callable[..., object]]
"""The form of each operator. A form that returns ``NotImplemented`` leaves the operator as it is."""
PLAIN_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "self": "x",
        "input": "x",
        "grad_output": "dy",
        "grad_out": "dy",
        "grad_in": "dy",
        "output": "y",
        "scales": "scales_h",
        "N": "samples",
        "C": "channels",
        "HxW": "positions",
        "group": "groups",
        "sorted": "in_order",
    }
)
"""Names that a form may have instead of those of the operator's schema."""
MAX_CONSTANT: Final = 256
"""Most numbers of a constant tensor in a form: each of them is an operator of the graph until it is simplified."""
VALUE_TOLERANCE: Final = 1e-5
"""Error of a form in float64, relative to the norm of the operator's result: below the tolerance of an export."""
ROUGH_TOLERANCE: Final = 1e-3
"""The same in the dtypes of an example."""


def check_own(what: str, own: Decompositions) -> None:
    """Raise UnsupportedModel unless each key is an operator and each value a function with its arguments.

    Args:
        what: Prefix of error messages.
        own: The decompositions.
    """
    for operator, form in own.items():
        if not isinstance(operator, OpOverload):
            raise UnsupportedModel(
                f"{what}: got the key {operator!r}, expected an operator overload, such as torch.ops.aten.hypot.default"
            )
        _check_signature(f"{what}: {operator}", operator, form)


def _check_signature(what: str, operator: OpOverload, form: Callable[..., object]) -> None:
    if not callable(form):
        raise UnsupportedModel(f"{what}: got {form!r}, expected a function with the arguments {operator._schema}")
    parameters = list(inspect.signature(form).parameters.values())
    hidden = [str(each) for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    plain = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    arguments = operator._schema.arguments
    expected = [each.name for each in arguments if not each.kwarg_only]
    fits = len(plain) == len(expected) and all(
        name in (argument, PLAIN_NAMES.get(argument)) for name, argument in zip(plain, expected, strict=False)
    )
    if hidden or not fits or named != {each.name for each in arguments if each.kwarg_only}:
        raise UnsupportedModel(
            f"{what}: got a function with the arguments {inspect.signature(form)}, expected those of the operator, by "
            f"name and in order: {operator._schema}"
        )


def with_own(
    table: Mapping[OpOverload, Callable[..., object]], own: Decompositions
) -> dict[OpOverload, Callable[..., object]]:
    """Return a decomposition table with an App's own forms on top. Each call of these checks the result."""
    return {**table, **{operator: _checked(operator, form) for operator, form in own.items()}}


class _ComputedConstants(TorchFunctionMode):
    """Computes the constant tensors of a form. A graph of plain operators has no place for their bytes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.tensor:
            make: Callable[..., Tensor] = torch.tensor
            with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), unset_fake_temporarily():
                value = make(*args, **{name: each for name, each in kwargs.items() if name == "dtype"})
            return self._computed(value)
        if any(is_fake(each) for each in args):
            # A tensor with values among those of a trace was made outside of the form.
            args = [self._computed(each) if type(each) is Tensor and not is_fake(each) else each for each in args]
        return func(*args, **kwargs)

    def _computed(self, value: Tensor) -> Tensor:
        if value.numel() > MAX_CONSTANT:
            raise UnsupportedModel(
                f"{self._what}: got a constant tensor of {value.numel()} numbers, expected at most {MAX_CONSTANT}; "
                "compute them from torch.arange, or keep them as a buffer of the module"
            )
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            listed = value.flatten().tolist()
        numbers = [torch.full((), number, dtype=value.dtype) for number in listed]
        return torch.stack(numbers).reshape(value.shape) if value.dim() else numbers[0]


def _checked(operator: OpOverload, form: Callable[..., object]) -> Callable[..., object]:
    @wraps(form)
    def checked(*args: object, **kwargs: object) -> object:
        with _ComputedConstants(f"decomposition of {operator}"):
            result = form(*args, **kwargs)
        if result is NotImplemented:
            return result
        with disable_proxy_modes_tracing():
            expected = operator(*args, **kwargs)
        if _shapes(result) != _shapes(expected):
            raise UnsupportedModel(
                f"decomposition of {operator}: got {_shapes(result)}, expected {_shapes(expected)} like the operator; "
                "return tensors of its shapes and dtypes"
            )
        return result

    return checked


def _tensors(result: object) -> list[object]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _shapes(result: object) -> str:
    return ", ".join(
        f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        for each in _tensors(result)
    )


def check_decomposition(
    operator: OpOverload, function: Callable[..., object], examples: Iterable[Sequence[object]]
) -> None:
    """Check a decomposition against torch's own operator: arguments, shapes, values and gradients.

    Values and gradients are compared in float64, and the values also in the dtypes of the examples. The gradients of an
    operator without a derivative are not compared. The function is called with tensors that have no values, too, as
    an export calls it.

    Args:
        operator: The operator overload.
        function: Its decomposition.
        examples: Positional arguments of some calls. Choose points at which the operator is differentiable.

    Raises:
        UnsupportedModel: The arguments, or the shapes and dtypes of a result differ, or the function reads values.
        AssertionError: A value or a gradient differs, the function writes to an argument or returns ``NotImplemented``,
            or no example is given. The text says by how much.
    """
    what = f"decomposition of {operator}"
    _check_signature(what, operator, function)
    form = _checked(operator, function)
    num = 0
    for num, example in enumerate(examples, start=1):
        where = f"{what}: example {num}"
        _check_without_values(what, form, example)
        _check_call(where, form, operator, example)
        wide = [_widened(value) for value in example]
        values, expected = _values(form(*wide)), _values(operator(*wide))
        _check_close(f"{where}: value", values, expected, VALUE_TOLERANCE)
        _check_close(f"{where}: gradient", *_slopes(operator, form, wide), VALUE_TOLERANCE)
    assert num, f"{what}: got no examples, expected at least one"


def _check_without_values(what: str, form: Callable[..., object], example: Sequence[object]) -> None:
    """Call a form with tensors that have shapes and no values. Raises UnsupportedModel if it reads them."""
    try:
        with FakeTensorMode() as mode:
            form(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in example))
    except (DataDependentOutputException, DynamicOutputShapeException) as exc:
        raise UnsupportedModel(
            f"{what}: got a function that reads values of a tensor ({exc}), expected one of operators alone, because "
            "an export traces it once; use torch.where instead of a branch"
        ) from exc


def _check_call(where: str, form: Callable[..., object], operator: OpOverload, example: Sequence[object]) -> None:
    """Check the values of a call in the dtypes of the example, and that the arguments stay as they are."""
    expected = operator(*example)
    copies = [value.clone() if isinstance(value, Tensor) else value for value in example]
    result = form(*copies)
    assert result is not NotImplemented, (
        f"{where}: the function returned NotImplemented, so an export leaves the operator as it is; give an example "
        "for which it returns a result"
    )
    for index, (before, after) in enumerate(zip(example, copies, strict=True)):
        same = not isinstance(before, Tensor) or torch.equal(before, after)  # type: ignore[arg-type]
        assert same, f"{where}: the function writes to its argument {index}; write to a copy"
    _check_close(f"{where}: value", _values(result), _values(expected), ROUGH_TOLERANCE)


def _check_close(what: str, got: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> None:
    for index, (one, other) in enumerate(zip(got, exact, strict=True)):
        error, size = float((one - other).norm()), float(other.norm())
        assert error <= tolerance * size + 1e-12, (
            f"{what} {index} differs from torch's by {error:.1e} (L2 norm), expected at most {tolerance:.0e} of its "
            f"norm {size:.1e}"
        )


def _widened(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def _values(result: object) -> list[Tensor]:
    return [each.detach().double() for each in _tensors(result) if isinstance(each, Tensor)]


def _slopes(
    operator: OpOverload, form: Callable[..., object], arguments: Sequence[object]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of a form and of its operator; none if the operator has no derivative."""
    leaves = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    try:
        expected = _gradients(operator(*arguments), leaves)
    except (NotImplementedError, RuntimeError):
        return [], []
    return _gradients(form(*arguments), leaves), expected


def _gradients(result: object, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of a call's results."""
    total = torch.zeros((), dtype=torch.float64)
    for each in _tensors(result):
        if isinstance(each, Tensor) and each.requires_grad:
            # Other weights than ones: the gradient of a plain sum hides a missing factor.
            total = total + (each * torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).reshape(each.shape)).sum()
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True))

"""An App's own decompositions: validated when the App is created, and checked on each call while a graph is traced."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fanin.protos.errors import InvalidInput, UnsupportedModel

Decompositions = Mapping[OpOverload, Callable[..., object]]
"""The form of each operator. If a form returns ``NotImplemented``, the operator is kept."""
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
    decompositions: object = own
    if not isinstance(decompositions, Mapping):
        raise UnsupportedModel(
            f"{what}: got {decompositions!r}, expected a function by operator overload, such as "
            "{torch.ops.aten.hypot.default: form}",
            code="FN-0791",
        )
    for operator, form in own.items():
        _check_operator(what, operator)
        _check_signature(f"{what}: {operator}", operator, form)


def _check_operator(what: str, operator: object) -> None:
    if not isinstance(operator, OpOverload):
        raise UnsupportedModel(
            f"{what}: got the key {operator!r}, expected an operator overload, such as torch.ops.aten.hypot.default",
            code="FN-0791",
        )


def _check_signature(what: str, operator: OpOverload, form: Callable[..., object]) -> None:
    if not callable(form):
        raise UnsupportedModel(
            f"{what}: got {form!r}, expected a function with the arguments {operator._schema}", code="FN-0791"
        )
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
            f"name and in order: {operator._schema}",
            code="FN-0791",
        )


def with_own(
    table: Mapping[OpOverload, Callable[..., object]], own: Decompositions
) -> dict[OpOverload, Callable[..., object]]:
    """Return a decomposition table with an App's own forms on top. Each call of these checks the result."""
    return {**table, **{operator: _checked(operator, form) for operator, form in own.items()}}


class _ComputedConstants(TorchFunctionMode):
    """Computes the constant tensors of a form. A graph of plain operators has no place for their bytes.

    Functions of constants alone run with their values, so only a constant that meets a tensor of the trace counts.
    """

    def __init__(self, what: str, is_traced: bool) -> None:
        super().__init__()
        self._what, self._is_traced = what, is_traced

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
        if not self._is_traced:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors and all(map(_has_values, tensors)):
            with disable_proxy_modes_tracing(), unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = tree_map(self._traced, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _traced(self, value: object) -> object:
        """Return an argument of a function; a tensor with values among those of a trace is from outside of the form."""
        return self._computed(value) if isinstance(value, Tensor) and _has_values(value) else value

    def _computed(self, value: Tensor) -> Tensor:
        if value.numel() > MAX_CONSTANT:
            raise UnsupportedModel(
                f"{self._what}: got a constant tensor of {value.numel()} numbers, expected at most {MAX_CONSTANT}; "
                "compute them from torch.arange, or keep them as a buffer of the module",
                code="FN-0792",
            )
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            listed = value.flatten().tolist()
        numbers = [torch.full((), number, dtype=value.dtype) for number in listed]
        return torch.stack(numbers).reshape(value.shape) if value.dim() else numbers[0]


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is a constant for the trace that runs."""
    mode = get_proxy_mode()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or is_fake(tensor):
        return False
    return mode is None or get_proxy_slot(tensor, mode.tracer, None) is None


class _Rules(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """Refuses a form that calls its own operator or writes to a tensor: the graph would have no end, or be wrong."""

    def __init__(self, what: str, operator: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own mode has no types
        self._what, self._operator = what, operator

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is self._operator:
            raise _calls_itself(self._what)
        # torch.tensor ends with detach_, which changes no value.
        if func._schema.is_mutable and func is not torch.ops.aten.detach_.default:
            raise UnsupportedModel(
                f"{self._what}: the function writes to a tensor ({func}), expected one that writes to none; compute a "
                "new tensor: y = x + 1 instead of x += 1, and torch.where or torch.cat instead of x[:, 0] = 1",
                code="FN-0792",
            )
        return func(*args, **(kwargs or {}))


def _calls_itself(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{what}: the function calls its own operator, or another form that does, expected other operators alone, "
        "because an export replaces that call, too; return NotImplemented to leave the operator as it is",
        code="FN-0792",
    )


def _checked(operator: OpOverload, form: Callable[..., object]) -> Callable[..., object]:
    """Return a form that raises UnsupportedModel, with the operator's name, for each mistake on a call."""
    what = f"decomposition of {operator}"

    @wraps(form)
    def checked(*args: object, **kwargs: object) -> object:
        is_traced = get_proxy_mode() is not None or any(map(is_fake, tree_leaves((args, kwargs))))
        try:
            with _ComputedConstants(what, is_traced), _Rules(what, operator):
                result = form(*args, **kwargs)
        except UnsupportedModel:
            raise
        except RecursionError as exc:  # also by way of another form
            raise _calls_itself(what) from exc
        except Exception as exc:  # the App's own code may raise anything
            from fanin.edge.export.diagnosis.raised import refusal_of_form

            raise refusal_of_form(what, exc) from exc
        if result is NotImplemented:
            return result
        # Without the modes of the trace, in which a composite operator would call the form.
        with _disable_current_modes(), no_python_dispatcher():
            expected = operator(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        if _shapes(result) != _shapes(expected):
            raise UnsupportedModel(
                f"{what}: got {_shapes(result)}, expected {_shapes(expected)} like the operator; "
                "return tensors of its shapes and dtypes, and a tuple only if the operator returns several",
                code="FN-0792",
            )
        return result

    return checked


def _without_values(value: object) -> object:
    """Return an argument for a call that computes shapes alone, at the sizes that the trace has as its example."""
    if isinstance(value, Tensor):
        sizes, strides = (tuple(map(_example_size, row)) for row in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return _example_size(value) if isinstance(value, torch.SymInt) else value


def _example_size(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _tensors(result: object) -> list[object]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _shapes(result: object) -> str:
    """Return the form of a result in words: of one tensor, or of several in parentheses."""
    rows = [
        f"{each.dtype} {tuple(map(_example_size, each.shape))}" if isinstance(each, Tensor) else type(each).__name__
        for each in _tensors(result)
    ]
    return f"a tuple ({', '.join(rows)})" if isinstance(result, tuple | list) else rows[0]


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
        UnsupportedModel: An export would refuse the function. Its arguments, or the shapes and dtypes of a result
            differ. Or it reads values, writes to a tensor, calls the operator or raises an exception.
        InvalidInput: An example is not a tuple of arguments that the operator accepts.
        AssertionError: A value or a gradient differs, the function returns ``NotImplemented``, or no example is given.
            The text has the difference.
    """
    what = f"decomposition of {operator}"
    _check_operator("check_decomposition", operator)
    _check_signature(what, operator, function)
    form = _checked(operator, function)
    num = 0
    if isinstance(examples, Tensor) or not isinstance(examples, Iterable):
        raise InvalidInput(
            f"{what}: examples: got {type(examples).__name__}, expected a list of tuples; write [(x,)]", code="FN-0793"
        )
    for num, example in enumerate(examples, start=1):
        where = f"{what}: example {num}"
        _check_example(where, operator, example)
        _check_without_values(form, example)
        _check_call(where, form, operator, example)
        wide = [_widened(value) for value in example]
        values, expected = _values(form(*wide)), _values(operator(*wide))
        _check_close(f"{where}: value", values, expected, VALUE_TOLERANCE)
        _check_close(f"{where}: gradient", *_slopes(operator, form, wide), VALUE_TOLERANCE)
    assert num, f"{what}: got no examples, expected at least one"


def _check_example(where: str, operator: OpOverload, example: object) -> None:
    """Raise InvalidInput unless an example is a tuple of arguments with which the operator can be called."""
    if not isinstance(example, tuple | list):
        raise InvalidInput(
            f"{where}: got {type(example).__name__}, expected a tuple of the arguments {operator._schema}; write (x,) "
            "for a single one",
            code="FN-0793",
        )
    try:
        operator(*example)
    except (RuntimeError, TypeError, ValueError, IndexError) as exc:
        text = str(exc).strip().splitlines()[0]
        raise InvalidInput(
            f"{where}: torch refuses the arguments ({text}), expected those of {operator._schema}; correct the example",
            code="FN-0793",
        ) from exc


def _check_without_values(form: Callable[..., object], example: Sequence[object]) -> None:
    """Call a form with tensors that have shapes and no values, as an export does. Raises UnsupportedModel."""
    with FakeTensorMode() as mode:
        form(*tree_map(lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, tuple(example)))


def _check_call(where: str, form: Callable[..., object], operator: OpOverload, example: Sequence[object]) -> None:
    """Check the values of a call in the dtypes of the example."""
    expected, result = operator(*example), form(*example)
    assert result is not NotImplemented, (
        f"{where}: the function returned NotImplemented, so an export leaves the operator as it is; give an example "
        "for which it returns a result"
    )
    _check_close(f"{where}: value", _values(result), _values(expected), ROUGH_TOLERANCE)


def _check_close(what: str, actual: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> None:
    for index, (one, other) in enumerate(zip(actual, exact, strict=True)):
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

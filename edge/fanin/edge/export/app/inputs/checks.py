"""The values of an App's data: dtypes, shapes and finite numbers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fanin.edge.runtimes.models import extra_axis
from fanin.protos.errors import UnsupportedModel

AS_FLOAT32: Final = "convert it by x.float(), or x.astype('float32') for an array"
CONVERSIONS: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: AS_FLOAT32,
        torch.float16: AS_FLOAT32,
        torch.bfloat16: AS_FLOAT32,
        torch.bool: "convert a mask by x.int(), and back by mask.bool() in forward",
        torch.int64: "convert them by x.int() or x.float()",
        torch.uint8: "convert pixels by x.float() / 255, on devices too, or pass them as raw= with preprocess=",
    }
)
"""The advice for data of a common dtype that no graph accepts."""
OTHER_LABELS: Final = "; for a loss that needs others, declare them by targets= with num_classes=0"


def as_tensor(what: str, value: object) -> Tensor:
    """Return data as a contiguous tensor without a gradient.

    Raises:
        UnsupportedModel: The data is neither a tensor nor a numpy array, or is not on the CPU.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise UnsupportedModel(
                f"{what}: got a numpy array of {value.dtype}, expected one of numbers", code="FN-0727"
            )
        # A copy: torch would share the memory of an array that is read-only or that changes later.
        value = torch.from_numpy(np.array(value, order="C"))
    if not isinstance(value, Tensor):
        advice = (
            "pass x alone, without labels; a list of samples becomes a tensor by torch.stack"
            if isinstance(value, tuple | list)
            else "collect the inputs of some batches by torch.cat"
        )
        raise UnsupportedModel(
            f"{what}: got {type(value).__name__}, expected one tensor or numpy array (n, ...); {advice}", code="FN-0727"
        )
    if value.device.type != "cpu":
        raise UnsupportedModel(f"{what}: is on {value.device}, expected cpu; call .cpu()", code="FN-0729")
    return value.detach().contiguous()


def as_input(what: str, value: object) -> Tensor:
    """Return data as ``as_tensor`` does, with int64 as int32. Raises UnsupportedModel if an integer is too large."""
    tensor = as_tensor(what, value)
    if tensor.dtype != torch.int64 or not tensor.numel():
        return tensor
    lowest, highest, limit = int(tensor.min()), int(tensor.max()), torch.iinfo(torch.int32).max
    if not -limit <= lowest <= highest <= limit:
        raise UnsupportedModel(
            f"{what}: got integers from {lowest} to {highest}, expected int32 numbers, as devices have them",
            code="FN-0728",
        )
    return tensor.int()


def check_input(what: str, values: Tensor, *others: torch.dtype) -> None:
    """Raise UnsupportedModel unless values are finite float32, int32 or another dtype (n, ...), n at least 2."""
    known = values.dtype in (torch.float32, torch.int32, *others)
    if known and len(values.shape) > 1:
        check_finite(what, values)
    if not known or values.dim() < 2 or len(values) < 2:
        advice = "use x[:, None] for one number in each sample" if values.dim() == 1 else "use some real inputs"
        advice = advice if known else CONVERSIONS.get(values.dtype, AS_FLOAT32)
        raise UnsupportedModel(
            f"{what}: got {values.dtype} {tuple(values.shape)}, expected float32 values or int32 tokens "
            f"{'or uint8 bytes ' if others else ''}(n, ...) with n of at least 2; {advice}",
            code="FN-0728",
        )


def example_targets(what: str, value: object, num_classes: int) -> Tensor:
    """Return the declared targets of an App (n, ...) as float32 or int32. Raises UnsupportedModel."""
    y = as_input(what, value)
    if not y.dim() or len(y) < 2:
        raise UnsupportedModel(f"{what}: got {tuple(y.shape)}, expected (n, ...) with n of at least 2", code="FN-0734")
    y = y.float() if y.is_floating_point() else y.int()
    check_target_values(what, y, num_classes, torch.int32 if num_classes else y.dtype)
    return y


def check_target_values(what: str, y: Tensor, num_classes: int, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel unless ``y`` can be targets. Their exact shape is only known at the export.

    Args:
        what: The targets, for the message.
        y: The targets.
        num_classes: Number of classes, 0 for values.
        dtype: Dtype of the targets of the App's graphs: int32 or float32.
    """
    is_values = y.is_floating_point()
    if is_values and y.dim():
        check_finite(what, y.reshape(len(y), -1))
    least, most = -1 if y.dim() > 1 else 0, num_classes - 1 if num_classes else torch.iinfo(torch.int32).max
    in_range = is_values or least <= int(y.min()) <= int(y.max()) <= most
    if is_values == dtype.is_floating_point and in_range:
        return
    if dtype.is_floating_point:
        expected = "finite float values; convert integers by y.float(), or declare them by targets="
    elif num_classes:
        expected = f"integers from {least} to {most}"
        if is_values and num_classes in y.shape[1:]:
            axis = y.shape.index(num_classes, 1)
            expected += f"; convert one-hot values by y.argmax({-1 if axis == y.dim() - 1 else axis})"
        if not is_values and int(y.min()) >= least + 1 and int(y.max()) == num_classes:
            expected += "; count classes from 0: y - 1"
    else:
        expected = f"integers from {least} to {most} as targets; declare others as values by targets=y.float()"
    raise UnsupportedModel(
        f"{what}: got {y.dtype} {tuple(y.shape)} from {y.min()} to {y.max()}, expected {expected}", code="FN-0734"
    )


def check_target_shape(what: str, y: Tensor, expected: tuple[int, ...] | None, num_classes: int) -> None:
    """Raise UnsupportedModel unless targets y (n, ...) have the shape that the loss compares.

    Args:
        what: The targets, for the message.
        y: The targets of all samples.
        expected: The shape of one target; None if it is not known.
        num_classes: Number of classes, 0 for values.
    """
    if expected is None or tuple(y.shape[1:]) == expected:
        return
    advice = ""
    if num_classes and (axis := extra_axis(y.shape[1:], expected, num_classes)):
        advice = f"; convert one-hot values by y.argmax({axis})"
    elif axis := extra_axis(y.shape[1:], expected, 1):
        advice = f"; write y.squeeze({axis})"
    elif (*y.shape[1:], 1) == expected:
        advice = "; write y.unsqueeze(-1)"
    elif num_classes:
        other_axis = extra_axis((*expected, num_classes), y.shape[1:], num_classes)
        advice = "; set class_axis in the App to the axis of the classes" if other_axis else OTHER_LABELS
    shape = (len(y), *expected)
    raise UnsupportedModel(f"{what}: got {tuple(y.shape)}, expected {shape}{advice}", code="FN-0734")


def check_finite(what: str, values: Tensor) -> None:
    """Raise UnsupportedModel for a sample (n, ...) with NaN or infinity, and name the first one."""
    bad = (~values.flatten(start_dim=1).isfinite().all(dim=1)).nonzero().flatten() if values.numel() else values
    if len(bad):
        first = int(bad[0])
        kind = "NaN" if bool(values[first].isnan().any()) else "infinity"
        raise UnsupportedModel(
            f"{what}: got {kind} in sample {first} ({len(bad)} of {len(values)} samples have values that are not "
            "finite), expected finite values only; remove these samples, or fix the code that computes them",
            code="FN-0730",
        )

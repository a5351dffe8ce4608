"""Examples: inputs and targets of a model, checked when they are created."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Inputs, NamedInputs, Runtime
from fanin.edge.runtimes.graphs import NO_TOKEN, RESERVED
from fanin.edge.runtimes.models import label_remedy, model_inputs, open_preprocess
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput, SubjectError

Y: Final = "y"
NamedArrays = Mapping[str, npt.NDArray[np.generic]]
KINDS: Final = (np.dtype(np.float32), np.dtype(np.int32))
RAW_KINDS: Final = (*KINDS, np.dtype(np.uint8))
SLICE_VALUES: Final = 1 << 16
"""Values that are checked at once. Their copies need half a megabyte for data of any size."""
MAX_CALIBRATION: Final = 256
"""Examples that ranges are measured on, one at a time. A Round waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Examples:
    """Inputs and their targets, at least one example, every value finite.

    Attributes:
        inputs: The inputs of the model by name, each (n, ...): float32, int32, or uint8 for a Bundle with
            ``preprocess``. The only input of most models is named ``x``.
        y: Targets: labels (n,) int32, next tokens (n, T) int32 with -1 for none, values (n, ...) float32, or the
            integers (n, ...) int32 of a loss of one's own.

    Raises:
        ValueError: Names, shapes, types or values differ from this description.
    """

    inputs: NamedInputs
    y: Inputs

    def __post_init__(self) -> None:
        fault = (
            _array_fault(self.inputs, self.y)
            or shape_fault(self.inputs, self.y)
            or _dtype_fault(self.inputs, self.y)
            or value_fault(self.inputs, self.y)
        )
        if fault is not None:
            raise SubjectError("examples", fault)

    def __repr__(self) -> str:
        arrays = {**self.inputs, Y: self.y}.items()
        return f"Examples({', '.join(f'{name}={array.dtype} {array.shape}' for name, array in arrays)})"

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Int64s) -> "Examples":
        """Return the examples at these indices, in this order, at least one."""
        if not len(indices):
            raise ValueError("examples: got no indices, expected at least one")
        # Rows of examples that were checked need no check. A simulation takes those of each client in each Round.
        subset = object.__new__(Examples)
        object.__setattr__(subset, "inputs", {name: array[indices] for name, array in self.inputs.items()})
        object.__setattr__(subset, "y", self.y[indices])
        return subset


def joined(parts: Sequence[Examples]) -> Examples:
    """Return the examples of all parts, one part after the other."""
    inputs = {name: np.concatenate([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Examples(inputs=inputs, y=np.concatenate([part.y for part in parts]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Disjoint parts of a data set: ``public`` for the datacenter, ``test``, and one part for each device."""

    public: Examples
    test: Examples
    devices: tuple[Examples, ...]


def check_examples(
    examples: Examples, shapes: Mapping[str, tuple[int, ...]], num_classes: int, dtype: str, what: str = "examples"
) -> None:
    """Raise InvalidInput unless a model can use the examples.

    Args:
        examples: The examples.
        shapes: The shape of one sample by input of the model.
        num_classes: Number of its classes; 0 for values.
        dtype: Dtype of its targets.
        what: Prefix of the message.
    """
    check_inputs(examples, shapes, what)
    if examples.y.dtype != dtype:
        kind = f"labels below {num_classes}" if num_classes else "values" if dtype == "float32" else "integers"
        raise InvalidInput(
            f"{what}: got y of {examples.y.dtype}, expected {dtype} {kind}; write y = y.astype(np.{dtype})",
            code="FN-0856",
        )
    if num_classes and examples.y.max() >= num_classes:
        raise InvalidInput(
            f"{what}: got label {examples.y.max()}, expected 0 to {num_classes - 1}"
            f"{label_remedy(examples.y, num_classes)}",
            code="FN-0856",
        )


def check_inputs(examples: Examples, shapes: Mapping[str, tuple[int, ...]], what: str = "examples") -> None:
    """Raise InvalidInput unless the examples have inputs of these names and shapes. See ``check_examples``."""
    if missing := [name for name in shapes if name not in examples.inputs]:
        raise InvalidInput(
            f"{what}: got the inputs {sorted(examples.inputs)}, expected {sorted(shapes)}; add {missing}",
            code="FN-0853",
        )
    for name, shape in shapes.items():
        array = examples.inputs[name]
        if array.shape[1:] != shape:
            raise InvalidInput(f"{what}: got {name} of shape {array.shape[1:]}, expected {shape}", code="FN-0858")
        if array.dtype == np.uint8:
            raise InvalidInput(
                f"{what}: got {name} of uint8, expected floats, scaled as the model wants them, or int32 tokens",
                code="FN-0858",
            )


def calibration_part(examples: Examples) -> Examples:
    """Return up to ``MAX_CALIBRATION`` examples in equal distances: those on which a data set measures ranges."""
    num = min(len(examples), MAX_CALIBRATION)
    return examples.take(np.arange(num) * len(examples) // num)


def model_examples(examples: Examples, bundle: Bundle, runtime: Runtime) -> Examples:
    """Return examples as inputs of the model. Raises InvalidInput or ValueError if they do not fit it."""
    manifest = bundle.manifest
    inputs = model_inputs(bundle, examples.inputs, open_preprocess(runtime, bundle))
    ready = examples if inputs is examples.inputs else Examples(inputs=inputs, y=examples.y)
    # The shapes are those of the model, as just checked; they follow from the length of the rows, if it has several.
    shapes = {name: array.shape[1:] for name, array in inputs.items()}
    (dtype,) = (port.dtype for port in manifest.signatures["evaluate"].inputs if port.name == Y)
    check_examples(ready, shapes, manifest.num_classes, dtype)
    return ready


def conversion(name: str, array: npt.NDArray[np.generic]) -> str:
    """Return the code that converts an array to a type of ``Examples``."""
    return f"{name} = {name}.astype(np.{'int32' if array.dtype.kind in 'biu' else 'float32'})"


def _array_fault(inputs: object, y: object) -> str | None:
    """Return the first value that is no numpy array; None if there is none."""
    if not isinstance(inputs, Mapping):
        return f"got inputs of {type(inputs).__name__}, expected arrays by name; write inputs={{'x': x}}"
    for name, array in {**inputs, Y: y}.items():
        if not isinstance(array, np.ndarray):
            library = type(array).__module__.partition(".")[0]
            advice = f"{name} = {name}.numpy()" if library == "torch" else f"{name} = np.asarray({name})"
            return f"got {name} of {type(array).__name__}, expected a numpy array; write {advice}"
    return None


def _dtype_fault(inputs: NamedArrays, y: npt.NDArray[np.generic]) -> str | None:
    """Return the fault in the types of these arrays; None if there is none."""
    for name, array in {**inputs, Y: y}.items():
        kinds = KINDS if name == Y else RAW_KINDS
        if array.dtype not in kinds:
            expected = " or ".join(map(str, kinds))
            return f"got {name} of {array.dtype}, expected {expected}; write {conversion(name, array)}"
    return None


def shape_fault(inputs: NamedArrays, y: npt.NDArray[np.generic]) -> str | None:
    """Return the fault in the names and shapes of these arrays; None if there is none."""
    if not inputs or RESERVED & inputs.keys():
        return f"got the inputs {sorted(inputs)}, expected at least one, none of them named {sorted(RESERVED)}"
    arrays = {**inputs, Y: y}
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    if y.ndim < 1 or any(array.ndim < 2 for array in inputs.values()):
        return f"got {shapes}, expected (n, ...) and y (n,); give an input of numbers the shape (n, 1)"
    if len({len(array) for array in arrays.values()}) > 1:
        return f"got arrays of different lengths ({shapes}), expected one row of each for every example"
    if any(array.size == 0 for array in arrays.values()):
        return f"got no examples ({shapes}), expected at least one"
    return None


def value_fault(inputs: NamedArrays, y: npt.NDArray[np.generic]) -> str | None:
    """Return the fault in the values of these arrays; None if there is none. Only floats can be NaN or infinite."""
    for name, array in {**inputs, Y: y}.items():
        if array.dtype.kind == "f":
            bad, first = _not_finite(array)
            if bad:
                return (
                    f"got {bad} values of {name} that are not finite float32 numbers, the first one in example "
                    f"{first}, expected none"
                )
            continue
        least = NO_TOKEN if name == Y and y.ndim > 1 else 0
        if array.min() < least or array.max() > np.iinfo(np.int32).max:
            what = "labels" if name == Y else f"tokens of {name}"
            return f"got {what} from {array.min()} to {array.max()}, expected {least} to {np.iinfo(np.int32).max}"
    return None


def _not_finite(array: npt.NDArray[np.generic]) -> tuple[int, int]:
    """Return how many floats are not finite as float32, and the index of the first example with one, 0 for none.

    Slices avoid a copy of all data.
    """
    count = first = begin = 0
    with (
        np.errstate(over="ignore"),
        np.nditer(
            [array],
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_dtypes=[np.dtype(np.float32)],
            order="C",
            casting="same_kind",
            buffersize=SLICE_VALUES,
        ) as slices,
    ):
        for part in slices:
            is_bad = ~np.isfinite(part)
            num_bad = int(np.count_nonzero(is_bad))
            if num_bad and not count:
                first = (begin + int(np.argmax(is_bad))) // (array.size // len(array))
            count += num_bad
            begin += len(part)
    return count, first

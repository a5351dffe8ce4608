"""What a device trains on: the example store, and how examples become batches, held-out parts and partitions.

The rule: every choice comes from a Generator or a number that is passed in, never from a clock or a device id, so
a partition gives the same batches wherever it lies. Files are read without pickle, and a file that is no good is
one InvalidInput that names the file, the array and what to do.
"""

import logging
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.runtimes.base import Inputs, PaddedBatch
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

LOG = logging.getLogger("fanin.clients")

KINDS: Final = (np.dtype(np.float32), np.dtype(np.int32))
RAW_KINDS: Final = (*KINDS, np.dtype(np.uint8))
HOLD_OUT_STREAM: Final = 0x686F6C64
"""Keeps the generator that picks a validation part apart from all others of the same partition."""
UNREADABLE: Final = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What numpy and zipfile raise at files that are none: RuntimeError if encrypted or of an unknown compression, and much
else at a header that is in Python's words and describes no array."""
SLICE_VALUES: Final = 1 << 16
"""Values that are checked at once: their copies take half a megabyte, whatever the size of the data."""
MIN_EXAMPLES: Final = 2
"""One to train on and one to validate on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Examples:
    """Inputs ``x`` (n, ...), float32, int32 tokens, or uint8 for a Bundle's ``preprocess``, and ``y``, what a model is
    to say to them: labels (n,) int32, next tokens (n, T) int32 (-1: none), or values (n, ...) float32. n is at least
    1, every value is finite."""

    x: Inputs
    y: Inputs

    def __post_init__(self) -> None:
        fault = _shape_fault(self.x, self.y)
        if fault is None and (self.x.dtype not in RAW_KINDS or self.y.dtype not in KINDS):
            fault = f"got x {self.x.dtype} and y {self.y.dtype}, expected float32 or int32 (or x uint8)"
        fault = fault or _value_fault(self.x, self.y)
        if fault is not None:
            raise ValueError(f"examples: {fault}")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Int64s) -> "Examples":
        """The examples at these places, in this order."""
        return Examples(x=self.x[indices], y=self.y[indices])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A data set in disjoint parts: ``public`` for the datacenter, ``test``, and one part a device."""

    public: Examples
    test: Examples
    devices: tuple[Examples, ...]


class ExampleStore(Protocol):
    """Where a device's examples come from.

    A device reads the three attributes once at the start of each Round (``snapshot``) and uses these values until the
    Round ends. So the data may grow while the client runs, by these rules:

    - Return a new ``Examples`` when the data has changed, and the same object while it has not: work on it is cached.
      Do not change the arrays of one that was returned.
    - ``train`` and ``validation`` share no example. An example never moves from one to the other, so it does not matter
      that they are read one after the other.
    - ``partition`` is the number of this part of the population's data; a device's random choices come from
      (seed, partition, round).

    An attribute that raises, or that is of another type, gives up the Round's Assignment with that reason. The device
    takes part in the next Round.
    """

    @property
    def partition(self) -> int: ...

    @property
    def train(self) -> Examples: ...

    @property
    def validation(self) -> Examples: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryStore:
    """An example store in memory."""

    partition: int
    train: Examples
    validation: Examples

    def __post_init__(self) -> None:
        if self.partition < 0:
            raise ValueError(f"example store: got partition {self.partition}, expected 0 or more")


def snapshot(store: ExampleStore) -> MemoryStore:
    """Return what a store holds now, for one Round.

    Raises:
        InvalidInput: An attribute cannot be read, or has another type or value than ``ExampleStore`` says.
    """
    partition = _attribute(store, "partition")
    if not isinstance(partition, int | np.integer) or partition < 0:
        raise InvalidInput(f"example store: partition: got {partition!r}, expected an integer of at least 0")
    train, validation = _part(store, "train"), _part(store, "validation")
    return MemoryStore(partition=int(partition), train=train, validation=validation)


def _part(store: ExampleStore, name: str) -> Examples:
    part = _attribute(store, name)
    if not isinstance(part, Examples):
        raise InvalidInput(
            f"example store: {name}: got {type(part).__name__}, "
            "expected fanin.clients.data.examples.Examples(x=..., y=...)"
        )
    return part


def _attribute(store: ExampleStore, name: str) -> object:
    try:
        value: object = getattr(store, name)
    except Exception as exc:
        # It is the app's own code, which may raise anything.
        LOG.exception("example store: %s cannot be read", name)
        raise InvalidInput(f"example store: {name}: {type(exc).__name__}: {exc}") from exc
    return value


def hold_out(examples: Examples, num_held: int, rng: np.random.Generator) -> tuple[Examples, Examples]:
    """(the rest, ``num_held`` examples with the same mix of labels; of sequences or values, any of them)."""
    if not 0 < num_held < len(examples):
        raise ValueError(f"hold out: got {num_held} of {len(examples)} examples, expected 1 to {len(examples) - 1}")
    is_labels = examples.y.ndim == 1 and examples.y.dtype == np.int32
    # What has no labels is all of one kind.
    kinds = examples.y if is_labels else np.zeros(len(examples), np.int32)
    held = stratified_choice(kinds, num_held, rng)
    rest = np.setdiff1d(np.arange(len(examples)), held)
    return examples.take(rest), examples.take(held)


def memory_store(examples: Examples, partition: int, validation_fraction: float) -> MemoryStore:
    """A store that holds out the same validation part each time, at least one example on either side.

    Raises ValueError for a fraction that is not between 0 and 1, or for a single example.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"example store: got validation fraction {validation_fraction}, expected between 0 and 1")
    if len(examples) < MIN_EXAMPLES:
        raise ValueError(f"example store: got {len(examples)} example, expected at least {MIN_EXAMPLES}")
    num_held = min(max(1, round(len(examples) * validation_fraction)), len(examples) - 1)
    rng = np.random.default_rng([HOLD_OUT_STREAM, partition])
    train, validation = hold_out(examples, num_held, rng)
    return MemoryStore(partition=partition, train=train, validation=validation)


def open_npz(path: Path, partition: int, validation_fraction: float) -> MemoryStore:
    """The store of an .npz file with arrays ``x`` and ``y``.

    Raises InvalidInput if the file is not one or has a single example.
    """
    examples = read_npz(path)
    if len(examples) < MIN_EXAMPLES:
        raise InvalidInput(f"{path}: got 1 example, expected at least {MIN_EXAMPLES}: one is held out for validation")
    return memory_store(examples, partition, validation_fraction)


def read_npz(path: Path) -> Examples:
    """The examples in an .npz file: ``x`` of floats (n, ...), tokens or bytes, ``y`` of labels, tokens or floats.

    Raises InvalidInput.
    """
    try:
        with path.open("rb") as file:
            x, y = _arrays(path, file)
    except FileNotFoundError as exc:
        raise InvalidInput(f"{path}: no such file; expected an .npz file with arrays x and y") from exc
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not a readable .npz file of plain arrays ({exc})") from exc
    found = _dtype_fault(x, y) or _shape_fault(x, y) or _value_fault(x, y)
    if found is not None:
        raise InvalidInput(f"{path}: {found}")
    return Examples(x=x.astype(np.uint8, copy=False) if x.dtype == np.uint8 else _narrow(x), y=_narrow(y))


def check_examples(examples: Examples, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise InvalidInput unless a model with these inputs and classes (0: values) can use the examples."""
    if examples.x.shape[1:] != input_shape:
        raise InvalidInput(f"examples: got inputs of shape {examples.x.shape[1:]}, expected {input_shape}")
    if examples.x.dtype == np.uint8:
        raise InvalidInput("examples: got x of uint8, expected floats, scaled as the model wants them, or int32 tokens")
    if bool(num_classes) == (examples.y.dtype == np.float32):
        wanted = f"int32 labels below {num_classes}" if num_classes else "float32 values"
        raise InvalidInput(f"examples: got y of {examples.y.dtype}, expected {wanted}")
    if num_classes and examples.y.max() >= num_classes:
        raise InvalidInput(f"examples: got label {examples.y.max()}, expected 0 to {num_classes - 1}")


def batches(examples: Examples, batch_size: int, rng: np.random.Generator) -> Iterator[PaddedBatch]:
    """One epoch in an order drawn from ``rng``; the last batch may be padded."""
    yield from _batches(examples, rng.permutation(len(examples)), batch_size)


def batches_in_order(examples: Examples, batch_size: int) -> Iterator[PaddedBatch]:
    """All examples in their own order, for evaluation; the last batch may be padded."""
    yield from _batches(examples, np.arange(len(examples)), batch_size)


def stratified_choice(labels: Inputs, num_chosen: int, rng: np.random.Generator) -> Int64s:
    """Rising indices (num_chosen,) with as nearly as possible the mix of all labels (largest remainders)."""
    if not 0 <= num_chosen <= len(labels):
        raise ValueError(f"stratified choice: got {num_chosen} of {len(labels)} examples")
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * (num_chosen / max(1, len(labels)))
    quota = np.floor(exact).astype(np.int64)
    # Ties between remainders fall by chance, or the first classes would always get the spare places.
    by_remainder = np.lexsort((rng.random(len(classes)), quota - exact))
    quota[by_remainder[: num_chosen - quota.sum()]] += 1
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:count] for label, count in zip(classes, quota, strict=True)
    ]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def dirichlet_partition(labels: Inputs, num_parts: int, alpha: float, rng: np.random.Generator) -> tuple[Int64s, ...]:
    """Rising indices of each part: non-IID parts of equal size (Hsu, Qi and Brown 2019, arXiv 1909.06335, section 2).

    Each part draws its mix of labels q ~ Dir(alpha * K * p), where p is the mix of all labels and K their number,
    so alpha counts per label: 0.1 gives parts of one or two labels, 100 parts that all look alike. The parts take
    turns to draw a label from q, among those still left, and the next example of that label; so every example is
    in exactly one part, and every part has n // num_parts examples or one more.

    Raises ValueError if there are fewer examples than parts, or alpha is not a positive number.
    """
    if not 0 < num_parts <= len(labels):
        raise ValueError(
            f"dirichlet partition: got {num_parts} parts of {len(labels)} examples, expected 1 to that many"
        )
    if not 0.0 < alpha < np.inf:
        raise ValueError(f"dirichlet partition: got alpha {alpha}, expected a positive number")
    classes, counts = np.unique(labels, return_counts=True)
    mixes = rng.dirichlet(alpha * len(classes) * counts / len(labels), size=num_parts)  # (parts, classes)
    left = [list(rng.permutation(np.flatnonzero(labels == label))) for label in classes]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for turn, chance in enumerate(rng.random(len(labels))):
        part = turn % num_parts
        sizes = np.array([len(rest) for rest in left])
        weights = mixes[part] * (sizes > 0)
        if weights.sum() <= 0.0:
            # None of the part's own labels is left: it takes from the rest as they are.
            weights = sizes.astype(np.float64)
        bounds = np.cumsum(weights)
        index = int(np.searchsorted(bounds, chance * bounds[-1], side="right"))
        parts[part].append(left[index].pop())
    return tuple(np.sort(np.array(part, np.int64)) for part in parts)


def _batches(examples: Examples, order: Int64s, batch_size: int) -> Iterator[PaddedBatch]:
    if batch_size < 1:
        raise ValueError(f"batches: got batch size {batch_size}, expected at least 1")
    for start in range(0, len(order), batch_size):
        picked = order[start : start + batch_size]
        # Padding repeats a real example: zeros could make a loss infinite, and infinity times a mask of 0 is NaN.
        padded = np.concatenate([picked, np.repeat(picked[:1], batch_size - len(picked))])
        mask = (np.arange(batch_size) < len(picked)).astype(np.float32)
        yield PaddedBatch(x=examples.x[padded], y=examples.y[padded], mask=mask)


def _arrays(path: Path, file: BinaryIO) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise InvalidInput(f"{path}: got a single array, expected an .npz file with arrays x and y")
    with archive:
        missing = [key for key in ("x", "y") if key not in archive]
        if missing:
            raise InvalidInput(f"{path}: got arrays {sorted(archive)}, expected x and y; missing {missing}")
        return _array(path, archive, "x"), _array(path, archive, "y")


def _array(path: Path, archive: Mapping[str, object], key: str) -> npt.NDArray[np.generic]:
    found = archive[key]
    # numpy hands out a member that is no array of its own format as bare bytes.
    if not isinstance(found, np.ndarray):
        raise InvalidInput(f"{path}: {key} is {type(found).__name__}, expected an array as numpy.savez writes it")
    return found


def _dtype_fault(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> str | None:
    if x.dtype.kind != "f" and x.dtype not in (np.int32, np.uint8):
        return (
            f"got x of {x.dtype}, expected floats, scaled as the model wants them (x.astype('float32') / 255), "
            "tokens (x.astype('int32')), or bytes for a bundle with preprocess (x.astype('uint8'))"
        )
    if y.dtype.kind not in "iuf":
        return f"got y of {y.dtype}, expected integers (y.astype('int32')), or floats for a model of values"
    return None


def _narrow(array: npt.NDArray[np.generic]) -> Inputs:
    """Floats as float32, integers as int32."""
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array.astype(np.int32, copy=False)


def _num_not_finite(array: npt.NDArray[np.generic]) -> int:
    """Count the floats that are not finite as float32; in slices, so that no copy of the whole is made."""
    with (
        np.errstate(over="ignore"),
        np.nditer(
            [array],
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_dtypes=[np.dtype(np.float32)],
            casting="same_kind",
            buffersize=SLICE_VALUES,
        ) as slices,
    ):
        return sum(len(part) - int(np.count_nonzero(np.isfinite(part))) for part in slices)


def _shape_fault(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> str | None:
    """What is wrong with the shapes of these arrays, or None."""
    if y.ndim < 1 or x.ndim < 2:
        return f"got x {x.shape} and y {y.shape}, expected (n, ...) and (n,)"
    if len(x) != len(y):
        return f"got {len(x)} inputs and {len(y)} labels, expected as many of one as of the other"
    if len(x) == 0 or x.size == 0 or y.size == 0:
        return f"got no examples (x {x.shape}, y {y.shape}), expected at least one"
    return None


def _value_fault(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> str | None:
    """What is wrong with the values of these arrays, or None; only floats can be NaN or infinite."""
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind == "f":
            bad = _num_not_finite(array)
            if bad:
                return f"got {bad} values of {name} that are not finite float32 numbers, expected none"
            continue
        least = NO_TOKEN if name == "y" and y.ndim > 1 else 0
        if array.min() < least or array.max() > np.iinfo(np.int32).max:
            what = "labels" if name == "y" else "tokens"
            return f"got {what} from {array.min()} to {array.max()}, expected {least} to {np.iinfo(np.int32).max}"
    return None

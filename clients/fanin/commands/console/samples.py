"""Data files as inputs of a model: .npy, .npz, .csv and images.

A file is read in the form of the input that it is for (``Target``):

    .npy, .npz    arrays as they are
    .csv          one sample a row, reshaped to the input; a column named ``y`` or ``label`` has the labels
    images        uint8 pixels, channels first or last as the input has them

Pixels of a model with ``preprocess`` are raw inputs. Other models have floats, whose scale no file names: the caller
passes it.
"""

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.runtimes.graphs import form_of
from fanin.edge.signatures import Port
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

UNREADABLE: Final = (EOFError, ValueError, RuntimeError, zipfile.BadZipFile)
"""Errors of numpy for files of another format."""
IMAGES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's name of 8-bit pixels by their number of channels."""
LABEL_COLUMNS: Final = ("y", "label", "labels", "class", "target")
LABELS: Final = "y"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The inputs of a model: all of them, and the raw form of a single one if the model preprocesses it."""

    inputs: tuple[Port, ...]
    raw: Port | None = None

    def form_of(self, what: str) -> Port:
        """Return the input for pixels or rows: raw bytes if the model accepts them, otherwise its only input."""
        if len(self.inputs) != 1:
            names = sorted(port.name for port in self.inputs)
            raise InvalidInput(
                f"{what}: expected an .npz file with the arrays {names}: the model has several inputs", code="FN-1031"
            )
        return self.raw if self.raw is not None and self.raw.dtype == "uint8" else self.inputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Inputs by name, and the array ``y`` of the data: labels or values, of any shape. None without it."""

    feed: Mapping[str, Array]
    labels: Array | None = None


def read_samples(paths: Sequence[Path], target: Target, scale: float) -> ModelInputs:
    """Read the inputs of a model.

    Args:
        paths: One data file, or images of one sample each.
        target: The inputs of the model.
        scale: The divisor of uint8 values that become floats; 0.0 if none is named.

    Raises:
        InvalidInput: A file cannot be read, or does not fit the model.
    """
    check_paths(paths)
    path, what = paths[0], str(paths[0])
    if _is_image(path):
        form = target.form_of(what)
        arrays = {target.inputs[0].name: np.stack([_read_image(each, form) for each in paths])}
    elif path.suffix.lower() == ".csv":
        x, labels_of_rows = _read_table(path, target.form_of(what))
        arrays = {target.inputs[0].name: x, **labels_of_rows}
    else:
        arrays = _read_arrays(path)
    names = [port.name for port in target.inputs]
    labels = arrays.get(LABELS) if LABELS not in names else None
    feed = _feed(what, arrays, names)
    if empty := [name for name, array in feed.items() if array.ndim and not len(array)]:
        raise InvalidInput(f"{what}: got 0 samples in {', '.join(empty)}, expected at least one", code="FN-1030")
    pixels = [port for port in target.inputs if _is_pixels(feed[port.name], port, target.raw)]
    if scale and not pixels:
        dtypes = ", ".join(f"{name} {array.dtype}" for name, array in feed.items())
        raise InvalidInput(
            f"--scale: got {scale:g} for {dtypes}, expected it for uint8 pixels of a float input", code="FN-1033"
        )
    feed |= {port.name: _scaled(what, feed[port.name], port, scale) for port in pixels}
    return ModelInputs(feed=feed, labels=labels)


def check_paths(paths: Sequence[Path]) -> None:
    """Raise InvalidInput for several files that are not images."""
    if len(paths) > 1 and not all(_is_image(each) for each in paths):
        raise InvalidInput(f"--data: got {len(paths)} files, expected one, or several images", code="FN-1038")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGES


def _read_arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            arrays = {"": content} if isinstance(content, np.ndarray) else {name: content[name] for name in content}
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not a readable .npy or .npz file of plain arrays ({exc})", code="FN-1030") from exc
    wrong = [
        name for name, array in arrays.items() if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf"
    ]
    if not arrays:
        raise InvalidInput(f"{path}: got no arrays, expected arrays of numbers", code="FN-1030")
    if wrong:
        what = ", ".join(f"{name!r}" for name in wrong if name) or "the array"
        advice = "; write labels as the numbers of the classes" if LABELS in wrong else ""
        raise InvalidInput(f"{path}: got no numbers in {what}, expected arrays of numbers{advice}", code="FN-1030")
    return arrays


def _feed(what: str, arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    if set(names) <= set(arrays):
        return {name: arrays[name] for name in names}
    # A single input may have any name in the file; other arrays there, such as labels, are ignored.
    if len(names) == 1 and (len(arrays) == 1 or "x" in arrays):
        return {names[0]: arrays["x"] if "x" in arrays else next(iter(arrays.values()))}
    received = "one array without a name" if "" in arrays else f"arrays {sorted(arrays)}"
    raise InvalidInput(
        f"{what}: got {received}, expected the model's inputs {sorted(names)}, such as in an .npz file", code="FN-1031"
    )


def _is_pixels(x: Array, port: Port, raw: Port | None) -> bool:
    """Return whether x is bytes for an input that accepts floats only."""
    is_raw = raw is not None and (x.dtype.name, x.shape[1:]) == (raw.dtype, raw.shape[1:])
    return x.dtype == np.uint8 and port.dtype in ("float32", "int8") and not is_raw


def _scaled(what: str, x: Array, port: Port, scale: float) -> Array:
    """Return pixels divided by ``scale``."""
    if not scale:
        raise InvalidInput(
            f"{what}: got uint8 {x.shape} for {port.name}, expected {form_of(port.dtype, port.shape)} in the scale of "
            "the training data; pass --scale 255 if it was trained on pixels / 255 (an App with preprocess= accepts "
            "the pixels themselves)",
            code="FN-1033",
        )
    return x.astype(np.float32) / np.float32(scale)


def _read_table(path: Path, form: Port) -> tuple[Array, dict[str, Array]]:
    """Return the rows of a CSV file in the form of an input, and their labels as ``y`` if it has a column of them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: not a readable .csv file ({exc})", code="FN-1034") from exc
    header: list[str] = []
    if rows and not any(_is_number(value) for value in rows[0][1]):
        header, rows = [name.strip().lower() for name in rows[0][1]], rows[1:]
    columns = [index for index, name in enumerate(header) if name in LABEL_COLUMNS]
    num_values = prod(form.shape[1:])
    if not rows:
        raise InvalidInput(f"{path}: has no rows, expected one row of numbers for each sample", code="FN-1030")
    if len(columns) > 1:
        names = [header[index] for index in columns]
        raise InvalidInput(
            f"{path}: got {len(columns)} columns of labels, {names}, expected one at most; remove others",
            code="FN-1035",
        )
    table = np.array([_numbers(f"{path}: line {number}", row, len(rows[0][1])) for number, row in rows])
    values = np.delete(table, columns, axis=1)
    if -1 in form.shape[1:] or values.shape[1] != num_values:
        raise InvalidInput(
            f"{path}: got {counted(values.shape[1], 'value')} a row, expected {num_values} for the input {form.name!r} "
            f"{form_of(form.dtype, form.shape)}; name a column of labels 'y' in the first line",
            code="FN-1035",
        )
    x = values.astype(form.dtype)
    if not np.array_equal(x, values) and np.dtype(form.dtype).kind in "iu":
        raise InvalidInput(
            f"{path}: got values that are no {form.dtype}, expected integers in its range", code="FN-1035"
        )
    labels: dict[str, Array] = {LABELS: _whole(table[:, columns[0]])} if columns else {}
    return x.reshape(len(x), *form.shape[1:]), labels


def _whole(column: Array) -> Array:
    """Return a column as integers if all of it are, otherwise as it is: the targets of a model of values."""
    with np.errstate(invalid="ignore"):
        whole = column.astype(np.int64)
    return whole if np.array_equal(whole, column) else column


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _numbers(what: str, row: Sequence[str], num: int) -> list[float]:
    if len(row) != num:
        raise InvalidInput(
            f"{what}: got {counted(len(row), 'value')}, expected {num} as in the first row", code="FN-1034"
        )
    wrong = [value for value in row if not _is_number(value)]
    if wrong:
        raise InvalidInput(
            f"{what}: got {wrong[0]!r:.60}, expected a number; separate values by commas", code="FN-1034"
        )
    return [float(value) for value in row]


def _read_image(path: Path, form: Port) -> Array:
    """Return the pixels of an image in the shape of one sample."""
    from PIL import Image, UnidentifiedImageError

    shape = form.shape[1:]
    if len(shape) not in (2, 3):
        raise InvalidInput(f"{path}: got an image, expected samples {shape} of the input {form.name!r}", code="FN-1036")
    is_first = len(shape) == 3 and shape[0] in MODES and shape[2] not in MODES
    channels = 1 if len(shape) == 2 else shape[0] if is_first else shape[2]
    if channels not in MODES:
        raise InvalidInput(
            f"{path}: got an image, expected samples {shape}: {channels} channels, which no image has", code="FN-1036"
        )
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise InvalidInput(
                    f"{path}: got an image of mode {image.mode}, expected 8 bits a channel; convert it", code="FN-1036"
                )
            pixels = np.asarray(image.convert(MODES[channels]))
    except UnidentifiedImageError as exc:
        raise InvalidInput(f"{path}: not a readable image", code="FN-1036") from exc
    size = shape[:2] if len(shape) == 2 or not is_first else shape[1:]
    if any(expected not in (-1, actual) for expected, actual in zip(size, pixels.shape[:2], strict=True)):
        raise InvalidInput(
            f"{path}: got an image of {pixels.shape[0]} x {pixels.shape[1]} pixels (height x width), expected "
            f"{size[0]} x {size[1]}; resize it as the training data was",
            code="FN-1036",
        )
    if len(shape) == 2:
        return pixels
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)) if is_first else pixels

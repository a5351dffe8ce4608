"""Synthetic data of the zoo: each function returns examples whose targets follow from the inputs.

A model learns them in some hundred steps. The classes are a function of constants of this module, and all noise comes
from the caller's generator. So data that did not calibrate a model is drawn by another generator.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.edge.tensors import Float32s, Int32s

Data = Callable[[int, np.random.Generator], Examples]
"""(number of examples, generator) -> examples."""
PROTOTYPE_SEED: Final = 7
COARSE: Final = 4
"""Height and width of the random images that are enlarged to prototypes."""
NOISE: Final = 0.5
WRONG_LABELS: Final = 0.15
"""Share of random labels in data for training. Without them a model learns all, and its gradients are rounding."""
VOCABULARY: Final = 32
NUM_PACES: Final = 4
NUM_NUMBERS: Final = 3
NUM_FEATURES: Final = 16


def images(shape: Sequence[int], num_classes: int) -> Data:
    """Return noisy images ``x`` (n, channels, height, width), one smooth prototype a class."""
    prototypes = _prototypes(shape, num_classes)

    def make(num: int, rng: np.random.Generator) -> Examples:
        labels = rng.integers(0, num_classes, num)
        return Examples(inputs={"x": _noisy(prototypes[labels], rng)}, y=labels.astype(np.int32))

    return make


def image_pairs(shape: Sequence[int], num_classes: int) -> Data:
    """Return images ``left`` and ``right``. The label is 1 where both are of one class, which half of them are."""
    prototypes = _prototypes(shape, num_classes)

    def make(num: int, rng: np.random.Generator) -> Examples:
        left = rng.integers(0, num_classes, num)
        is_equal = rng.integers(0, 2, num)
        right = np.where(is_equal, left, (left + rng.integers(1, num_classes, num)) % num_classes)
        inputs = {"left": _noisy(prototypes[left], rng), "right": _noisy(prototypes[right], rng)}
        return Examples(inputs=inputs, y=is_equal.astype(np.int32))

    return make


def images_with_numbers(shape: Sequence[int], num_classes: int) -> Data:
    """Return ``image`` and ``numbers`` (n, 3). The sign of the numbers moves the label by one class."""
    prototypes = _prototypes(shape, num_classes)

    def make(num: int, rng: np.random.Generator) -> Examples:
        shown, sign = rng.integers(0, num_classes, num), rng.integers(0, 2, num)
        numbers = 0.5 * rng.standard_normal((num, NUM_NUMBERS)) + (2 * sign - 1)[:, None]
        inputs = {"image": _noisy(prototypes[shown], rng), "numbers": numbers.astype(np.float32)}
        return Examples(inputs=inputs, y=((shown + sign) % num_classes).astype(np.int32))

    return make


def two_labels(shape: Sequence[int], num_classes: int) -> Data:
    """Return images with two labels (n, 2): the class, and the quarter of the image that is brighter."""
    prototypes = _prototypes(shape, num_classes)
    height, width = shape[1] // 2, shape[2] // 2

    def make(num: int, rng: np.random.Generator) -> Examples:
        labels, quarter = rng.integers(0, num_classes, num), rng.integers(0, 4, num)
        x = _noisy(prototypes[labels], rng)
        for row, where in zip(x, quarter, strict=True):
            top, left = where // 2 * height, where % 2 * width
            row[:, top : top + height, left : left + width] += 1.0
        return Examples(inputs={"x": x}, y=np.stack([labels, quarter], axis=1).astype(np.int32))

    return make


def discs(size: int) -> Data:
    """Return images (n, 1, size, size) with a disc and a square, and the class of each pixel (n, size, size)."""
    rows, columns = np.mgrid[:size, :size]

    def make(num: int, rng: np.random.Generator) -> Examples:
        centre = rng.integers(3, size - 3, (2, 2, num, 1, 1))
        disc = (rows - centre[0, 0]) ** 2 + (columns - centre[0, 1]) ** 2 <= 9
        square = np.maximum(abs(rows - centre[1, 0]), abs(columns - centre[1, 1])) <= 2
        labels = np.where(disc, 1, np.where(square, 2, 0))
        x = _noisy(np.where(disc, 1.0, np.where(square, -1.0, 0.0))[:, None], rng)
        return Examples(inputs={"x": x}, y=labels.astype(np.int32))

    return make


def reconstructions(shape: Sequence[int], num_classes: int, num_padding: int = 0) -> Data:
    """Return images as their own targets, flat (n, values + num_padding); the padding of a target is 0."""
    of_images = images(shape, num_classes)

    def make(num: int, rng: np.random.Generator) -> Examples:
        x = of_images(num, rng).inputs["x"].astype(np.float32)
        return Examples(inputs={"x": x}, y=np.pad(x.reshape(num, -1), ((0, 0), (0, num_padding))))

    return make


def paces(length: int) -> Data:
    """Return sequences of tokens (n, length) that count up by 1 to 4. The label is the pace, less 1."""

    def make(num: int, rng: np.random.Generator) -> Examples:
        tokens, pace = _counting(num, length, rng)
        return Examples(inputs={"x": tokens}, y=pace)

    return make


def next_tokens(length: int, name: str = "x") -> Data:
    """Return the sequences of ``paces`` as the input ``name``, and each next token (n, length)."""

    def make(num: int, rng: np.random.Generator) -> Examples:
        tokens, _ = _counting(num, length + 1, rng)
        return Examples(inputs={name: tokens[:, :-1].copy()}, y=tokens[:, 1:].copy())

    return make


def bags(length: int, num_classes: int) -> Data:
    """Return tokens (n, length) in random order, half of them from the words of the label."""
    words = VOCABULARY // num_classes

    def make(num: int, rng: np.random.Generator) -> Examples:
        labels = rng.integers(0, num_classes, num)
        own = labels[:, None] * words + rng.integers(0, words, (num, length))
        tokens = np.where(rng.random((num, length)) < 0.5, own, rng.integers(0, VOCABULARY, (num, length)))
        return Examples(inputs={"x": tokens.astype(np.int32)}, y=labels.astype(np.int32))

    return make


def masked_bags(length: int, num_classes: int) -> Data:
    """Return ``bags`` as ``input_ids`` and ``attention_mask`` (n, length), of random lengths, padded with 0."""
    of_bags = bags(length, num_classes)

    def make(num: int, rng: np.random.Generator) -> Examples:
        bag_examples = of_bags(num, rng)
        visible = np.arange(length) < rng.integers(length // 2, length + 1, (num, 1))
        ids = np.where(visible, bag_examples.inputs["x"], 0).astype(np.int32)
        return Examples(inputs={"input_ids": ids, "attention_mask": visible.astype(np.int32)}, y=bag_examples.y)

    return make


def waves(shape: Sequence[int], num_classes: int) -> Data:
    """Return signals (n, channels, steps) of one frequency a class, in random phases."""
    channels, steps = shape

    def make(num: int, rng: np.random.Generator) -> Examples:
        labels = rng.integers(0, num_classes, num)
        phases = rng.uniform(0, 2 * np.pi, (num, channels, 1))
        signal = np.sin(0.25 * (labels[:, None, None] + 1) * np.arange(steps) + phases)
        return Examples(inputs={"x": _noisy(signal, rng)}, y=labels.astype(np.int32))

    return make


def futures(steps: int, horizon: int) -> Data:
    """Return signals (n, 1, steps) of random frequencies, and their next values (n, horizon)."""

    def make(num: int, rng: np.random.Generator) -> Examples:
        frequency, phase = rng.uniform(0.2, 0.8, (num, 1)), rng.uniform(0, 2 * np.pi, (num, 1))
        signal = np.sin(frequency * np.arange(steps + horizon) + phase).astype(np.float32)
        return Examples(inputs={"x": signal[:, None, :steps].copy()}, y=signal[:, steps:].copy())

    return make


def clusters(num_classes: int) -> Data:
    """Return features (n, 16) around two centres a class."""
    centres = 1.5 * np.random.default_rng(PROTOTYPE_SEED).standard_normal((num_classes, 2, NUM_FEATURES))

    def make(num: int, rng: np.random.Generator) -> Examples:
        labels = rng.integers(0, num_classes, num)
        x = centres[labels, rng.integers(0, 2, num)] + rng.standard_normal((num, NUM_FEATURES))
        return Examples(inputs={"x": x.astype(np.float32)}, y=labels.astype(np.int32))

    return make


def with_wrong_labels(examples: Examples, num_classes: int, rng: np.random.Generator) -> Examples:
    """Return examples with some random labels; values stay as they are."""
    if not num_classes:
        return examples
    is_wrong = rng.random(examples.y.shape) < WRONG_LABELS
    y = np.where(is_wrong, rng.integers(0, num_classes, examples.y.shape), examples.y)
    return Examples(inputs=examples.inputs, y=y.astype(np.int32))


def _prototypes(shape: Sequence[int], num_classes: int) -> Float32s:
    """Return a smooth image for each class (num_classes, channels, height, width)."""
    channels, height, width = shape
    coarse = np.random.default_rng(PROTOTYPE_SEED).standard_normal((num_classes, channels, COARSE, COARSE))
    rows, columns = (np.arange(size) * COARSE // size for size in (height, width))
    return coarse[:, :, rows][..., columns].astype(np.float32)


def _noisy(values: Float32s, rng: np.random.Generator) -> Float32s:
    return (values + NOISE * rng.standard_normal(values.shape)).astype(np.float32)


def _counting(num: int, length: int, rng: np.random.Generator) -> tuple[Int32s, Int32s]:
    pace, start = rng.integers(0, NUM_PACES, num), rng.integers(0, VOCABULARY, num)
    tokens = (start[:, None] + (pace[:, None] + 1) * np.arange(length)) % VOCABULARY
    return tokens.astype(np.int32), pace.astype(np.int32)

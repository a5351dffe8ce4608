"""Fashion-MNIST in the form of the published comparisons: images of 14 x 14 means, so that a Round is cheap."""

from dataclasses import dataclass

import numpy as np

from fanin.clients import Examples
from fanin.simulation import load_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training examples of all devices, and the test examples."""

    train: Examples
    test: Examples


def fashion(num_train: int, num_test: int) -> Data:
    """Return examples of Fashion-MNIST, drawn with a fixed seed. Each input has the means of 2 x 2 pixels (196,)."""
    data, rng = load_data("fashion-mnist"), np.random.default_rng(0)
    return Data(train=_small(data.train, num_train, rng), test=_small(data.test, num_test, rng))


def _small(examples: Examples, number: int, rng: np.random.Generator) -> Examples:
    drawn = examples.take(rng.permutation(len(examples))[:number])
    x = drawn.inputs["x"].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    return Examples(inputs={"x": x.astype(np.float32)}, y=drawn.y)

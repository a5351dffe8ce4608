"""The examples of a client of the apps: drawn from its number, so nothing is downloaded."""

import numpy as np
import numpy.typing as npt

NUM_FEATURES = 6
NUM_CLASSES = 3
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def table(partition: int, num_examples: int = 30) -> tuple[Floats, Ints]:
    """Return features (num_examples, NUM_FEATURES) and classes (num_examples,); clients have more and more examples."""
    rng = np.random.default_rng(100 + partition)
    weight = np.random.default_rng(1).standard_normal((NUM_FEATURES, NUM_CLASSES))
    x = rng.standard_normal((num_examples * (partition + 1), NUM_FEATURES)) + 0.3 * partition
    return x, np.argmax(x @ weight + 0.1 * rng.standard_normal((len(x), NUM_CLASSES)), axis=1)


def pictures(partition: int, num_examples: int = 16) -> tuple[npt.NDArray[np.float32], Ints]:
    """Return pictures (num_examples, 1, 8, 8) and classes (num_examples,)."""
    rng = np.random.default_rng(200 + partition)
    y = rng.integers(0, NUM_CLASSES, num_examples * (partition + 1))
    x = rng.standard_normal((len(y), 1, 8, 8)) + y[:, None, None, None]
    return x.astype(np.float32), y


def sentences(partition: int, num_examples: int = 12) -> tuple[Ints, Ints]:
    """Return tokens (num_examples, 5) below 11 and classes (num_examples,)."""
    rng = np.random.default_rng(300 + partition)
    tokens = rng.integers(0, 11, (num_examples * (partition + 1), 5))
    return tokens, tokens.sum(axis=1) % NUM_CLASSES


def probabilities(logits: Floats) -> Floats:
    """Return the softmax of logits (n, NUM_CLASSES)."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)

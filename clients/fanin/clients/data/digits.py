"""The embedded data: 1,797 handwritten digits of 8 x 8 pixels, and their split for the demo.

The file ``digits.npz`` in this folder holds the pixels (0 to 16) and labels as bytes, unchanged and in their original
order. ``tests/golden/make_digits.py`` created it from scikit-learn's copy. The licence is CC BY 4.0.

Reference:
    E. Alpaydin and C. Kaynak, *Optical Recognition of Handwritten Digits*, test set, UCI Machine Learning Repository,
    1998, https://doi.org/10.24432/C50P49
"""

from importlib.resources import files
from typing import Final

import numpy as np

from fanin.clients.data.examples import Examples, Split
from fanin.clients.data.partitions import dirichlet_partition, hold_out
from fanin.clients.data.stores import MIN_EXAMPLES
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput

NUM_DIGITS: Final = 1797
NUM_CLASSES: Final = 10
NUM_PUBLIC: Final = 100
NUM_TEST: Final = 540
MAX_DEVICES: Final = (NUM_DIGITS - NUM_PUBLIC - NUM_TEST) // MIN_EXAMPLES
_MAX_PIXEL: Final = 16


def load_digits() -> Examples:
    """Return all digits: ``x`` (1797, 1, 8, 8) float32 from 0 to 1, ``y`` (1797,) int32."""
    with (
        files("fanin.clients.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        pixels, labels = archive["x"], archive["y"]
    return Examples(inputs={X: pixels[:, None].astype(np.float32) / np.float32(_MAX_PIXEL)}, y=labels.astype(np.int32))


def split_digits(num_devices: int, alpha: float, seed: int) -> Split:
    """Split the digits: 100 public, 540 for the test, the others over the devices by ``dirichlet_partition``.

    Public and test digits have the mix of labels of all digits and depend only on the seed.

    Raises:
        InvalidInput: A number is out of range.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InvalidInput(f"digits: got {num_devices} devices, expected 1 to {MAX_DEVICES}", code="FN-0868")
    if not 0.0 < alpha < np.inf:
        raise InvalidInput(
            f"digits: got alpha {alpha}, expected a positive number (0.1 is very uneven, 100 even)", code="FN-0868"
        )
    if seed < 0:
        raise InvalidInput(f"digits: got seed {seed}, expected 0 or more", code="FN-0868")
    rng = np.random.default_rng(seed)
    rest, public = hold_out(load_digits(), NUM_PUBLIC, rng)
    rest, test = hold_out(rest, NUM_TEST, rng)
    parts = dirichlet_partition(rest.y, num_devices, alpha, rng)
    return Split(public=public, test=test, devices=tuple(rest.take(part) for part in parts))

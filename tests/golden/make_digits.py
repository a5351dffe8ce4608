"""Writes clients/fanin/clients/data/digits.npz from scikit-learn's copy of the UCI digits.

    python -m pip install scikit-learn==1.9.1
    python tests/golden/make_digits.py

The archive's members have fixed dates, so the same digits give the same file.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[2] / "clients" / "fanin" / "clients" / "data" / "digits.npz"


def main() -> None:
    """Write the file."""
    digits = load_digits()
    pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    assert (pixels == digits.images).all(), "pixels are whole numbers"
    np.savez_compressed(TARGET, x=pixels, y=labels)


if __name__ == "__main__":
    main()

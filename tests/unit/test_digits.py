"""The embedded digits: their exact bytes, and the laws of their split."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanin.clients.data.digits import MAX_DEVICES, load_digits, split_digits
from fanin.clients.data.examples import Examples
from fanin.protos.errors import InvalidInput

X_SHA256 = "9f578524b6cec1fc800cc52dfc87ebe56264983d490aa72a4bd928ba2570ec77"
Y_SHA256 = "3a0e68456f9a3c609b399717dd9ca55bb9153be1bccf72e38e3319cb740c75cd"


def rows(*parts: Examples) -> list[bytes]:
    """Return the bytes of each example, sorted."""
    return sorted(x.tobytes() + y.tobytes() for part in parts for x, y in zip(part.inputs["x"], part.y, strict=True))


def test_the_digits_have_the_known_digests() -> None:
    digits = load_digits()
    assert (digits.inputs["x"].shape, digits.inputs["x"].dtype) == ((1797, 1, 8, 8), np.float32)
    assert (digits.y.shape, digits.y.dtype) == ((1797,), np.int32)
    assert (digits.inputs["x"].min(), digits.inputs["x"].max()) == (0.0, 1.0)
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert hashlib.sha256(digits.inputs["x"].tobytes()).hexdigest() == X_SHA256
    assert hashlib.sha256(digits.y.tobytes()).hexdigest() == Y_SHA256


@settings(max_examples=20)
@given(num_devices=st.integers(1, 40), alpha=st.floats(0.05, 50.0), seed=st.integers(0, 2**32))
@pytest.mark.heavy
def test_a_split_covers_all_digits_once(num_devices: int, alpha: float, seed: int) -> None:
    split = split_digits(num_devices, alpha, seed)
    assert (len(split.public), len(split.test), len(split.devices)) == (100, 540, num_devices)
    # No two digits have the same bytes, so equal rows are equal examples.
    assert len(set(rows(load_digits()))) == 1797
    assert rows(split.public, split.test, *split.devices) == rows(load_digits())
    sizes = {len(part) for part in split.devices}
    assert max(sizes) - min(sizes) <= 1
    for part, expected in ((split.public, 10), (split.test, 54)):
        assert np.abs(np.bincount(part.y, minlength=10) - expected).max() <= 2


def test_public_and_test_depend_on_the_seed_only() -> None:
    first, repeat, other = split_digits(8, 0.5, 1), split_digits(8, 0.5, 1), split_digits(8, 0.5, 2)
    assert all((a.inputs["x"] == b.inputs["x"]).all() for a, b in zip(first.devices, repeat.devices, strict=True))
    assert rows(first.devices[0]) != rows(other.devices[0])
    assert rows(first.test) != rows(other.test)
    third = split_digits(3, 10.0, 1)
    assert (third.public.inputs["x"] == first.public.inputs["x"]).all()
    assert (third.test.inputs["x"] == first.test.inputs["x"]).all()


@pytest.mark.parametrize(
    ("num_devices", "alpha", "seed", "expected"),
    [
        (0, 1.0, 0, f"got 0 devices, expected 1 to {MAX_DEVICES}"),
        (MAX_DEVICES + 1, 1.0, 0, f"expected 1 to {MAX_DEVICES}"),
        (8, 0.0, 0, "got alpha 0.0, expected a positive number"),
        (8, float("nan"), 0, "got alpha nan, expected a positive number"),
        (8, 1.0, -1, "got seed -1, expected 0 or more"),
    ],
)
def test_impossible_arguments_are_refused(num_devices: int, alpha: float, seed: int, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        split_digits(num_devices, alpha, seed)


def test_every_device_can_hold_out_a_digit() -> None:
    assert min(len(part) for part in split_digits(MAX_DEVICES, 0.1, 0).devices) >= 2

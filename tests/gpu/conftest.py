"""Every test of this folder needs a GPU."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Fail if torch cannot use a GPU, with its reason."""
    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch finds no GPU that works"
        pytest.fail(f"tests/gpu: {why}, expected a GPU; run these tests on a machine with one", pytrace=False)

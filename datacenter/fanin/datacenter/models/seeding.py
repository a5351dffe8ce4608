"""Seeds the initial parameters of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make parameters that are initialized in this context a function of ``seed`` alone.

    torch's own generator is restored at the end.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield

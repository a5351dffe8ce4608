"""The global random generators of ``random``, numpy and torch, which a Flower app draws from.

A seed of up to 32 bits sets them as the libraries' own functions do. A longer one comes from the secret of a device
(``app_seed``), and all of its bits count: of 32 bits, the coordinator could try all values. ``random`` and
numpy accept long seeds. torch's CPU generator ignores all but 32 bits of a seed, so its state is written. torch's
generators of GPUs take 64 bits.

A Mersenne Twister is no cryptographic generator. Its draws are no differential privacy, whatever the seed
(docs/explanation/privacy.md).

Reference:
    Matsumoto and Nishimura 1998, "Mersenne Twister", ACM TOMACS 8(1). PyTorch, ``aten/src/ATen/CPUGeneratorImpl.cpp``.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt

TORCH: Final = "torch"
SHORT: Final = 1 << 32
NUM_WORDS: Final = 624
"""Words of the state of a Mersenne Twister."""
TORCH_OFFSET: Final = 24
"""Bytes before the words in a state of torch's CPU generator. Each word has 8 bytes there."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators, and inside the context also those of torch if the app imports it now.

    torch begins with a seed that is the same everywhere, so an app that imports it late would draw known numbers.
    """
    random.seed(seed)
    np.random.seed(seed if seed < SHORT else _words("numpy", seed))
    if (torch := sys.modules.get(TORCH)) is not None:
        _seed_torch(torch, seed)
        yield
        return
    finder = _TorchFinder(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _words(library: str, seed: int) -> npt.NDArray[np.uint32]:
    """Return the words of a library's own seed. With the same words, the libraries would draw the same bits."""
    return np.frombuffer(hashlib.sha256(f"{library}:{seed}".encode()).digest(), "<u4")


def _seed_torch(torch: ModuleType, seed: int) -> None:
    if seed < SHORT:
        torch.manual_seed(seed)
        return
    own = _words(TORCH, seed)
    torch.manual_seed(int(own[0]) << 32 | int(own[1]))
    words = np.random.RandomState(own).get_state(legacy=False)["state"]["key"]
    state = torch.get_rng_state().numpy().copy()
    state[TORCH_OFFSET : TORCH_OFFSET + 8 * NUM_WORDS] = np.frombuffer(words.astype("<u8").tobytes(), np.uint8)
    torch.set_rng_state(torch.from_numpy(state))


class _TorchFinder(MetaPathFinder):
    """Finds torch as Python does, and seeds it right after its import."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._is_asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname != TORCH or self._is_asked:
            return None
        self._is_asked = True
        try:
            spec = find_spec(TORCH)
        finally:
            self._is_asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = _SeedingLoader(spec.loader, self._seed)
        return spec


class _SeedingLoader(Loader):
    """Loads torch, then seeds it."""

    def __init__(self, loader: Loader, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See Loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _seed_torch(module, self._seed)

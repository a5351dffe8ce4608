"""torch's fused kernels turned off while a module is traced: they have no decomposition, and no form elsewhere.

Attention, recurrent layers and the encoder layer have each a plain form and a fused one; traced is the plain one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run everything by plain operators, and afterwards as it was."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # Looking at oneDNN's settings is enough for it to tell that there is no GPU of Intel's.
            warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN", category=UserWarning)
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)

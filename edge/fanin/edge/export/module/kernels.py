"""torch's fused kernels, turned off while a module is traced: they have no decomposition and no form in a graph.

Attention, recurrent layers, encoder layers and bags of embeddings have a plain form and a fused one. The plain one is
traced.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fanin.edge.export.module.plain.functions import PlainFunctions


@contextmanager
def tracing() -> Iterator[None]:
    """Run plain operators, and tell libraries that a trace runs: transformers then reads no value of a mask."""
    with plain_kernels(), torch.compiler._compile_session_context():
        yield


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run everything by plain operators, and restore the settings afterwards."""
    with plain_encoders(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # Reading oneDNN's settings makes it warn that there is no Intel GPU.
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN", category=UserWarning)
        with torch.backends.mkldnn.flags(enabled=False), PlainFunctions():
            yield


@contextmanager
def plain_encoders() -> Iterator[None]:
    """Run torch's encoders in evaluation as in training: their fused kernel sets padded positions to 0."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)

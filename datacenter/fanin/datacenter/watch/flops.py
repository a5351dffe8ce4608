"""FLOPs of a training token, peaks of hardware, and model FLOPs utilization (MFU).

All MFU values in fanin use the definition of torchtitan (torchtitan/models/utils.py)::

    FLOPs a token = 6 * N_matmul + 6 * layers * heads * (query width + value width) * sequence
    MFU           = FLOPs a token * tokens a second of one rank / peak FLOPs a second of one rank

``N_matmul`` is the number of matrix values that a token is multiplied with. The embedding table is a lookup and does
not count, unless it also computes the logits (tied weights). Norms do not count; they are less than 0.01 % of a model
of 1e9 parameters. The factor 6 is one multiplication and one addition, in the forward pass and twice in the backward
pass. Attention counts the full square, even if a causal mask removes half of it. Recomputed activations do not count.
Other definitions of MFU give other values.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from fanin.datacenter.parallel.settings import Precision
from fanin.protos.errors import InvalidInput

PASSES: Final = 3
"""The forward pass, the gradients of inputs and the gradients of weights. Each costs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The sizes of a model that determine its FLOPs.

    ``attention_width`` is heads x (query width + value width), in each of the ``num_layers`` layers.
    """

    matmul_values: int
    num_layers: int
    attention_width: int

    def flops_per_token(self, sequence: int) -> int:
        """Return the FLOPs to train on one token of a sequence of this length."""
        return 2 * PASSES * (self.matmul_values + self.num_layers * self.attention_width * sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator.

    Attributes:
        name: Name in the table, such as ``h100``.
        flops_per_second: Peak of dense bfloat16 products.
        float32_flops_per_second: Peak of float32 products.
        float64_flops_per_second: Peak of float64 products, on tensor cores.
        memory_bytes: Size of its memory.
        memory_bytes_per_second: Bandwidth of its memory.
        source: Source of these numbers.
        efficiency: Share of the peak that the products of a training step reach, fitted to published runs
            (docs/howto/observers.md).
    """

    name: str
    flops_per_second: float
    float32_flops_per_second: float
    float64_flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    source: str
    efficiency: float

    def peak_in(self, precision: Precision) -> float:
        """Return the peak FLOPs a second of a job in this precision."""
        wide = {"full": self.float32_flops_per_second, "double": self.float64_flops_per_second}
        return wide.get(precision, self.flops_per_second)


def _gpu(
    name: str, teraflops: tuple[float, float, float], memory: tuple[int, float], efficiency: float, source: str
) -> Hardware:
    """Return a row from (bf16, float32, float64) teraFLOPs and ``memory`` as (gigabytes, terabytes a second)."""
    return Hardware(
        name=name,
        flops_per_second=teraflops[0] * 1e12,
        float32_flops_per_second=teraflops[1] * 1e12,
        float64_flops_per_second=teraflops[2] * 1e12,
        memory_bytes=memory[0] * 10**9,
        memory_bytes_per_second=memory[1] * 1e12,
        source=source,
        efficiency=efficiency,
    )


HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        each.name: each
        for each in (
            _gpu(
                "a100",
                (312, 19.5, 19.5),
                (80, 2.039),
                0.6,
                "NVIDIA A100 80 GB SXM data sheet; peak as torchtitan/tools/utils.py has it",
            ),
            _gpu(
                "h100",
                (989, 67, 67),
                (80, 3.35),
                0.42,
                "NVIDIA H100 SXM data sheet, without sparsity; torchtitan likewise",
            ),
            _gpu(
                "h200",
                (989, 67, 67),
                (141, 4.8),
                0.5,
                "NVIDIA H200 SXM data sheet, without sparsity; torchtitan likewise",
            ),
            _gpu(
                "b200",
                (2250, 75, 37),
                (180, 8.0),
                # The H100's value: no published run of a dense model in bf16 was available to fit it.
                0.42,
                "NVIDIA DGX B200 data sheet, an eighth, without sparsity; torchtitan likewise",
            ),
        )
    }
)
"""Accelerators by name. The peaks are from data sheets; no kernel reaches them."""

DEVICE_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"A100": "a100", "H200": "h200", "H100": "h100", "B200": "b200"}
)
"""Substring of a CUDA device name, to the row in HARDWARE. PCIe and NVL variants have other peaks and no row."""


def hardware_of(device_name: str) -> Hardware | None:
    """Return the hardware for a CUDA device name, or None if the table does not have it."""
    if any(form in device_name for form in ("PCIe", "NVL")):
        return None
    return next((HARDWARE[row] for part, row in DEVICE_NAMES.items() if part in device_name), None)


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops_per_second: float) -> float:
    """Return the model FLOPs utilization of a rank, 0.0 to 1.0.

    Args:
        flops_per_token: FLOPs to train on one token.
        tokens_per_second: Throughput of one rank: that of all ranks, divided by their number.
        peak_flops_per_second: Peak of one rank.

    Raises:
        InvalidInput: The peak is not positive.
    """
    if peak_flops_per_second <= 0:
        raise InvalidInput(
            f"mfu: got a peak of {peak_flops_per_second} FLOPs a second, expected a positive number", code="FN-1390"
        )
    return flops_per_token * tokens_per_second / peak_flops_per_second


def best_gemm(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (512, 1024), repeats: int = 3) -> float:
    """Return the FLOPs a second of the fastest square product on this CPU: the peak of a machine without a row."""
    best = 0.0
    for size in sizes:
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        for _ in range(repeats):
            started_s = time.perf_counter()
            torch.mm(left, right)
            best = max(best, 2 * size**3 / (time.perf_counter() - started_s))
    return best


def cpu_hardware(memory_bytes: int) -> Hardware:
    """Return this machine's CPU, measured in one process with torch's current number of threads."""
    best = best_gemm()
    return Hardware(
        name="cpu",
        flops_per_second=best,
        float32_flops_per_second=best,
        # A vector register has half as many float64 values.
        float64_flops_per_second=best / 2,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=_copy_speed(),
        source="measured: the best of square products and of copies",
        efficiency=0.6,
    )


def _copy_speed(size_bytes: int = 1 << 26, repeats: int = 3) -> float:
    """Return the bytes a second, read and written, of a copy in memory."""
    source = torch.zeros(size_bytes, dtype=torch.uint8)
    target, best = torch.empty_like(source), 0.0
    for _ in range(repeats):
        started_s = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * size_bytes / (time.perf_counter() - started_s))
    return best

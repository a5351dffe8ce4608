"""How much work a token is, and how much of a machine's peak it takes.

The definition is that of torchtitan (torchtitan/models/utils.py), and every number that fanin tells is by it::

    FLOPs a token = 6 * N_matmul + 6 * layers * heads * (query width + value width) * sequence
    MFU           = FLOPs a token * tokens a second of one rank / peak FLOPs a second of one rank

``N_matmul`` counts the values of matrices that a token is multiplied with: the table that embeds tokens is looked up
and not counted, unless it scores them as well (tied); norms are not counted (less than 0.01 % of a model of 1e9). 6: a
multiplication and an addition, forward and twice backward. Attention counts the whole square, also where a causal mask
leaves half of it out, and what is computed again is not counted. MFU by this and by others' definitions differ.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from fanin.protos.errors import InvalidInput

PASSES: Final = 3
"""Forward, and gradients of inputs and of weights: each as much as the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What counts of a model: ``attention_width`` is heads x (query width + value width), ``layers`` have it each."""

    matmul_values: int
    num_layers: int
    attention_width: int

    def flops_per_token(self, sequence: int) -> int:
        """FLOPs to train on one token of a sequence."""
        return 2 * PASSES * (self.matmul_values + self.num_layers * self.attention_width * sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator: peak dense bf16 FLOPs a second and those of whole float32, its memory and that one's speed.

    ``efficiency``: the share of the peak that a training step's products reach, fitted to published runs
    (docs/datacenter.md).
    """

    name: str
    flops_per_second: float
    float32_flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    source: str
    efficiency: float


def _gpu(
    name: str, teraflops: tuple[float, float], memory: tuple[int, float], efficiency: float, source: str
) -> Hardware:
    """``memory``: its gigabytes, and terabytes a second."""
    return Hardware(
        name=name,
        flops_per_second=teraflops[0] * 1e12,
        float32_flops_per_second=teraflops[1] * 1e12,
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
                (312, 19.5),
                (80, 2.039),
                0.6,
                "NVIDIA A100 80 GB SXM data sheet; peak as torchtitan/tools/utils.py has it",
            ),
            _gpu(
                "h100", (989, 67), (80, 3.35), 0.42, "NVIDIA H100 SXM data sheet, without sparsity; torchtitan likewise"
            ),
            _gpu(
                "h200", (989, 67), (141, 4.8), 0.5, "NVIDIA H200 SXM data sheet, without sparsity; torchtitan likewise"
            ),
            _gpu(
                "b200",
                (2250, 75),
                (180, 8.0),
                # Of no published run: dense models in bf16 were not found. As the H100's.
                0.42,
                "NVIDIA DGX B200 data sheet, an eighth, without sparsity; torchtitan likewise",
            ),
        )
    }
)
"""Peaks are those of the data sheets, which no kernel reaches."""

DEVICE_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"A100": "a100", "H200": "h200", "H100": "h100", "B200": "b200"}
)
"""A part of what CUDA calls a device, to its row. PCIe and NVL forms have other peaks and must be named by hand."""


def hardware_of(device_name: str) -> Hardware | None:
    """The row for what CUDA calls a device, None for one that is not in the table."""
    if any(form in device_name for form in ("PCIe", "NVL")):
        return None
    return next((HARDWARE[row] for part, row in DEVICE_NAMES.items() if part in device_name), None)


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops_per_second: float) -> float:
    """The share of the peak, 0.0 to 1.0, of one rank; ``tokens_per_second`` are those of all ranks, by their number."""
    if peak_flops_per_second <= 0:
        raise InvalidInput(f"mfu: got a peak of {peak_flops_per_second} FLOPs a second, expected a positive number")
    return flops_per_token * tokens_per_second / peak_flops_per_second


def best_gemm(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (512, 1024), repeats: int = 3) -> float:
    """FLOPs a second of the fastest square product of this process on its CPU: the peak of a machine without a row."""
    best = 0.0
    for size in sizes:
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        for _ in range(repeats):
            started_s = time.perf_counter()
            torch.mm(left, right)
            best = max(best, 2 * size**3 / (time.perf_counter() - started_s))
    return best


def cpu_hardware(memory_bytes: int) -> Hardware:
    """This machine's CPU, as one process with torch's threads finds it."""
    best = best_gemm()
    return Hardware(
        name="cpu",
        flops_per_second=best,
        float32_flops_per_second=best,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=_copy_speed(),
        source="measured: the best of square products and of copies",
        efficiency=0.6,
    )


def _copy_speed(size_bytes: int = 1 << 26, repeats: int = 3) -> float:
    """Bytes a second that are read and written."""
    source = torch.zeros(size_bytes, dtype=torch.uint8)
    target, best = torch.empty_like(source), 0.0
    for _ in range(repeats):
        started_s = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * size_bytes / (time.perf_counter() - started_s))
    return best

"""A vectorized function on a GPU: recorded as a CUDA graph for each number of clients, and replayed.

The operators of a train step are short: to start one of them takes longer than it runs. A CUDA graph starts all of them
at once.

Reference:
    CUDA graphs in torch, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_GROUP: Final = 1024
"""Clients that train together at most."""
SHARE_OF_MEMORY: Final = 0.5
"""Share of the GPU's free memory that the clients of a group may use."""
WARM_UPS: Final = 2
"""Calls before the recording, in which libraries choose their algorithms."""


def gpus() -> tuple[int, str]:
    """Return the number of GPUs that torch finds, and the name of this torch."""
    return torch.cuda.device_count(), f"torch {torch.__version__}"


def exact_convolutions() -> AbstractContextManager[None]:
    """Convolutions in float32, by algorithms that give the same bits each time. The default is TF32."""
    context: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A function of fixed tensors. Without a graph, it runs operator by operator."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    graph: torch.cuda.CUDAGraph | None


class CudaGraphs:
    """A function of tensors of K clients, on a GPU.

    There is one graph for each power of two. A smaller group uses the first rows of the next larger graph.

    Args:
        function: Takes and returns tensors. The first axis of its outputs is K.
        axes: For each input 0 if its first axis is K, or None if all clients share it.
        device: The GPU.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], axes: Sequence[int | None], device: torch.device
    ) -> None:
        self._function, self._axes, self._device = function, axes, device
        # The graphs never run at the same time, and their outputs are copied, so they can share memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, _Recorded] = {}
        self._client_bytes = 1

    @property
    def max_clients(self) -> int:
        """Number of clients that fit into the free memory, by the largest group so far."""
        free, _ = torch.cuda.mem_get_info(self._device)
        fitting = min(MAX_GROUP, int(free * SHARE_OF_MEMORY) // self._client_bytes)
        return 1 << max(fitting.bit_length() - 1, 0)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, on the GPU.

        Args:
            inputs: The inputs, on the processor or the GPU.
        """
        num = next(len(value) for value, axis in zip(inputs, self._axes, strict=True) if axis is not None)
        size = 1 << (num - 1).bit_length()
        if size not in self._recorded:
            self._recorded[size] = self._record(size, inputs)
        recorded = self._recorded[size]
        for place, value, axis in zip(recorded.inputs, inputs, self._axes, strict=True):
            (place if axis is None else place[:num]).copy_(value, non_blocking=True)
        if recorded.graph is None:
            with torch.cuda.device(self._device), exact_convolutions():
                outputs: Sequence[Tensor] = self._function(*recorded.inputs)
        else:
            recorded.graph.replay()
            outputs = recorded.outputs
        return tuple(value[:num].clone() for value in outputs)

    def _record(self, size: int, inputs: Sequence[Tensor]) -> _Recorded:
        places = [
            torch.zeros(
                value.shape if axis is None else (size, *value.shape[1:]), dtype=value.dtype, device=self._device
            )
            for value, axis in zip(inputs, self._axes, strict=True)
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), exact_convolutions():
            self._warm_up(size, places)
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    outputs = self._function(*places)
            except RuntimeError:
                # An operator reads a value on the processor, which a graph cannot do.
                return _Recorded(inputs=places, outputs=(), graph=None)
        return _Recorded(inputs=places, outputs=outputs, graph=graph)

    def _warm_up(self, size: int, places: Sequence[Tensor]) -> None:
        """Call the function, and note how much memory a client takes."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UPS):
            self._function(*places)
        torch.cuda.synchronize()
        of_inputs = sum(place.nbytes for place in places)
        self._client_bytes = max(1, (torch.cuda.max_memory_allocated() - before + of_inputs) // size)

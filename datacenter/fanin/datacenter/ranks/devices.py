"""Devices of ranks: the CPU with gloo, or one GPU per rank with NCCL.

Only this module chooses the device, from the setting ``device`` and the machine's hardware. Invariant: a job never
falls back to the CPU on a machine with GPUs, since it would silently run a hundred times slower.
"""

import os
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fanin.datacenter.ranks.mesh import AXES, MeshShape
from fanin.protos.errors import InvalidInput

BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends by device type. GPU jobs need gloo, too, for offloaded parameters and for checkpoints on the CPU."""
NO_CUDA: Final = "this torch has no CUDA"
NO_GPU: Final = "torch sees no GPU that works"


def device_type(device: str = "auto", num_local: int | None = None) -> str:
    """Return ``cuda`` or ``cpu``.

    Args:
        device: The setting: ``auto``, ``cuda`` or ``cpu``.
        num_local: Ranks on this machine; by default the number in torchrun's environment.

    Raises:
        InvalidInput: The machine has fewer GPUs than ranks, and ``device`` is not ``cpu``.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if num_local is None else num_local
    return choose_type(device, ranks, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def choose_type(device: str, num_local: int, num_gpus: int) -> str:
    """Return the device type for ``num_local`` ranks on a machine with ``num_gpus`` GPUs. Raises InvalidInput."""
    if device == "cpu" or (device == "auto" and not num_gpus):
        return "cpu"
    if num_gpus < num_local:
        usable = "" if num_gpus else f" ({NO_CUDA if torch.version.cuda is None else NO_GPU})"
        raise InvalidInput(
            f"parallel: got device {device!r}, {num_local} ranks and {num_gpus} GPUs on this machine{usable}, "
            "expected a GPU for each rank; start fewer processes on it, or set [parallel] device = 'cpu'",
            code="FN-1270",
        )
    return "cuda"


def describe_device(kind: str) -> str:
    """Return a description of a device type; for a CPU on a machine without a usable GPU it includes the reason."""
    if kind == "cuda":
        return f"a GPU each (of {torch.cuda.device_count()} on this machine)"
    if torch.cuda.is_available():
        return "the CPU"
    return f"the CPU ({NO_CUDA if torch.version.cuda is None else NO_GPU})"


def rank_device(kind: str) -> torch.device:
    """Return this rank's device. A GPU also becomes the current device, which NCCL needs before the first message."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_mesh(shape: MeshShape, world_size: int, kind: str = "") -> DeviceMesh:
    """Return the device mesh. The process group must be open.

    Args:
        shape: Ranks along each axis.
        world_size: Number of ranks.
        kind: Device type; by default that of the process group.

    Raises:
        InvalidInput: The shape does not have ``world_size`` ranks.
    """
    shape.check(world_size)
    return init_device_mesh(
        kind or group_device_type(dist.get_backend_config()), tuple(shape.sizes.values()), mesh_dim_names=AXES
    )


def group_device_type(backends: str) -> str:
    """Return ``cuda`` for a process group with NCCL, otherwise ``cpu``. ``backends`` is torch's backend config text."""
    return "cuda" if "nccl" in backends else "cpu"

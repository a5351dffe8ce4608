"""What a rank computes on: the CPU with gloo, or one GPU a rank with NCCL, by what the machine has.

The choice is made here and nowhere else; the rest is told a device type.
"""

import os
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fanin.datacenter.mesh import AXES, MeshShape

BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""With a GPU both: offloaded parameters and checkpoints that are written meanwhile stay on the CPU."""


def device_type() -> str:
    """``cuda`` where each rank of this machine can have a GPU of its own, else ``cpu``."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= num_local else "cpu"


def rank_device(kind: str) -> torch.device:
    """This rank's own device; a GPU becomes the current one, as NCCL needs it before the first message."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_mesh(shape: MeshShape, world_size: int, kind: str = "") -> DeviceMesh:
    """The mesh of processes, by default of GPUs where their group, which must stand already, speaks NCCL.

    Raises InvalidInput.
    """
    shape.check(world_size)
    speaks_nccl = "nccl" in dist.get_backend_config()
    return init_device_mesh(kind or ("cuda" if speaks_nccl else "cpu"), tuple(shape.sizes.values()), mesh_dim_names=AXES)

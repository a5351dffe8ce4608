"""What a rank computes on: the CPU with gloo, or one GPU a rank with NCCL.

The choice is made here and nowhere else, from the setting ``device`` and from what the machine has. A job never falls
back to the CPU where the machine has GPUs: it would run, a hundred times slower, and tell nobody.
"""

import os
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fanin.datacenter.parallel.mesh import AXES, MeshShape
from fanin.protos.errors import InvalidInput

BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""With a GPU both: offloaded parameters and checkpoints that are written meanwhile stay on the CPU."""
NO_CUDA: Final = "this torch has no CUDA"
NO_GPU: Final = "torch sees no GPU that works"


def device_type(device: str = "auto", num_local: int | None = None) -> str:
    """``cuda`` or ``cpu``, for ranks of which this machine has ``num_local``, by default as torchrun says.

    Raises InvalidInput where there are fewer GPUs than ranks, unless ``device`` is ``cpu``.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if num_local is None else num_local
    return chosen_type(device, ranks, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def chosen_type(device: str, num_local: int, num_gpus: int) -> str:
    """The type that ``num_local`` ranks of a machine with ``num_gpus`` GPUs compute on. Raises InvalidInput."""
    if device == "cpu" or (device == "auto" and not num_gpus):
        return "cpu"
    if num_gpus < num_local:
        usable = "" if num_gpus else f" ({NO_CUDA if torch.version.cuda is None else NO_GPU})"
        raise InvalidInput(
            f"parallel: got device {device!r}, {num_local} ranks and {num_gpus} GPUs on this machine{usable}, "
            "expected a GPU for each rank; start fewer processes on it, or set [parallel] device = 'cpu'"
        )
    return "cuda"


def described(kind: str) -> str:
    """A device type as a person reads it, with the reason for a CPU where none was asked for."""
    if kind == "cuda":
        return f"a GPU each (of {torch.cuda.device_count()} on this machine)"
    if torch.cuda.is_available():
        return "the CPU"
    return f"the CPU ({NO_CUDA if torch.version.cuda is None else NO_GPU})"


def rank_device(kind: str) -> torch.device:
    """This rank's own device; a GPU becomes the current one, as NCCL needs it before the first message."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_mesh(shape: MeshShape, world_size: int, kind: str = "") -> DeviceMesh:
    """The mesh of processes, by default on the devices that their process group serves, which must exist already.

    Raises InvalidInput.
    """
    shape.check(world_size)
    served = kind or served_type(dist.get_backend_config())
    return init_device_mesh(served, tuple(shape.sizes.values()), mesh_dim_names=AXES)


def served_type(backends: str) -> str:
    """``cuda`` for a process group with NCCL, else ``cpu``; ``backends`` is the group's config as torch writes it."""
    return "cuda" if "nccl" in backends else "cpu"

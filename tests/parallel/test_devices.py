"""The devices of ranks: GPUs if there are enough, the CPU if it is requested, and never a silent fallback."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.jobs.job import use_threads
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.jobs.torchrun import rank_environment
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.devices import build_mesh, choose_type, describe_device, device_type, group_device_type
from fanin.datacenter.ranks.elastic import group_of_one
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput


@given(device=st.sampled_from(["auto", "cpu", "cuda"]), num_local=st.integers(1, 9), num_gpus=st.integers(0, 9))
def test_ranks_have_a_gpu_each_or_are_refused(device: str, num_local: int, num_gpus: int) -> None:
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        assert choose_type(device, num_local, num_gpus) == "cpu"
    elif num_gpus >= num_local:
        assert choose_type(device, num_local, num_gpus) == "cuda"
    else:
        with pytest.raises(InvalidInput, match=f"got device '{device}', {num_local} ranks and {num_gpus} GPUs on this"):
            choose_type(device, num_local, num_gpus)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_job_for_gpus_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    config = TrainConfig(
        model=ModelSettings(app="made:here"),
        data=DataSettings(examples=Path("made-here.npz")),
        training=TrainingSettings(batch_size=2, learning_rate=0.1),
        stop=StopSettings(steps=1),
        parallel=ParallelSettings(device="cuda"),
    )
    with pytest.raises(InvalidInput, match="FN-1270"):
        launch(config, 1, tmp_path / "job")
    assert not (tmp_path / "job").exists()
    with pytest.raises(InvalidInput, match="FN-1206"):
        replace(config.parallel, device="gpu")
    assert device_type() == "cpu"
    assert describe_device("cpu").startswith("the CPU (t")


@pytest.mark.parametrize(
    ("backends", "kind"),
    [
        ("gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:fake,cuda:fake", "cpu"),
    ],
)
def test_a_mesh_uses_the_device_type_of_its_process_group(backends: str, kind: str) -> None:
    assert group_device_type(backends) == kind


def test_a_mesh_of_a_gloo_group_is_of_cpus() -> None:
    with group_of_one(needed=True, device="cpu"):
        assert group_device_type(dist.get_backend_config()) == "cpu"
        assert build_mesh(MeshShape(), 1).device_type == "cpu"


def test_ranks_use_one_thread_unless_the_environment_sets_another_number() -> None:
    assert rank_environment({"HOME": "h"})["OMP_NUM_THREADS"] == "1"
    environment = rank_environment({"OMP_NUM_THREADS": "6", "GLOO_SOCKET_IFNAME": "x"})
    assert environment["OMP_NUM_THREADS"] == "6"
    assert environment["GLOO_SOCKET_IFNAME"] != "x"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        use_threads({"OMP_NUM_THREADS": "2"})
        assert torch.get_num_threads() == 2
        use_threads({})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)

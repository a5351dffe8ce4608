"""Each term of the planner's predictions, where it decides: ends of a model, copies, offload, links and bandwidth."""

from dataclasses import replace
from math import nan

import pytest

from fanin.datacenter.families.decoders import PRESETS
from fanin.datacenter.network.links import LINKS, Topology, link_of
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.memory import predict_memory, worst_memory
from fanin.datacenter.planner.options import PlanOptions, plan
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.timing import Machine, predict_timing
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.flops import HARDWARE, PASSES
from fanin.protos.errors import InvalidInput

TOPOLOGY = Topology(inside=LINKS["nvlink4"], between=LINKS["ib-ndr"], ranks_per_node=8)
MACHINE = Machine(hardware=HARDWARE["h100"], topology=TOPOLOGY, efficiency=0.6)
HALF, FULL = 2, 4


def job_of(mesh: str, *, num_layers: int = 12, batch_size: int = 16, **settings: object) -> Job:
    config = replace(PRESETS["125m"], num_layers=num_layers)
    return Job(
        facts=decoder_facts("125m", config),
        parallel=ParallelSettings(mesh=MeshShape.parse(mesh), **{"precision": "bf16"} | settings),
        training=TrainingSettings(batch_size=batch_size, learning_rate=1e-3),
        sequence=512,
    )


def test_the_stage_with_the_logits_may_need_the_most() -> None:
    job = job_of("pp=2", num_layers=2, microbatches=2)
    first, last = (predict_memory(job, rank).total for rank in (0, 1))
    assert last > first
    assert worst_memory(job).total == last


def test_copies_of_a_model_keep_buckets_of_gradients() -> None:
    alone, copied = job_of("none", batch_size=2), job_of("dp_replicate=8")
    parameters = predict_memory(copied).parameters
    assert predict_memory(copied).gradients - predict_memory(alone).gradients == parameters


def test_autocast_keeps_the_weights_in_half_precision() -> None:
    alone, sharded = predict_memory(job_of("none", batch_size=2)), predict_memory(job_of("dp_shard=8"))
    assert alone.working >= alone.parameters * HALF // FULL > sharded.working


def test_an_offloaded_job_has_neither_parameters_nor_state_on_the_gpu() -> None:
    memory = predict_memory(job_of("dp_shard=8", offload=True))
    assert (memory.parameters, memory.optimizer) == (0, 0)
    assert memory.activations > 0


def test_copies_of_a_model_send_their_gradients() -> None:
    slow = replace(MACHINE, topology=replace(TOPOLOGY, inside=link_of("1")))
    fast_s, slow_s = (predict_timing(job_of("dp_replicate=8"), machine).data_s for machine in (MACHINE, slow))
    assert 0 < fast_s < slow_s


def test_reading_the_weights_bounds_a_small_chunk() -> None:
    hardware = replace(MACHINE.hardware, memory_bytes_per_second=1e6)
    job = job_of("none", batch_size=2)
    seconds = predict_timing(job, replace(MACHINE, hardware=hardware)).compute_s
    # A pass reads each value of the layers and of the head in half precision. The embedding is not multiplied.
    num_values = job.facts.num_values - job.facts.vocabulary * job.facts.width
    assert seconds == pytest.approx(PASSES * HALF * num_values / 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"efficiency": nan}, "--efficiency: got nan, expected a share above 0.0 and up to 1.0"),
        ({"efficiency": -1.0}, "--efficiency: got -1.0, expected a share"),
        ({"efficiency": 0.0}, "--efficiency: got 0.0, expected a share"),
        ({"world": 0}, "--world: got 0, expected at least 1 rank"),
        ({"model": "missing.toml"}, "model: missing.toml cannot be read (No such file or directory), expected a .toml"),
    ],
)
def test_options_without_a_meaning_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        plan(PlanOptions(**{"model": "tiny", "world": 2} | changes))
    assert str(excinfo.value).startswith(message)

"""Traffic between copies under each communication hook, and PowerSGD's residuals; run by the ranks of parity.py.

Traffic is counted twice: by fanin's own counter, and by torch's record of collectives in C++. The record also has the
calls that a hook makes from other threads.
"""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.network.bandwidths import measure
from fanin.datacenter.network.collectives import COLLECTIVES, GLOO, check
from fanin.datacenter.network.counters import ByteCounter, make_visible
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import padded_objective
from fanin.datacenter.training.communication import apply_communication
from fanin.datacenter.training.loop import TrainingLoop
from fanin.edge.export import squared_error

RECORD = {"TORCH_FR_BUFFER_SIZE": "64"}
"""Environment variables that a rank needs before it creates its process group."""
CPU, SUM, AVG = torch.device("cpu"), dist.ReduceOp.SUM, dist.ReduceOp.AVG
BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Byte": 1, "Char": 1}
EVALUATE_EVERY = 4
WIDTHS, SAMPLES, DENSE_STEPS, NUM_RESIDUAL_STEPS = (12, 10), 8, 2, 8
FACTOR_RANKS = {"powersgd": 2, "full": WIDTHS[1]}
"""Name to rank of the factors."""


def run_counted(trainer: TrainingLoop, mesh: DeviceMesh, num_steps: int) -> Mapping[str, np.ndarray]:
    """Train, and return each step's (calls, bytes): ``sent`` from the counter, ``recorded`` from torch's record."""
    counter_rows, record_rows = [], []
    runner = trainer.engine.rank_model.runners[0]
    assert isinstance(runner, DistributedDataParallel)
    if trainer.engine.rank_model.training.accumulate == 1 and not runner._comm_hooks:
        make_visible(runner)
    last = _record(-1)[0]
    while trainer.state.step < num_steps:
        with ByteCounter(mesh) as counter:
            trainer.step()
        amounts = counter.counts.values()
        counter_rows.append((sum(each.num_calls for each in amounts), sum(each.size_bytes for each in amounts)))
        last, *totals = _record(last)
        record_rows.append(totals)
        if trainer.state.step % EVALUATE_EVERY == 0:
            trainer.record_evaluation()
            last = _record(last)[0]
    return {"sent": np.array(counter_rows), "recorded": np.array(record_rows)}


def _record(previous: int) -> tuple[int, int, int]:
    """Return (number of the last collective, non-empty collectives after ``previous``, their bytes)."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])
    new = [entry for entry in entries if entry["record_id"] > previous]
    sizes = [
        math.prod(shape) * BYTES[dtype]
        for entry in new
        for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    ]
    return max((entry["record_id"] for entry in new), default=previous), sum(map(bool, sizes)), sum(sizes)


def collective_checks() -> Mapping[str, np.ndarray]:
    """Compare collectives with numpy; return the numbers of results and of errors, and the sizes sent.

    ``told`` has the errors of a collective that replaces a mean by a sum.
    """
    num, errors = check(CPU, GLOO)
    means = COLLECTIVES["reduce_scatter"]
    # gloo had this bug in 2025 (pytorch#162338).
    faulty_collective = replace(
        means, call=lambda tensor, operation: means.call(tensor, SUM if operation == AVG else operation)
    )
    _, fault_errors = check(CPU, GLOO, {"reduce_scatter": faulty_collective})
    rows = [measure(name, 1200, 1, CPU) for name in COLLECTIVES]
    sizes = [(row.size_bytes, row.calls, row.counted_bytes, row.expected_bytes, row.wire_bytes) for row in rows]
    return {"checked": np.array([num, len(errors)]), "told": np.array(fault_errors), "sizes": np.array(sizes)}


def powersgd_residuals(job: TrainConfig, rank: int, mesh: DeviceMesh, factors: int) -> Mapping[str, np.ndarray]:
    """Train in two accumulation steps; return one matrix's gradients and its residual, by step.

    ``own`` is the gradient of this rank, ``given`` the gradient that all ranks received, and ``kept`` the residual.
    """
    generator = torch.Generator().manual_seed(rank)
    module = nn.Linear(*WIDTHS, bias=False).double()
    torch.nn.init.constant_(module.weight, 0.1)
    objective = padded_objective(squared_error)
    training = replace(job.training, batch_size=2 * SAMPLES, accumulate=2)
    model = TrainableModel(module=module, layout=job.model.parallel_layout, objective=objective)
    engine = build_engine(model, job.parallel, training, mesh)
    runner = engine.rank_model.runners[0]
    assert isinstance(runner, DistributedDataParallel)
    apply_communication(runner, CommunicationSettings(hook="powersgd", rank=factors, dense_steps=DENSE_STEPS))
    ((_, state),) = runner._comm_hooks
    if factors == min(WIDTHS):
        # Factors of full rank have no fewer bytes than the matrix, so torch would send the matrix itself.
        state.min_compression_rate = 0
    rows = []
    for _ in range(NUM_RESIDUAL_STEPS):
        inputs, targets = (torch.randn(SAMPLES, width, generator=generator).double() for width in WIDTHS)
        # As in the engine: the mean over all samples, times the copies that DistributedDataParallel divides by.
        local_module = copy.deepcopy(module)
        local_module.zero_grad()
        (objective.loss_sum(local_module(inputs), targets) / (2 * SAMPLES) * 2).backward()
        engine.step(Batch(inputs=inputs, targets=targets), 2 * SAMPLES)
        assert local_module.weight.grad is not None
        assert module.weight.grad is not None
        residuals = state.error_dict.get(0, torch.zeros(module.weight.numel()))
        rows.append(
            [local_module.weight.grad.flatten().numpy(), module.weight.grad.flatten().numpy().copy(), residuals.numpy()]
        )
    local_gradients, mean_gradients, residuals = np.array(rows).transpose(1, 0, 2)
    return {"own": local_gradients, "given": mean_gradients, "kept": residuals}

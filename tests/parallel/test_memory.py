"""Predicted peaks are within a tenth of the peaks that torch's tracker measures with fake tensors.

The tracker has no autocast, which half precision without FSDP2 uses. There, the bytes that a layer saves are counted.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel.memory import CELLS, SMALL, MemoryCell
from parallel.programs import Programs
from support.nightly import in_ci
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fanin.datacenter.models.decoder import Decoder
from fanin.datacenter.planner.memory import activations_of

TOLERANCE = 0.10
Peaks = dict[str, tuple[int, int]]


def run(programs: Programs, file: Path, size: str) -> Peaks:
    # Warnings are no errors, because the tracker uses deprecated functions of torch.
    programs.check("memory", file, size, warning_action="default", timeout_s=1200.0)
    return {
        name: (tracked_bytes, predicted_bytes)
        for name, (tracked_bytes, predicted_bytes) in json.loads(file.read_text()).items()
    }


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("size", in_ci(CELLS, ("first",)))
def test_the_formula_is_within_a_tenth_of_the_tracker(programs: Programs, tmp_path: Path, size: str) -> None:
    peaks = run(programs, tmp_path / "peaks.json", size)
    assert sorted(peaks) == sorted(CELLS[size])
    outliers = {
        name: (tracked_bytes, predicted_bytes)
        for name, (tracked_bytes, predicted_bytes) in peaks.items()
        if abs(predicted_bytes / tracked_bytes - 1) > TOLERANCE
    }
    assert outliers == {}


def saved_bytes(cell: MemoryCell, num_layers: int) -> int:
    """Return the bytes that autograd saves for a decoder of so many layers, without the parameters."""
    module = Decoder(replace(cell.config, num_layers=num_layers))
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}
    storages: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=cell.job().half)
    with saved_tensors_hooks(save, lambda tensor: tensor), autocast:
        module(torch.zeros(cell.samples, cell.length, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for at, tensor in storages.items() if at not in parameters)


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_a_layer_on_one_process_saves_the_bytes_of_the_formula(precision: str) -> None:
    cell = MemoryCell(mesh="none", settings={"precision": precision})
    job = cell.job()
    a_layer = saved_bytes(cell, 3) - saved_bytes(cell, 2)
    # The predicted working memory has autocast's copies of the matrices.
    copies = sum(2 * each.numel() for each in Decoder(SMALL).layers[0].parameters() if each.ndim > 1) if job.half else 0
    assert a_layer - copies == activations_of(job).layer

"""FLOPs of a token: the definition, compared with torch's counter, and the numbers derived from it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fanin.datacenter.families.decoders import PRESETS
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.watch.flops import HARDWARE, Work, best_gemm, cpu_hardware, hardware_of, mfu
from fanin.protos.errors import InvalidInput


@settings(max_examples=20)
@given(
    layers=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([16, 32]),
    vocabulary=st.integers(5, 40),
    tied=st.booleans(),
)
def test_flops_are_those_that_torch_counts(layers: int, groups: int, width: int, vocabulary: int, tied: bool) -> None:
    config = DecoderConfig(
        vocabulary=vocabulary,
        width=width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4 // groups,
        feed_forward=24,
        tied=tied,
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    module = Decoder(config)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    work = decoder_facts("x", config).work
    # torch does not count attention on a CPU.
    assert counter.get_total_flops() == tokens.numel() * replace(work, attention_width=0).flops_per_token(8)


def test_the_definition_in_numbers() -> None:
    work = Work(matmul_values=100, num_layers=3, attention_width=16)
    assert work.flops_per_token(10) == 6 * 100 + 6 * 3 * 16 * 10


def test_llama_8b_has_its_published_numbers() -> None:
    facts = decoder_facts("8b", PRESETS["8b"])
    assert facts.num_values == 8_030_261_248
    assert facts.work.flops_per_token(2048) == pytest.approx(48.25e9, rel=1e-3)


def test_mfu_is_a_share_of_the_peak() -> None:
    # torchtitan's table (8 B, 8 H100, 5,762 tokens a second each at 8192) has 33 to 39 % over its variants.
    per_token = decoder_facts("8b", PRESETS["8b"]).work.flops_per_token(8192)
    assert mfu(per_token, 5762, HARDWARE["h100"].flops_per_second) == pytest.approx(0.337, abs=0.002)


@pytest.mark.parametrize("peak", [0.0, -1.0])
def test_a_peak_is_positive(peak: float) -> None:
    with pytest.raises(InvalidInput, match="FN-1390"):
        mfu(1.0, 1.0, peak)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_hardware_is_selected_by_the_name_that_cuda_reports(name: str, row: str | None) -> None:
    hardware = hardware_of(name)
    assert (hardware and hardware.name) == row


def test_each_row_has_its_source() -> None:
    for hardware in HARDWARE.values():
        assert hardware.source
        # Peak over bandwidth: all of them compute a few hundred FLOPs for each byte.
        assert 100 < hardware.flops_per_second / hardware.memory_bytes_per_second < 500


def test_a_cpu_is_measured() -> None:
    # Any machine that runs torch computes more than a megaflop a second, and less than a petaflop.
    assert 1e6 < best_gemm(sizes=(64,), repeats=2) < 1e15
    hardware = cpu_hardware(5)
    assert (hardware.name, hardware.memory_bytes) == ("cpu", 5)
    assert hardware.memory_bytes_per_second > 1e6


def test_the_peak_is_that_of_the_precision_of_the_job() -> None:
    peaks = [HARDWARE["b200"].peak_in(precision) for precision in ("bf16", "fp16", "full", "double")]
    assert peaks == [2250e12, 2250e12, 75e12, 37e12]

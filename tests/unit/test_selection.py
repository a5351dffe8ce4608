"""Who is asked, and when the others may come back."""

import random
from collections import Counter

import pytest
from support.values import plan

from fanin.protos.messages import Capabilities
from fanin.server.fleet.selection import MAX_WINDOW_S, MIN_WINDOW_S, RETRY_PER_S, choose, retry_window
from fanin.server.runs.suitability import unsuitable

WAITING = tuple("abcdef")


def test_all_are_asked_while_places_last() -> None:
    assert choose(WAITING, 6, random.Random(1)) == WAITING
    assert choose((), 6, random.Random(1)) == ()


def test_nobody_is_asked_without_a_place() -> None:
    assert choose(WAITING, 0, random.Random(1)) == ()


def test_choice_is_without_replacement_seeded_and_uniform() -> None:
    rng, counts = random.Random(7), Counter[str]()
    for _ in range(6000):
        chosen = choose(WAITING, 2, rng)
        assert len(set(chosen)) == 2
        counts.update(chosen)
    assert choose(WAITING, 2, random.Random(3)) == choose(WAITING, 2, random.Random(3))
    # 2000 each are expected, with a standard deviation of 37.
    assert all(abs(counts[device] - 2000) < 200 for device in WAITING)


def can(**changes: object) -> Capabilities:
    fields = {"codecs": ("fixed32",), "runtimes": (), "graph_formats": ("onnx",), "max_download_bytes": 0} | changes
    return Capabilities(**fields)


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        (can(), ""),
        (can(max_download_bytes=1000), ""),
        (can(graph_formats=("tflite", "onnx"), codecs=("int8", "fixed32")), ""),
        (can(codecs=("int8",)), "codec: got ['int8'], expected fixed32"),
        (can(codecs=()), "codec: got [], expected fixed32"),
        (can(graph_formats=("tflite",)), "graph format: got ['tflite'], expected one of ['onnx']"),
        (can(max_download_bytes=999), "download: a limit of 999 bytes, expected at least 1000"),
    ],
)
def test_what_a_device_must_be_able_to_do(capabilities: Capabilities, text: str) -> None:
    assert unsuitable(capabilities, plan(), ("onnx",), 1000) == text


@pytest.mark.parametrize("num_devices", [0, 1, 500, 10_000, 100_000, 10_000_000])
def test_a_retry_window_spreads_the_population(num_devices: int) -> None:
    shortest, longest = retry_window(num_devices)
    assert 0 < shortest < longest
    assert MIN_WINDOW_S <= longest <= MAX_WINDOW_S
    assert longest >= min(num_devices / RETRY_PER_S, MAX_WINDOW_S)

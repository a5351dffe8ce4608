"""A device's memory: which pages are freed, that their content is not lost, and when a trainer frees them."""

import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import PUBLISHER, assignment

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.footprint import PAUSE_S, SparingTrainer, unchanged
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.protos.messages import Assignment
from fanin.simulation import SyntheticTrainer, synthetic_bundle

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="gives back on Linux only")
on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc has many heaps")

PATHS = st.sampled_from(["", "[heap]", "[stack]", "/usr/lib/libm.so.6", "/a folder/b (deleted)"])
PERMISSIONS = st.tuples(*(st.sampled_from([letter, "-"]) for letter in "rwx"), st.sampled_from("ps")).map("".join)


@st.composite
def mappings(draw: st.DrawFn) -> list[tuple[int, int, str, str, int, int]]:
    """Draw (start, end, permissions, path, kB changed in memory, kB changed and swapped out) in rising order."""
    memory_map, end = [], 0
    changed_kb = st.sampled_from([0, 0, 4, 10])
    for row in draw(st.lists(st.tuples(PERMISSIONS, PATHS, changed_kb, changed_kb))):
        start = end + 4096 * draw(st.integers(1, 9))
        end = start + 4096 * draw(st.integers(1, 9))
        memory_map.append((start, end, *row))
    return memory_map


@given(mappings())
def test_only_unchanged_pages_of_a_file_are_freed(rows: list[tuple[int, int, str, str, int, int]]) -> None:
    lines = []
    for start, end, permissions, path, changed_kb, swapped_kb in rows:
        lines += [f"{start:x}-{end:x} {permissions} 00000000 fe:01 1053      {path}", "Size:     4 kB", "Rss:   4 kB"]
        lines += [f"Anonymous:      {changed_kb} kB", "LazyFree:              0 kB", f"Swap:       {swapped_kb} kB"]
        lines += ["SwapPss:               0 kB", "VmFlags: rd ex mr mw me"]
    expected = [
        (start, end)
        for start, end, (_, w, _, kind), path, changed_kb, swapped_kb in rows
        if w == "-" and kind == "p" and path.startswith("/") and not changed_kb and not swapped_kb
    ]
    assert list(unchanged(lines)) == expected


def test_a_page_without_all_counters_counts_as_changed() -> None:
    assert list(unchanged(["1000-2000 r-xp 00000000 fe:01 1053 /a", "Swap:      0 kB"])) == []
    assert list(unchanged(["1000-2000 r-xp 00000000 fe:01 1053 /a", "Anonymous: 0 kB"])) == []


RELEASE_CODE = """
import ctypes, hashlib, mmap, sys
import numpy as np
from fanin.clients.device.footprint import give_back

def resident_kb():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

# A page of a file that is changed in memory and then made read-only, as the loader does with what it relocates.
with open(sys.argv[1], "rb") as file:
    page = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY)
page[:7] = b"changed"
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ) == 0
x = np.random.default_rng(0).random((64, 64))
said = [hashlib.sha256(x @ x).hexdigest(), np.linalg.norm(x)]
before_kb = resident_kb()
give_back()
print(before_kb - resident_kb())
assert ctypes.string_at(address, 7) == b"changed"
assert [hashlib.sha256(x @ x).hexdigest(), np.linalg.norm(x)] == said
"""


@on_linux
def test_a_freed_page_keeps_its_content(tmp_path: Path) -> None:
    file = tmp_path / "page"
    file.write_bytes(bytes(4096))
    completed = subprocess.run(
        [sys.executable, "-c", RELEASE_CODE, str(file)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    # At start, numpy and the interpreter alone read more than twice as much.
    assert int(completed.stdout) > 4096


HEAP_CODE = """
import ctypes, sys, threading
from fanin.clients.device.footprint import share_one_heap

if sys.argv[1] == "one":
    share_one_heap()
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(4)

def allocate():
    barrier.wait()
    libc.malloc(5000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@on_glibc
def test_threads_share_one_heap(tmp_path: Path) -> None:
    num_heaps = {}
    for word in ("one", "own"):
        subprocess.run([sys.executable, "-c", HEAP_CODE, word, str(tmp_path / word)], check=True)
        num_heaps[word] = (tmp_path / word).read_text().count("<heap ")
    assert num_heaps["one"] == 1 < num_heaps["own"]


@dataclass
class ScriptedTrainer:
    """A scripted trainer and clock; ``calls`` lists their calls in order."""

    now_s: float = 1000.0
    train_s: float = 5.0
    fault: Exception | None = None
    calls: list[str] = field(default_factory=list)
    runtime: str = "library 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        self.calls.append("train")
        self.now_s += self.train_s
        if self.fault is not None:
            raise self.fault
        return SyntheticTrainer(partition=0).train(model, assignment, should_continue)

    def sparing_trainer(self) -> SparingTrainer:
        return SparingTrainer(self, spare=lambda: self.calls.append("spare"), now=lambda: self.now_s)


@pytest.fixture
def model(tmp_path: Path) -> OpenedModel:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, {"a": (2, 3)})
    return OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())


def test_a_trainer_frees_memory_before_and_after_but_not_each_time(model: OpenedModel) -> None:
    scripted_trainer = ScriptedTrainer()
    trainer = scripted_trainer.sparing_trainer()
    assert (trainer.runtime, trainer.graph_format) == ("library 1", "onnx")
    for _ in range(2):
        trainer.train(model, assignment(), lambda: True)
    assert scripted_trainer.calls == ["spare", "train", "spare", "train"]
    # The pause begins at the end of a training that freed memory.
    scripted_trainer.now_s += PAUSE_S - scripted_trainer.train_s
    trainer.train(model, assignment(), lambda: True)
    assert scripted_trainer.calls[4:] == ["spare", "train", "spare"]


def test_a_training_that_fails_frees_memory_too(model: OpenedModel) -> None:
    scripted_trainer = ScriptedTrainer(fault=ValueError("loss became nan"))
    with pytest.raises(ValueError, match="loss became nan"):
        scripted_trainer.sparing_trainer().train(model, assignment(), lambda: True)
    assert scripted_trainer.calls == ["spare", "train", "spare"]

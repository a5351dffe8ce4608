"""The states of stages on a device's disk: reading, refused files, and the states that are kept."""

import errno
import hashlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.full_disk import full_disk, in_child
from support.synced import durable_files, synced

from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.protocols import StoredStates
from fanin.clients.device.storage.states import MAGIC, MAX_RUNS, StateLabel
from fanin.edge.codecs.pipeline import States
from fanin.protos.errors import Corrupted, NotFound, StorageFull
from fanin.simulation.federation.memory import MemoryStates

NUM = 5


def label(number: int = 3, run: str = "run", lineage: int = 0) -> StateLabel:
    return StateLabel(run_id=run, lineage=lineage, round=number)


def states_of(value: float) -> States:
    return {
        "scaffold": {"control": np.arange(NUM, dtype=np.float32) + np.float32(value)},
        "none": {},
        "error_feedback": {"residual": np.full(NUM, value, np.float32)},
    }


FIRST = states_of(0.0)


def are_equal(first: States, second: States) -> bool:
    def bits(states: States) -> dict[str, dict[str, bytes]]:
        return {stage: {name: values.tobytes() for name, values in state.items()} for stage, state in states.items()}

    return bits(first) == bits(second) and list(first) == list(second)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoredStates:
    return Cache(tmp_path).states if request.param == "disk" else MemoryStates()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "states").iterdir())


def test_states_come_back_read_only(store: StoredStates) -> None:
    store.put(label(), states_of(1.5))
    states = store.get(label(), FIRST)
    assert are_equal(states, states_of(1.5))
    with pytest.raises(ValueError, match="read-only"):
        states["scaffold"]["control"][0] = 1.0


def test_a_state_of_the_same_round_is_replaced(store: StoredStates) -> None:
    store.put(label(), states_of(1.0))
    store.put(label(), states_of(2.0))
    assert are_equal(store.get(label(), FIRST), states_of(2.0))


def test_the_other_states_of_a_run_are_removed(store: StoredStates) -> None:
    for number in range(1, 6):
        store.put(label(number), states_of(number))
        store.put(label(number, run="run.1"), states_of(-number))
    store.keep("run", (3, 5))
    for number in range(1, 6):
        assert are_equal(store.get(label(number, run="run.1"), FIRST), states_of(-number))
        if number in (3, 5):
            assert are_equal(store.get(label(number), FIRST), states_of(number))
        else:
            with pytest.raises(NotFound):
                store.get(label(number), FIRST)


def test_the_states_of_the_last_used_runs_are_kept(tmp_path: Path) -> None:
    disk, memory = Cache(tmp_path).states, MemoryStates()
    for store in (disk, memory):
        for index in range(6):
            store.put(label(1, run=f"run-{index}"), states_of(index))
            if store is disk:
                os.utime(tmp_path / "states" / f"run-{index}.1.state", ns=(index * 10**9,) * 2)
        # Reading a state counts as use.
        store.get(label(1, run="run-0"), FIRST)
        store.keep("run-1", (1,))
        remaining = set()
        for index in range(6):
            try:
                store.get(label(1, run=f"run-{index}"), FIRST)
            except NotFound:
                continue
            remaining.add(index)
        assert len(remaining) == MAX_RUNS
        assert remaining == {0, 1, 4, 5}


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    with raises(NotFound, "state of run run, round 3: got no file run.3.state, expected the one of that update"):
        Cache(tmp_path).states.get(label(), FIRST)


def flip_bit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: flip_bit(data, 9),
        lambda data: flip_bit(data, 41),
        lambda data: flip_bit(data, len(data) - 1),
    ],
    ids=["cut", "longer", "no digest", "other digest", "other label", "other value"],
)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))
    path = tmp_path / "states" / "run.3.state"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Corrupted, match="FN-0837"):
        store.get(label(), FIRST)


@pytest.mark.parametrize("magic", [b"fanin-s2", b"", b"fan"])
def test_a_state_of_another_format_is_refused(tmp_path: Path, magic: bytes) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))
    path = tmp_path / "states" / "run.3.state"
    path.write_bytes(magic + path.read_bytes()[8:] if len(magic) == 8 else magic)
    with raises(Corrupted, f"state of run run, round 3: got the format {magic!r}, expected b'fanin-s1'"):
        store.get(label(), FIRST)


def test_a_state_of_another_lineage_is_refused(store: StoredStates) -> None:
    store.put(label(lineage=2), states_of(1.0))
    with raises(
        Corrupted,
        "state of run run, round 3: got one of run run, lineage 2, round 3, expected run run, lineage 5, round 3",
    ):
        store.get(label(lineage=5), FIRST)


def test_a_file_that_was_renamed_is_refused(tmp_path: Path) -> None:
    store = Cache(tmp_path).states
    store.put(label(7), states_of(1.0))
    (tmp_path / "states" / "run.7.state").rename(tmp_path / "states" / "run.3.state")
    with raises(
        Corrupted,
        "state of run run, round 3: got one of run run, lineage 0, round 7, expected run run, lineage 0, round 3",
    ):
        store.get(label(), FIRST)


def test_a_state_of_another_form_is_refused(store: StoredStates) -> None:
    store.put(label(), states_of(1.0))
    other = {"error_feedback": {"residual": np.zeros(NUM + 1, np.float32)}}
    with raises(
        Corrupted,
        "state of run run, round 3: got the tensors {'error_feedback/residual': (5,), 'scaffold/control': (5,)}, "
        "expected {'error_feedback/residual': (6,)}",
    ):
        store.get(label(), other)


def test_the_bytes_are_those_of_the_documented_format(tmp_path: Path) -> None:
    store = Cache(tmp_path).states
    store.put(StateLabel(run_id="r", lineage=4, round=12), {"s": {"t": np.array([1.0, -2.0], np.float32)}})
    data = (tmp_path / "states" / "r.12.state").read_bytes()
    assert data[:8] == b"fanin-s1"
    assert data[40:].startswith(b'["r",4,12]\nfanin-t2')
    assert data[-8:] == struct.pack("<2f", 1.0, -2.0)


def test_a_state_is_durable_before_put_returns(tmp_path: Path) -> None:
    store = Cache(tmp_path).states

    with synced(tmp_path) as syncs:
        store.put(label(), states_of(1.0))
    assert durable_files(syncs) == [tmp_path / "states" / "run.3.state"]


def test_a_full_disk_leaves_the_state_before(tmp_path: Path) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))

    def work() -> None:
        with full_disk(4), pytest.raises(StorageFull, match=r"cannot be written"):
            store.put(label(), states_of(2.0))
        assert names(tmp_path) == ["run.3.state"]
        assert are_equal(store.get(label(), FIRST), states_of(1.0))

    in_child(work)


def test_foreign_files_and_drafts(tmp_path: Path) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))
    folder = tmp_path / "states"
    (folder / ".DS_Store").write_bytes(b"foreign")
    (folder / "lost+found").mkdir()
    (folder / "run.3.state.new").write_bytes(b"a draft of a killed process")
    store.keep("run", (3,))
    assert names(tmp_path) == [".DS_Store", "lost+found", "run.3.state"]


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(("harm", "number"), [(replace_by_folder, errno.EISDIR), (replace_by_loop, errno.ELOOP)])
def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path, harm: Callable[[Path], None], number: int) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))
    harm(tmp_path / "states" / "run.3.state")
    with raises(Corrupted, f"state of run run, round 3: run.3.state cannot be read ({os.strerror(number)})"):
        store.get(label(), FIRST)


LINE = b'["run",0,3]\n'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no line", "subsection not found"),
        (b"{\n", "Expecting property name"),
        (b"3\n", "cannot unpack"),
        (b"[1]\n", "not enough values"),
        (b"[" * 100_000 + b"\n", "recursion"),
        (b"\xff\n", "can't decode"),
        (LINE + b"nothing", "parameters: got magic"),
    ],
)
def test_a_state_of_another_content_with_its_digest_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    store = Cache(tmp_path).states
    (tmp_path / "states" / "run.3.state").write_bytes(MAGIC + hashlib.sha256(content).digest() + content)
    with pytest.raises(Corrupted, match=f"^state of run run, round 3: got another content than .*{re.escape(text)}"):
        store.get(label(), FIRST)


def test_a_state_that_is_not_finite_is_refused(store: StoredStates) -> None:
    store.put(label(), states_of(np.nan))
    with raises(Corrupted, "state of run run, round 3: got NaN or infinity, expected finite values"):
        store.get(label(), FIRST)


def test_two_digests_with_the_same_beginning_are_shown_in_full(tmp_path: Path) -> None:
    store = Cache(tmp_path).states
    store.put(label(), states_of(1.0))
    path = tmp_path / "states" / "run.3.state"
    right = path.read_bytes()[8:40].hex()
    path.write_bytes(flip_bit(path.read_bytes(), 39))
    wrong = path.read_bytes()[8:40].hex()
    with raises(
        Corrupted, f"state of run run, round 3: damaged on this disk: got the digest {right}, expected {wrong}"
    ):
        store.get(label(), FIRST)

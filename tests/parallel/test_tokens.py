"""Token ids in a file: read in place, in windows like those of a text, and refused in any other file."""

import json
import multiprocessing
import pickle
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fanin.datacenter.config.train_config import TrainConfig, parse_config
from fanin.datacenter.data.loading import read_tokens
from fanin.datacenter.data.samples import DataSplit
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.training.model import build_job_model
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

TOKENS = np.random.default_rng(0).integers(0, 7, 90)


def config(path: Path, vocabulary: int = 7) -> TrainConfig:
    return parse_config(
        f"""
        data = {{ tokens = "{path}", length = 8, held_fraction = 0.3 }}
        training = {{ batch_size = 4, learning_rate = 0.01 }}
        stop = {{ steps = 3 }}
        model.decoder = {{ vocabulary = {vocabulary}, width = 8, num_layers = 1, num_heads = 2, num_kv_heads = 1 }}
        """,
        "here",
    )


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "int32", "uint32", "int64"])
def test_tokens_of_any_kind_of_integer_are_the_same_job(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, TOKENS.astype(dtype))
    parts = build_job_model(config(path)).data
    indices = np.arange(len(parts.train))
    inputs, targets = parts.train.take(indices)
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    is_target = targets != NO_TOKEN
    assert (inputs.ravel()[: 63 - 1].numpy() == TOKENS[: 63 - 1]).all()
    assert (targets[is_target].numpy() == TOKENS[1:63]).all()
    assert len(parts.held_out) == 4


def test_an_array_is_memory_mapped_and_an_archive_has_one(tmp_path: Path) -> None:
    array, archive, text = tmp_path / "tokens.npy", tmp_path / "tokens.npz", tmp_path / "text.txt"
    np.save(array, TOKENS)
    np.savez_compressed(archive, whatever=TOKENS)
    assert isinstance(read_tokens(array), np.memmap)
    text.write_text("".join("abcdefg"[token] for token in TOKENS))
    array_config = config(array)
    losses = [train_rank(each).metrics.trained.losses for each in (array_config, config(archive))]
    text_config = replace(array_config, data=replace(array_config.data, tokens=None, text=str(text)))
    assert losses == [train_rank(text_config).metrics.trained.losses] * 2


def _write_two_arrays(path: Path) -> None:
    np.savez(path.with_suffix(".npz"), a=TOKENS, b=TOKENS)


def _write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(TOKENS))


def _array_writer(value: object) -> Callable[[Path], None]:
    return lambda path: np.save(path, value, allow_pickle=True)


def _header_writer(header: str) -> Callable[[Path], None]:
    """Write an .npy file with a custom header."""
    text = header.encode() + b"\n"
    return lambda path: path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(64)) and None


def _shape_writer(shape: str) -> Callable[[Path], None]:
    return _header_writer(f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}")


def _archive_writer(kind: int = ZIP_STORED, **places: int) -> Callable[[Path], None]:
    """Write a damaged .npz file: its ``flags``, its ``method``, or its one ``member`` from an offset on."""

    def write(path: Path) -> None:
        np.save(path, TOKENS)
        value = path.read_bytes()
        path.unlink()
        path = path.with_suffix(".npz")
        with ZipFile(path, "w", kind) as archive:
            archive.writestr("a.npy", value)
        content, directory = bytearray(path.read_bytes()), path.read_bytes().index(b"PK\1\2")
        # A member's header has 30 bytes and its name. The flags are at offset 6 and the method at offset 8, and 2 later
        # in the directory.
        for key, byte in places.items():
            if key == "member":
                content[35 + byte : 55 + byte] = b"\xff" * 20
            else:
                offset = {"flags": 6, "method": 8}[key]
                content[offset] = content[directory + offset + 2] = byte
        path.write_bytes(content)

    return write


def _write_text_archive(path: Path) -> None:
    with ZipFile(path.with_suffix(".npz"), "w") as archive:
        archive.writestr("a.txt", "1 2 3")


NO_ARRAY = "not an array of numbers as numpy writes it ("


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (_write_pickle, "not an array of numbers as numpy writes it ("),
        (_array_writer(np.array([{}], object)), "not an array of numbers as numpy writes it ("),
        (lambda path: path.write_bytes(b""), "not an array of numbers as numpy writes it ("),
        (_write_two_arrays, "got arrays a, b, expected one, of token ids"),
        (lambda path: path.with_suffix(".npz").write_bytes(b"PK\3\4"), "not an array of numbers as numpy writes it ("),
        (_array_writer(TOKENS.reshape(2, -1)), "got int64 [2, 45], expected one row of integers"),
        (_array_writer(TOKENS / 2), "got float64 [90], expected one row of integers"),
        (_array_writer(TOKENS - 1), "got token ids from -1 to 5, expected 0 or more"),
        (_array_writer(TOKENS + 1), "got 8 tokens, expected at most the model's 7; raise its vocabulary"),
        (_array_writer(TOKENS[:0]), "got no tokens, expected at least one window"),
        (_header_writer("{'descr': '<i8', 'shape': (9,"), NO_ARRAY),
        (_header_writer("  a\n b"), NO_ARRAY),
        (_header_writer("{'descr': (), 'fortran_order': False, 'shape': (9,)}"), NO_ARRAY),
        (_shape_writer(f"({10**28},)"), NO_ARRAY),
        (_shape_writer("(True,)"), NO_ARRAY),
        (_archive_writer(kind=ZIP_DEFLATED, member=0), f"{NO_ARRAY}Error -3"),
        (_archive_writer(kind=ZIP_LZMA, member=8), f"{NO_ARRAY}Corrupt"),
        (_archive_writer(flags=1), f"{NO_ARRAY}File 'a.npy' is encrypted"),
        (_archive_writer(method=99), f"{NO_ARRAY}That compression method is not supported"),
        (_write_text_archive, f"{NO_ARRAY}its one member is bytes"),
    ],
)
def test_files_without_a_row_of_tokens_are_refused(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "tokens.npy"
    write(path)
    path = next(tmp_path.iterdir(), path)
    with pytest.raises(InvalidInput) as excinfo:
        build_job_model(config(path))
    assert str(excinfo.value).startswith(f"{path}: ")
    assert message in str(excinfo.value)


def write_sparse(path: Path, dtype: str, num: int) -> None:
    """Write a sparse file of zeros and one other token, which takes no disk space."""
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num,))[num // 2] = 6


def page_faults(work: Callable[[], object]) -> int:
    """Return the number of pages that the work touched for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_tokens_that_cannot_be_too_high_are_not_scanned(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    write_sparse(path, "uint8", 2**28)
    parts = list[DataSplit]()
    assert page_faults(lambda: parts.append(build_job_model(config(path, 256)).data)) < 1000
    samples = parts[0].train
    assert page_faults(lambda: samples.take(np.arange(0, len(samples), len(samples) // 8))) < 1000


def test_only_the_highest_token_of_a_dtype_may_be_too_high(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(255, dtype=np.uint8))
    assert len(build_job_model(config(path, 255)).data.train) > 0
    np.save(path, np.arange(256, dtype=np.uint8))
    with pytest.raises(InvalidInput, match="FN-1233"):
        build_job_model(config(path, 255))


def _load_on(rank: int, path: Path) -> None:
    """Write how much of the tokens one of two ranks reads, and its errors."""
    dist.init_process_group("gloo", init_method=f"file://{path}.meet", rank=rank, world_size=2)
    small, num_faults, errors = path.with_name("small.npy"), 0, list[str]()
    # Imports and first calls touch pages of their own.
    build_job_model(config(small), rank=rank, num_ranks=2)
    for vocabulary in (7, 6):
        try:
            num_faults += page_faults(partial(build_job_model, config(path, vocabulary), rank=rank, num_ranks=2))
        except InvalidInput as exc:
            errors.append(str(exc))
    path.with_name(f"{rank}.json").write_text(json.dumps([num_faults, errors]))
    dist.destroy_process_group()


def test_first_rank_alone_reads_all_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    write_sparse(path, "int32", 2**27)
    write_sparse(path.with_name("small.npy"), "int32", 100)
    ranks = [multiprocessing.get_context("fork").Process(target=_load_on, args=(rank, path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    # The tokens take half a gigabyte; the kernel maps 16 pages or more at a fault.
    assert first[0] > 2**29 / 4096 / 64
    assert second[0] < first[0] / 4
    assert first[1] == second[1] == [f"{path}: got 7 tokens, expected at most the model's 6; raise its vocabulary"]

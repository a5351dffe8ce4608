"""Public data sets: the sources of their files, refused files, and the laws of the split by speaker."""

import gzip
import hashlib
import http.client
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import images, labels, real_places, unreachable, write_fashion_mnist
from support.errors import raises

from fanin.clients.data.files import DataFile, DataSet, Places, places_from, read_files
from fanin.clients.data.public import (
    FASHION_MNIST,
    SHAKESPEARE,
    Cutting,
    Shakespeare,
    fashion_mnist,
    parse_images,
    parse_labels,
    shakespeare,
    split_by_speaker,
)
from fanin.protos.errors import InvalidInput, StorageFull

CONTENT = b"plain text\n"
ARCHIVE = gzip.compress(CONTENT, mtime=0)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILES = DataSet(
    name="small",
    files=(
        DataFile(name="a.gz", url="http://mirror/small/a.gz", size_bytes=len(ARCHIVE), sha256=SHA256),
        DataFile(name="b.txt", url="http://mirror/small/b.txt", size_bytes=len(CONTENT), sha256=SHA256),
    ),
)
ADVICE = (
    "put the files into FOLDER/small and set FANIN_DATA to FOLDER; they come from http://mirror/small; "
    f"name (SHA-256 of the unpacked content): a.gz ({SHA256}), b.txt ({SHA256})"
)


def mirror(url: str, max_bytes: int) -> bytes:
    """Serve both files, at most one byte more than the limit."""
    return (ARCHIVE if url.endswith(".gz") else CONTENT)[: max_bytes + 1]


def places(folder: Path, fetch: Callable[[str, int], bytes] = unreachable, data: Path | None = None) -> Places:
    return Places(data=data, cache=folder / "cache", fetch=fetch)


def put(folder: Path, name: str = "small") -> Path:
    """Write both files where a user or a package would put them."""
    (folder / name).mkdir(parents=True)
    (folder / name / "a.gz").write_bytes(ARCHIVE)
    (folder / name / "b.txt").write_bytes(CONTENT)
    return folder


def test_the_environment_names_the_places() -> None:
    locations = places_from({"FANIN_DATA": "/data", "XDG_CACHE_HOME": "/cache"})
    assert (locations.data, locations.cache) == (Path("/data"), Path("/cache/fanin"))
    locations = places_from({"FANIN_DATA": ""})
    assert (locations.data, locations.cache) == (None, Path.home() / ".cache" / "fanin")


def test_a_downloaded_file_is_stored_and_not_fetched_again(tmp_path: Path) -> None:
    assert list(read_files(places(tmp_path, mirror), FILES)) == [CONTENT, CONTENT]
    assert sorted(path.name for path in (tmp_path / "cache/small").iterdir()) == ["a.gz", "b.txt"]
    assert list(read_files(places(tmp_path), FILES)) == [CONTENT, CONTENT]


def test_the_users_folder_has_priority_and_no_fallback(tmp_path: Path) -> None:
    put(tmp_path / "cache")
    own_folder = put(tmp_path / "own")
    (own_folder / "small/b.txt").write_bytes(b"another edition")
    assert list(read_files(places(tmp_path, mirror, own_folder), FILES)) == [CONTENT, b"another edition"]
    (own_folder / "small/a.gz").unlink()
    with raises(InvalidInput, f"{own_folder}/small/a.gz: no such file, but FANIN_DATA names that folder; {ADVICE}"):
        list(read_files(places(tmp_path, mirror, own_folder), FILES))


def test_the_systems_package_is_used_without_a_network(tmp_path: Path) -> None:
    data_set = replace(FILES, package=put(tmp_path) / "small")
    assert list(read_files(places(tmp_path), data_set)) == [CONTENT, CONTENT]


DAMAGE_CASES = (b"", ARCHIVE[:-9], b"no gzip", gzip.compress(b"other", mtime=0), gzip.compress(bytes(10**6), mtime=0))


@pytest.mark.parametrize("damage", DAMAGE_CASES)
def test_a_damaged_cache_is_repaired(tmp_path: Path, damage: bytes) -> None:
    path = put(tmp_path / "cache") / "small/a.gz"
    path.write_bytes(damage)
    assert list(read_files(places(tmp_path, mirror), FILES)) == [CONTENT, CONTENT]
    assert path.read_bytes() == ARCHIVE


@pytest.mark.parametrize("fault", [OSError("no route"), TimeoutError("timed out"), http.client.IncompleteRead(b"")])
def test_the_error_without_a_network_names_the_remedy(tmp_path: Path, fault: Exception) -> None:
    def fetch(url: str, max_bytes: int) -> bytes:
        raise fault

    expected = (
        "small: no valid a.gz on this machine, and http://mirror/small/a.gz cannot be fetched "
        f"({type(fault).__name__}: {fault}); {ADVICE}"
    )
    with raises(InvalidInput, expected):
        list(read_files(places(tmp_path, fetch), FILES))


def test_a_mirror_with_other_content_leaves_no_file(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    with raises(InvalidInput, f"http://mirror/small/a.gz: got SHA-256 {other} unpacked, expected {SHA256}"):
        list(read_files(places(tmp_path, lambda url, max_bytes: gzip.compress(b"other", mtime=0)), FILES))
    with pytest.raises(InvalidInput, match="FN-0864"):
        list(read_files(places(tmp_path, lambda url, max_bytes: b"<html>"), FILES))
    bomb = gzip.compress(bytes(10**6), mtime=0)
    with raises(InvalidInput, f"http://mirror/small/a.gz: unpacks to more than {len(ARCHIVE)} bytes, expected no more"):
        list(read_files(places(tmp_path, lambda url, max_bytes: bomb), FILES))
    assert list((tmp_path / "cache/small").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(StorageFull, match="FN-0863"):
        list(read_files(places(tmp_path, mirror), FILES))


def own_fashion_mnist(folder: Path, *contents: bytes) -> Places:
    write_fashion_mnist(folder, *contents)
    return places(folder, data=folder)


def test_images_and_labels_become_examples(tmp_path: Path) -> None:
    data_set = fashion_mnist(own_fashion_mnist(tmp_path, images(3), labels(9, 0, 4), images(2, 1), labels(1, 1)))
    assert (data_set.train.inputs["x"].shape, data_set.train.inputs["x"].dtype) == ((3, 1, 28, 28), np.float32)
    assert (data_set.train.y.tolist(), data_set.train.y.dtype) == ([9, 0, 4], np.int32)
    assert (data_set.test.inputs["x"].shape, data_set.test.y.tolist()) == ((2, 1, 28, 28), [1, 1])
    assert (data_set.train.inputs["x"] * np.float32(255)).round().astype(np.uint8).tobytes() == images(3)[16:]
    assert data_set.train.inputs["x"].max() <= 1.0


def test_images_without_their_labels_are_refused(tmp_path: Path) -> None:
    locations = own_fashion_mnist(tmp_path, images(3), labels(9, 0), images(2), labels(1, 1))
    with raises(InvalidInput, "fashion-mnist: got 3 images and 2 labels, expected as many of each"):
        fashion_mnist(locations)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "f: got 0 bytes, expected an IDX header of 16"),
        (images(1)[:15], "f: got 15 bytes, expected an IDX header of 16"),
        (bytes(4) + images(1)[4:], "f: got magic 0x00000000, expected 0x00000803"),
        (labels(*range(10), 1, 2), "f: got magic 0x00000801, expected 0x00000803"),
        (images(2)[:-1], "f: got 1567 bytes of values, expected 1568 as its header says"),
        (images(2) + b"x", "f: got 1569 bytes of values, expected 1568 as its header says"),
        (images(0), "f: got no items, expected at least one"),
        (struct.pack(">4I", 0x803, 1, 28, 27) + bytes(756), "f: got images of 28 x 27, expected 28 x 28"),
        (
            struct.pack(">4I", 0x803, (1 << 32) - 1, 28, 28),
            "f: got 0 bytes of values, expected 3367254359280 as its header says",
        ),
    ],
)
def test_an_invalid_image_file_is_refused(data: bytes, expected: str) -> None:
    with raises(InvalidInput, expected):
        parse_images("f", data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (labels(1)[:7], "f: got 7 bytes, expected an IDX header of 8"),
        (images(1), "f: got magic 0x00000803, expected 0x00000801"),
        (labels(1, 2) + b"\1", "f: got 3 bytes of values, expected 2 as its header says"),
        (labels(), "f: got no items, expected at least one"),
        (labels(1, 10), "f: got label 10, expected 0 to 9"),
    ],
)
def test_an_invalid_label_file_is_refused(data: bytes, expected: str) -> None:
    with raises(InvalidInput, expected):
        parse_labels("f", data)


@given(st.binary(max_size=40) | st.integers(0, 60).map(lambda cut: labels(*[1] * 52)[:cut]))
def test_any_bytes_are_labels_or_one_error(data: bytes) -> None:
    try:
        values = parse_labels("f", data)
    except InvalidInput:
        return
    assert labels(*values.tolist()) == data


NAMES = st.sampled_from(("ROMEO", "JULIET", "First Citizen", "All: both"))
LINES = st.lists(st.text("abc, .!", min_size=1, max_size=40), max_size=6)
BLOCKS = st.lists(st.tuples(NAMES, LINES), min_size=1, max_size=8)
CUTTING = Cutting(length=4, min_characters=9, held_fraction=0.25)


def play(blocks: list[tuple[str, list[str]]]) -> str:
    return "\n\n".join("\n".join((f"{name}:", *lines)) for name, lines in blocks) + "\n"


def text_of(corpus: Shakespeare, *rows: np.ndarray) -> str:
    return "".join(corpus.vocabulary[token] for row in rows for token in row.ravel())


@given(BLOCKS)
def test_the_text_of_each_speaker_is_split_in_order_and_once(blocks: list[tuple[str, list[str]]]) -> None:
    texts: dict[str, str] = {}
    for name, lines in blocks:
        texts[name] = texts.get(name, "") + "".join(f"{line}\n" for line in lines)
    long_texts = {name: words for name, words in texts.items() if len(words) >= 9}
    try:
        corpus = split_by_speaker(play(blocks), CUTTING)
    except InvalidInput as exc:
        assert not long_texts
        assert str(exc) == f"text: none of {len(texts)} speakers has 9 characters, expected one"
        return
    assert [speaker.name for speaker in corpus.speakers] == list(long_texts)
    assert list(corpus.vocabulary) == sorted(set(play(blocks)))
    for speaker, words in zip(corpus.speakers, long_texts.values(), strict=True):
        num = (len(words) - 1) // 4
        assert text_of(corpus, speaker.train.inputs["x"], speaker.held_out.inputs["x"]) == words[: num * 4]
        assert text_of(corpus, speaker.train.y, speaker.held_out.y) == words[1 : num * 4 + 1]
        assert len(speaker.held_out) == max(1, round(num * 0.25))
        assert speaker.train.inputs["x"].shape[1:] == speaker.train.y.shape[1:] == (4,)
        assert speaker.train.inputs["x"].dtype == speaker.train.y.dtype == np.int32
    others = "".join(words for name, words in texts.items() if name not in long_texts)
    if len(others) <= 4:
        assert corpus.others is None
    else:
        assert corpus.others is not None
        assert others.startswith(text_of(corpus, corpus.others.inputs["x"]))


@given(st.text("ab:\n", max_size=60))
def test_any_text_is_a_play_or_one_error(text: str) -> None:
    try:
        corpus = split_by_speaker(text, Cutting(length=1, min_characters=3))
    except InvalidInput:
        return
    assert corpus.speakers


def test_a_block_without_a_speaker_is_refused(tmp_path: Path) -> None:
    with raises(InvalidInput, "text: block 1 begins with 'and then', expected a speaker's name and ':'"):
        split_by_speaker("A:\nwords\n\nand then\nmore\n", CUTTING)
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare/input.txt").write_bytes(b"A:\n\xff\n")
    with pytest.raises(InvalidInput, match="FN-0865"):
        shakespeare(CUTTING, places(tmp_path, data=tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"length": 0}, "got length 0 and min_characters 1000, expected at least 1"),
        ({"min_characters": 128}, "got length 64 and min_characters 128"),
        ({"held_fraction": 1.0}, "got held_fraction 1.0, expected between 0 and 1"),
        ({"held_fraction": float("nan")}, "got held_fraction nan"),
    ],
)
def test_an_impossible_cutting_is_a_value_error(changes: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Cutting(**changes)


@pytest.mark.heavy
def test_the_real_fashion_mnist_has_the_known_digests() -> None:
    locations = real_places("fashion-mnist")
    contents = list(read_files(locations, FASHION_MNIST))
    known = [(file.size_bytes, file.sha256) for file in FASHION_MNIST.files]
    assert [(len(content), hashlib.sha256(content).hexdigest()) for content in contents] == known
    data_set = fashion_mnist(locations)
    assert (len(data_set.train), len(data_set.test)) == (60_000, 10_000)
    assert np.bincount(data_set.train.y).tolist() == [6000] * 10
    assert np.bincount(data_set.test.y).tolist() == [1000] * 10


def test_the_real_shakespeare_has_the_known_digest() -> None:
    locations = real_places("tinyshakespeare")
    (content,) = read_files(locations, SHAKESPEARE)
    (known,) = SHAKESPEARE.files
    assert (len(content), hashlib.sha256(content).hexdigest()) == (known.size_bytes, known.sha256)
    corpus = shakespeare(Cutting(), locations)
    assert (len(corpus.vocabulary), len(corpus.speakers)) == (65, 141)
    assert corpus.speakers[0].name == "First Citizen"
    assert text_of(corpus, corpus.speakers[0].train.inputs["x"][:1]).startswith(
        "Before we proceed any further, hear me speak.\n"
    )

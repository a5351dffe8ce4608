"""Public data sets as Examples: Fashion-MNIST, and tinyshakespeare split by speaker.

Fashion-MNIST (MIT licence) has 70,000 grey images of clothes, 28 x 28, in ten classes. Its files have the IDX format,
big-endian:

    offset  size  field
    0       4     0x00000803 for images, 0x00000801 for labels (unsigned bytes, three or one dimensions)
    4       4     number of items
    8       8     images only: rows and columns, 28 and 28
    8 / 16  n     the bytes

tinyshakespeare is 1.1 MB of plays. Empty lines separate blocks; a block is the speaker's name, a colon and the speech.
Its speakers are a natural federation, as uneven as people are.

Reference:
    H. Xiao, K. Rasul and R. Vollgraf 2017, arXiv 1708.07747 (Fashion-MNIST).
    A. Karpathy, char-rnn, 2015 (tinyshakespeare).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.clients.data.examples import Examples, Split
from fanin.clients.data.files import DataFile, DataSet, Places, default_places, read_files
from fanin.clients.data.partitions import dirichlet_partition, hold_out
from fanin.clients.data.stores import MIN_EXAMPLES
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput

IMAGE_MAGIC: Final = 0x00000803
LABEL_MAGIC: Final = 0x00000801
IMAGE_SIDE: Final = 28
NUM_CLASSES: Final = 10
NUM_PUBLIC: Final = 1000
MAX_DEVICES: Final = 1000
"""Each device then has about 60 images."""
FASHION_MNIST_MIRROR: Final = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
SHAKESPEARE_MIRROR: Final = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"


def _idx_file(name: str, size_bytes: int, sha256: str) -> DataFile:
    return DataFile(name=name, url=f"{FASHION_MNIST_MIRROR}/{name}", size_bytes=size_bytes, sha256=sha256)


FASHION_MNIST: Final = DataSet(
    name="fashion-mnist",
    files=(
        _idx_file(
            "train-images-idx3-ubyte.gz",
            47_040_016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        _idx_file(
            "train-labels-idx1-ubyte.gz",
            60_008,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        _idx_file(
            "t10k-images-idx3-ubyte.gz",
            7_840_016,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        _idx_file(
            "t10k-labels-idx1-ubyte.gz",
            10_008,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    package=Path("/usr/share/datasets/fashion-mnist"),  # Debian's dataset-fashion-mnist
)
SHAKESPEARE: Final = DataSet(
    name="tinyshakespeare",
    files=(
        DataFile(
            name="input.txt",
            url=f"{SHAKESPEARE_MIRROR}/input.txt",
            size_bytes=1_115_394,
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FashionMnist:
    """Images ``x`` (n, 1, 28, 28) float32 from 0 to 1, labels ``y`` (n,) int32 from 0 to 9."""

    train: Examples
    test: Examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """The rules that cut speech into examples.

    Attributes:
        length: Tokens of a sequence.
        min_characters: Speakers with fewer characters have no partition of their own.
        held_fraction: Share of a speaker's sequences, from the end, that is held out; at least one sequence.
    """

    length: int = 64
    min_characters: int = 1000
    held_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.length < 1 or self.min_characters < MIN_EXAMPLES * self.length + 1:
            raise ValueError(
                f"cutting: got length {self.length} and min_characters {self.min_characters}, expected at least 1 and "
                f"at least {MIN_EXAMPLES} x length + 1: one sequence to train on and one to hold out"
            )
        if not 0.0 < self.held_fraction < 1.0:
            raise ValueError(f"cutting: got held_fraction {self.held_fraction}, expected between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speaker:
    """One speaker's sequences, in order: ``x`` (n, T) are tokens, ``y`` (n, T) the next tokens."""

    name: str
    train: Examples
    held_out: Examples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shakespeare:
    """tinyshakespeare by speaker. A token is the index of a character in ``vocabulary``.

    ``speakers`` are in the order of their first speech. ``others`` has the sequences of all speakers without their own
    partition; None if they fill no sequence.
    """

    vocabulary: str
    speakers: tuple[Speaker, ...]
    others: Examples | None


def fashion_mnist(places: Places | None = None) -> FashionMnist:
    """Load Fashion-MNIST from ``places``; default: those of this process's environment.

    Raises:
        InvalidInput: No place has it, or it is damaged.
    """
    train_x, train_y, test_x, test_y = read_files(places or default_places(), FASHION_MNIST)
    names = [file.name for file in FASHION_MNIST.files]
    return FashionMnist(
        train=_examples(parse_images(names[0], train_x), parse_labels(names[1], train_y)),
        test=_examples(parse_images(names[2], test_x), parse_labels(names[3], test_y)),
    )


def shakespeare(cutting: Cutting, places: Places | None = None) -> Shakespeare:
    """Load tinyshakespeare, split by speaker, from ``places``; default: those of this process's environment.

    Raises:
        InvalidInput: No place has it, or it has another format.
    """
    (data,) = read_files(places or default_places(), SHAKESPEARE)
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"input.txt: not UTF-8 text ({exc})", code="FN-0865") from exc
    return split_by_speaker(text, cutting)


def parse_images(name: str, data: bytes) -> npt.NDArray[np.uint8]:
    """Parse the images (n, 28, 28) of an IDX file; ``name`` is for errors. Raises InvalidInput."""
    count, *sides = _header(name, data, IMAGE_MAGIC, 3)
    if sides != [IMAGE_SIDE, IMAGE_SIDE]:
        raise InvalidInput(
            f"{name}: got images of {sides[0]} x {sides[1]}, expected {IMAGE_SIDE} x {IMAGE_SIDE}", code="FN-0865"
        )
    return _values(name, data, 16, count * IMAGE_SIDE * IMAGE_SIDE).reshape(count, IMAGE_SIDE, IMAGE_SIDE)


def parse_labels(name: str, data: bytes) -> npt.NDArray[np.uint8]:
    """Parse the labels (n,) of an IDX file; ``name`` is for errors. Raises InvalidInput."""
    (count,) = _header(name, data, LABEL_MAGIC, 1)
    labels = _values(name, data, 8, count)
    if labels.max() >= NUM_CLASSES:
        raise InvalidInput(f"{name}: got label {labels.max()}, expected 0 to {NUM_CLASSES - 1}", code="FN-0865")
    return labels


def split_by_speaker(text: str, cutting: Cutting) -> Shakespeare:
    """Split a text of plays by speaker. The vocabulary has its characters in code point order. Raises InvalidInput."""
    speeches: dict[str, str] = {}
    for speaker, words in _speeches(text):
        speeches[speaker] = speeches.get(speaker, "") + words
    vocabulary = "".join(sorted(set(text)))
    tokens = {character: token for token, character in enumerate(vocabulary)}
    speakers, rest = [], ""
    for name, words in speeches.items():
        if len(words) < cutting.min_characters:
            rest += words
            continue
        sequences = _sequences(words, tokens, cutting.length)
        num_held = min(max(1, round(len(sequences) * cutting.held_fraction)), len(sequences) - 1)
        places = np.arange(len(sequences))
        train, held_out = sequences.take(places[:-num_held]), sequences.take(places[-num_held:])
        speakers.append(Speaker(name=name, train=train, held_out=held_out))
    if not speakers:
        raise InvalidInput(
            f"text: none of {len(speeches)} speakers has {cutting.min_characters} characters, expected one",
            code="FN-0865",
        )
    others = _sequences(rest, tokens, cutting.length) if len(rest) > cutting.length else None
    return Shakespeare(vocabulary=vocabulary, speakers=tuple(speakers), others=others)


def _header(name: str, data: bytes, magic: int, num_dims: int) -> tuple[int, ...]:
    size = 4 * (1 + num_dims)
    if len(data) < size:
        raise InvalidInput(f"{name}: got {len(data)} bytes, expected an IDX header of {size}", code="FN-0865")
    value, *dims = struct.unpack_from(f">{1 + num_dims}I", data)
    if value != magic:
        raise InvalidInput(f"{name}: got magic 0x{value:08x}, expected 0x{magic:08x}", code="FN-0865")
    if dims[0] < 1:
        raise InvalidInput(f"{name}: got no items, expected at least one", code="FN-0865")
    return tuple(dims)


def _values(name: str, data: bytes, start: int, size: int) -> npt.NDArray[np.uint8]:
    if len(data) - start != size:
        raise InvalidInput(
            f"{name}: got {len(data) - start} bytes of values, expected {size} as its header says", code="FN-0865"
        )
    return np.frombuffer(data, np.uint8, offset=start)


def _examples(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Examples:
    if len(images) != len(labels):
        raise InvalidInput(
            f"fashion-mnist: got {len(images)} images and {len(labels)} labels, expected as many of each",
            code="FN-0865",
        )
    return Examples(inputs={X: images[:, None].astype(np.float32) / np.float32(255)}, y=labels.astype(np.int32))


def _speeches(text: str) -> Iterator[tuple[str, str]]:
    """Yield (speaker, speech) of each block. Each line of a speech ends with a line feed; a speech may be empty."""
    for number, block in enumerate(part.strip("\n") for part in text.split("\n\n")):
        if not block:
            continue
        speaker, _, words = block.partition("\n")
        if not speaker.endswith(":") or len(speaker) == 1:
            raise InvalidInput(
                f"text: block {number} begins with {speaker[:40]!r}, expected a speaker's name and ':'", code="FN-0865"
            )
        yield speaker[:-1], f"{words}\n" if words else ""


def _sequences(words: str, tokens: dict[str, int], length: int) -> Examples:
    """Cut speech into consecutive sequences; an incomplete one at the end is dropped."""
    flat = np.array([tokens[character] for character in words], np.int32)
    num = (len(flat) - 1) // length
    return Examples(
        inputs={X: flat[: num * length].reshape(num, length)},
        y=flat[1 : num * length + 1].reshape(num, length),
    )


def split_fashion_mnist(num_devices: int, alpha: float, seed: int) -> Split:
    """Split Fashion-MNIST: 1,000 public images, the 10,000 test images, the others by ``dirichlet_partition``.

    Public images depend only on the seed.

    Raises:
        InvalidInput: A number is out of range, or the data is missing.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InvalidInput(f"fashion-mnist: got {num_devices} devices, expected 1 to {MAX_DEVICES}", code="FN-0868")
    if not 0.0 < alpha < np.inf:
        raise InvalidInput(
            f"fashion-mnist: got alpha {alpha}, expected a positive number (0.1 is uneven, 100 even)", code="FN-0868"
        )
    if seed < 0:
        raise InvalidInput(f"fashion-mnist: got seed {seed}, expected 0 or more", code="FN-0868")
    data = fashion_mnist()
    rng = np.random.default_rng(seed)
    rest, public = hold_out(data.train, NUM_PUBLIC, rng)
    parts = dirichlet_partition(rest.y, num_devices, alpha, rng)
    return Split(public=public, test=data.test, devices=tuple(rest.take(part) for part in parts))

"""Loading of a job's data: from the files that its config names to samples for training and for evaluation.

All errors in the data are raised here, on every rank. A file of tokens is mapped, and a rank reads only the windows of
its batches. The first rank alone reads all tokens once, to check their range.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fanin.clients.data.batching import at_longest
from fanin.clients.data.examples import Examples, check_examples
from fanin.clients.data.files import default_places, read_files
from fanin.clients.data.npz import UNREADABLE, read_npz
from fanin.clients.data.partitions import hold_out
from fanin.clients.data.public import SHAKESPEARE as SHAKESPEARE_FILES
from fanin.datacenter.config.settings import SHAKESPEARE, DataSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.masked import MaskedSamples
from fanin.datacenter.data.samples import DataSplit, ExampleSamples, Tokens, WindowSamples
from fanin.datacenter.families.family import TokenModel
from fanin.datacenter.ranks.first import on_first_rank
from fanin.edge.runtimes.graphs import X
from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter. A rank without an App does not need them.
    from fanin.edge.export.app.app import App

CHUNK: Final = 2**24
"""Tokens of a mapped file whose range is computed at a time."""


def load_data(config: TrainConfig, app: "App | None", model: TokenModel) -> DataSplit:
    """Load the data of a job.

    Args:
        config: The job's config.
        app: The App, if the model is one.
        model: The tokens that the model reads and predicts.

    Raises:
        InvalidInput: The data cannot be read, or does not fit the model.
    """
    data, per_token = config.data, app is None and config.model.mean_over != "samples"
    if not data.windows:
        train_examples, held_out_examples = _load_examples(data, config, app, model)
        dtype = torch.float64 if config.parallel.precision == "double" else torch.float32
        return DataSplit(
            train=ExampleSamples(train_examples, per_token=per_token, dtype=dtype),
            held_out=ExampleSamples(held_out_examples, per_token=per_token, dtype=dtype),
        )
    if data.tokens is not None:
        flat, where = read_tokens(data.tokens), str(data.tokens)
        num_tokens = _count_tokens(flat, where, 0 if model.masked else model.vocabulary)
        halves = split_tokens(flat, data.held_fraction)
    else:
        text, where = read_characters(data.text), data.text
        num_tokens, halves = len(set(text)), split_text(text, data.held_fraction)
    mask = num_tokens if data.mask_token is None else data.mask_token
    _check_vocabulary(
        max(num_tokens, mask + 1) if model.masked else num_tokens,
        model.vocabulary,
        f"{where} and a mask" if model.masked else where,
    )
    train, held_out = (
        MaskedSamples(
            tokens=tokens,
            length=data.length,
            num_tokens=num_tokens,
            mask=mask,
            seed=config.seed,
            stream=stream,
            per_token=per_token,
        )
        if model.masked
        else WindowSamples(tokens, data.length, per_token=per_token)
        for stream, tokens in enumerate(halves)
    )
    return DataSplit(train=train, held_out=held_out)


def read_characters(text: str) -> str:
    """Return the characters of the text that a config names. Raises InvalidInput."""
    where = "input.txt" if text == SHAKESPEARE else text
    try:
        if text == SHAKESPEARE:
            (data,) = read_files(default_places(), SHAKESPEARE_FILES)
        else:
            data = Path(text).read_bytes()
        return data.decode()
    except OSError as exc:
        raise InvalidInput(
            f"{text}: cannot be read ({exc.strerror}); expected a text file, or {SHAKESPEARE} by its name",
            code="FN-1230",
        ) from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{where}: not UTF-8 text ({exc})", code="FN-1230") from exc


def split_text(text: str, held_fraction: float) -> tuple[Tokens, Tokens]:
    """Return (tokens to train on, held-out tokens from the end).

    A token is the index of a character among all distinct characters, in code point order.
    """
    tokens = {character: token for token, character in enumerate(sorted(set(text)))}
    return split_tokens(np.fromiter((tokens[character] for character in text), np.int32, len(text)), held_fraction)


def split_tokens(flat: Tokens, held_fraction: float) -> tuple[Tokens, Tokens]:
    """Return (tokens to train on, held-out tokens from the end)."""
    bound = len(flat) - round(len(flat) * held_fraction)
    return flat[:bound], flat[bound:]


def read_tokens(path: Path) -> Tokens:
    """Return the token ids in a file: an .npy file memory-mapped, or the one array of an .npz file.

    Raises:
        InvalidInput: The file cannot be read, or is not one row of integers.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else _only_array(path)
        if not isinstance(array, np.ndarray):
            # numpy returns the raw bytes of an archive member that is not an array.
            raise ValueError(f"its one member is {type(array).__name__}")
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror or exc})", code="FN-1231") from exc
    except UNREADABLE as exc:
        raise InvalidInput(f"{path}: not an array of numbers as numpy writes it ({exc})", code="FN-1231") from exc
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidInput(
            f"{path}: got {array.dtype} {list(array.shape)}, expected one row of integers, token ids", code="FN-1231"
        )
    flat: Tokens = array
    return flat


def _only_array(path: Path) -> Tokens:
    """Read the one array of an archive. Members of an archive cannot be memory-mapped."""
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("no archive")
        if len(archive.files) != 1:
            raise InvalidInput(
                f"{path}: got arrays {', '.join(archive.files) or 'none'}, expected one, of token ids", code="FN-1231"
            )
        array: Tokens = archive[archive.files[0]]
    return array


def _count_tokens(flat: Tokens, where: str, vocabulary: int) -> int:
    """Return one more than the highest token id, or a number that is at most ``vocabulary`` if no id can be too high.

    A collective. Raises InvalidInput.
    """
    if not len(flat):
        raise InvalidInput(f"{where}: got no tokens, expected at least one window; name another file", code="FN-1236")
    limits = np.iinfo(flat.dtype)
    if limits.min == 0 and limits.max < vocabulary:
        return int(limits.max) + 1
    least, most = on_first_rank(lambda alive: _range(flat, alive))
    if least < 0:
        raise InvalidInput(
            f"{where}: got token ids from {least} to {most}, expected 0 or more; correct the ids", code="FN-1233"
        )
    return most + 1


def _range(flat: Tokens, alive: Callable[[], None]) -> tuple[int, int]:
    """Return the lowest and the highest token id. Only one chunk of a mapped file is in memory at a time."""
    lowest, highest = list[int](), list[int]()
    for start in range(0, len(flat), CHUNK):
        stop = min(start + CHUNK, len(flat))
        chunk = flat[start:stop]
        if isinstance(flat, np.memmap):
            # Mapped separately, so that its pages are freed with it.
            chunk = np.memmap(str(flat.filename), flat.dtype, "r", flat.offset + start * flat.itemsize, chunk.shape)
        lowest.append(int(chunk.min()))
        highest.append(int(chunk.max()))
        alive()
    return min(lowest), max(highest)


def _load_examples(
    data: DataSettings, config: TrainConfig, app: "App | None", model: TokenModel
) -> tuple[Examples, Examples]:
    assert data.examples is not None, "a config has one of them"
    examples = read_npz(data.examples)
    if app is not None:
        from fanin.edge.export.app.app import inputs_of
        from fanin.edge.export.app.inputs.named import numpy_inputs, torch_inputs

        examples = Examples(inputs=numpy_inputs(inputs_of(app, torch_inputs(examples.inputs))), y=examples.y)
        try:
            examples = at_longest(examples, app.lengths)
        except ValueError as exc:
            raise InvalidInput(f"{data.examples}: {exc}", code="FN-1185") from exc
        dtype = str(app.target_dtype).removeprefix("torch.")
        check_examples(examples, app.input_shapes, app.num_classes, dtype)
    elif X not in examples.inputs:
        raise InvalidInput(
            f"{data.examples}: got the inputs {sorted(examples.inputs)}, expected {X}; name the array of tokens {X}",
            code="FN-1234",
        )
    elif (
        examples.inputs[X].dtype != np.int32
        or examples.inputs[X].ndim != 2
        or examples.y.shape != examples.inputs[X].shape
    ):
        raise InvalidInput(
            f"{data.examples}: got x {examples.inputs[X].dtype} {examples.inputs[X].shape} and y {examples.y.shape}, "
            "expected int32 tokens and their target tokens (n, T)",
            code="FN-1234",
        )
    elif model.positions is not None and examples.inputs[X].shape[1] > model.positions:
        raise InvalidInput(
            f"{data.examples}: got {examples.inputs[X].shape[1]} tokens a sample, expected at most the model's "
            f"{model.positions} positions",
            code="FN-1235",
        )
    else:
        _check_vocabulary(
            int(max(examples.inputs[X].max(), examples.y.max())) + 1, model.vocabulary, str(data.examples)
        )
    if len(examples) == 1:
        raise InvalidInput(f"{data.examples}: got 1 example, expected at least 2: one is held out", code="FN-1121")
    num_held = min(max(1, round(len(examples) * data.held_fraction)), len(examples) - 1)
    return hold_out(examples, num_held, np.random.default_rng(config.seed))


def _check_vocabulary(num_tokens: int, vocabulary: int, where: str) -> None:
    if num_tokens > vocabulary:
        raise InvalidInput(
            f"{where}: got {num_tokens} tokens, expected at most the model's {vocabulary}; raise its vocabulary",
            code="FN-1233",
        )

"""A model's weights as one safetensors file, out of a job and into it, at any mesh; several are read, too.

The names are those of one process, unsharded; a weight that is tied is there once. Streamed both ways, so that no rank
holds a second model: an export puts one tensor together at a time, and of an import each rank reads its own slices.

    file = header size, 8 bytes little-endian | header, JSON, padded to 8 | tensors' bytes, little-endian, row-major

Larger types come first, so that each tensor is aligned. A file from outside is checked whole, before a value changes.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fanin.datacenter.checkpoints.slices import slices
from fanin.datacenter.parallel.build import ParameterEntry
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.gather import whole_parameters
from fanin.protos.errors import InvalidInput, StorageFull

ALIGNMENT: Final = 8
METADATA: Final = "__metadata__"
DTYPES: Final = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".json"
Kind = tuple[tuple[int, ...], str | None]
"""Shape and type of a tensor."""


def export_weights(engine: Engine, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write all parameters into one file, whole or not at all. A collective; the first rank writes.

    ``metadata`` is text that goes along in the header. Raises InvalidInput, or StorageFull.
    """
    table = _in_order(engine.table)
    header = _header(table, metadata or {})
    whole = whole_parameters(replace(engine.rank_model, table=table))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    failure = _write(path, header, whole) if is_first else None
    for _ in whole:
        # What another rank writes, and the rest of what could not be written, takes all ranks to put together.
        pass
    if _on_any_rank(failure is not None):
        cause = "see the first rank" if failure is None else str(failure)
        raise StorageFull(f"{path}: the weights could not be written ({cause}); nothing is there") from failure


def import_weights(engine: Engine, path: Path, aside: Sequence[str] = (), *, cast: bool = False) -> None:
    """Take over the parameters in a file, or in those that an index (``.json``) beside them tells of. A collective.

    ``aside``: patterns over names that may be there and are not the model's. ``cast``: other floats are taken, too, and
    become what the model has. Raises InvalidInput on all ranks, and changes nothing, if one is damaged or another
    model's.
    """
    refusal = _refusal(engine.table, path, aside, cast=cast)
    if _on_any_rank(refusal is not None):
        raise refusal or InvalidInput(f"{path}: another rank cannot take it; see the first rank that says why")
    tie = engine.rank_model.tie
    with _opened(path) as files, torch.no_grad():
        for part in engine.parts.values():
            for name, value in part.named_parameters():
                source = tie.original_name if tie is not None and value is tie.copied else name
                _take(files[source], source, value)


def _take(file: safe_open, name: str, value: Tensor) -> None:
    """Read this rank's slice of a tensor, and nothing else of it."""
    if not isinstance(value, DTensor):
        value.copy_(file.get_tensor(name))  # type: ignore[no-untyped-call]
        return
    mine = value.to_local()
    if mine.numel():
        whole = file.get_slice(name)  # type: ignore[no-untyped-call]
        mine.copy_(whole[slices(value)])


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, safe_open]]:
    """The file that has each tensor, by name. What they are opened with holds their sizes against their headers."""
    with ExitStack() as stack:
        if path.suffix == INDEX_SUFFIX:
            told = _index(path)
            places = {name: path.with_name(name) for name in sorted(set(told.values()))}
        else:
            told, places = {}, {path.name: path}
        files = {name: stack.enter_context(safe_open(place, framework="pt")) for name, place in places.items()}
        yield {
            name: file
            for place, file in files.items()
            for name in file.offset_keys()
            if not told or told.get(name) == place
        }


def _index(path: Path) -> dict[str, str]:
    """The file's name for each tensor's, all of them beside the index. Raises InvalidInput."""
    try:
        row = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})") from exc
    found = row.get("weight_map") if isinstance(row, dict) else None
    if not isinstance(found, dict) or not found:
        raise InvalidInput(f"{path}: got no weight_map, expected one from names of tensors to names of files")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise InvalidInput(f"{path}: got a tensor in {name!r}, expected the name of a {SUFFIX} file beside it")
    return found


def _refusal(
    table: Mapping[str, ParameterEntry], path: Path, aside: Sequence[str], *, cast: bool
) -> InvalidInput | None:
    """Why a file cannot be taken."""
    try:
        with _opened(path) as files:
            told = {name: _kind(file, name) for name, file in files.items()}
    except (OSError, SafetensorError, ValueError) as exc:
        # ValueError: an index can tell of a file by a name that no file can have.
        return InvalidInput(f"{path}: not a whole safetensors file ({exc})")
    except InvalidInput as exc:
        return exc
    expected = {name: (tuple(entry.shape), DTYPES.get(entry.dtype)) for name, entry in table.items()}
    found = {name: kind for name, kind in told.items() if name in expected or not _fits_any(name, aside)}
    missing, unknown = set(expected) - set(found), set(found) - set(expected)
    wrong = {name for name in set(found) & set(expected) if not _fits(found[name], expected[name], cast=cast)}
    if not (missing or unknown or wrong):
        return None
    name = min([*missing, *unknown, *wrong])
    return InvalidInput(
        f"{path}: got {len(found)} tensors of which {len(unknown)} are not the model's, {len(wrong)} have another "
        f"shape or type and {len(missing)} are missing, such as {name}: got {_told(found.get(name))}, expected "
        f"{_told(expected.get(name))}"
    )


def _kind(file: safe_open, name: str) -> Kind:
    reader = file.get_slice(name)  # type: ignore[no-untyped-call]
    return tuple(reader.get_shape()), reader.get_dtype()


def _fits(found: Kind, expected: Kind, *, cast: bool) -> bool:
    floats = cast and found[1] in DTYPES.values()
    return found[0] == expected[0] and (found[1] == expected[1] or floats)


def _fits_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _told(kind: Kind | None) -> str:
    return "none" if kind is None else f"{kind[1]} {list(kind[0])}"


def _on_any_rank(mine: bool) -> bool:
    if not dist.is_initialized():
        return mine
    told = torch.tensor(int(mine))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def _in_order(table: Mapping[str, ParameterEntry]) -> dict[str, ParameterEntry]:
    """The table, larger types first."""
    return dict(sorted(table.items(), key=lambda item: -item[1].dtype.itemsize))


def _header(table: Mapping[str, ParameterEntry], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, entry in table.items():
        if entry.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise InvalidInput(f"weights: {name}: got {entry.dtype}, expected one of {known}")
        start, end = end, end + entry.shape.numel() * entry.dtype.itemsize
        rows[name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, header: bytes, whole: Iterator[tuple[str, Tensor]]) -> OSError | None:
    """Write the file; what kept it from being written."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with draft.open("wb") as file:
            file.write(header)
            for _, value in whole:
                file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        return exc
    return None

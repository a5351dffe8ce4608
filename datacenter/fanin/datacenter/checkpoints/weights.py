"""Export and import of a model's weights as safetensors, on any mesh.

An export writes one file; an import also reads several files with an index. The names are those of one process. A
shared parameter is written once, and is read under any of its names, or under several if the values are equal. Both
directions stream, so no rank holds a second copy of the model. An export assembles one tensor at a time. In an import
each rank reads only its own slices. A file is opened again for each tensor, because the pages of an open file that were
read count as memory of the rank.

    file = header size, 8 bytes little-endian | header, JSON, padded to 8 | tensors' bytes, little-endian, row-major

Tensors with larger dtypes come first, so that each tensor is aligned. An import validates the complete file before it
changes a value.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fanin.datacenter.parallel.build import ParameterEntry
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.gather import full_parameters
from fanin.datacenter.parallel.transforms.slices import slices
from fanin.datacenter.parallel.transforms.ties import other_names
from fanin.edge.files import sync_folder
from fanin.edge.tensors import count_differences
from fanin.protos.errors import InvalidInput, StorageFull
from fanin.protos.texts import counted

ALIGNMENT: Final = 8
METADATA: Final = "__metadata__"
DTYPES: Final = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".json"
Kind = tuple[tuple[int, ...], str | None]
"""Shape and dtype of a tensor."""
Source = tuple[Path, str]
"""The file of a tensor, and its name there."""


def export_weights(engine: Engine, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write all parameters into one file, atomically. A collective; the first rank writes.

    Args:
        engine: The engine with the parameters.
        path: The file to write.
        metadata: Text entries for the file's header.

    Raises:
        InvalidInput: A parameter has a dtype that the format cannot store.
        StorageFull: The file could not be written. Raised on all ranks.
    """
    table = in_order(engine.table)
    header = file_header(table, metadata or {})
    parameters = full_parameters(replace(engine.rank_model, table=table))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    failure = _write(path, header, parameters) if is_first else None
    for _ in parameters:
        # Assembling a tensor is a collective. Ranks that do not write, or whose write failed, must still call it.
        pass
    if _on_any_rank(failure is not None):
        cause = "see the first rank" if failure is None else str(failure)
        raise StorageFull(
            f"{path}: the weights could not be written ({cause}); no file was written", code="FN-1332"
        ) from failure


def import_weights(engine: Engine, path: Path, aside: Sequence[str] = (), *, cast: bool = False) -> None:
    """Load the parameters from a safetensors file, or from the files that an index (``.json``) lists. A collective.

    Args:
        engine: The engine whose parameters are overwritten.
        path: The file, or the index next to its files.
        aside: Patterns for names of additional tensors, which are ignored.
        cast: Whether to accept other floating-point dtypes and convert them.

    Raises:
        InvalidInput: A file is damaged or belongs to another model: nothing has changed. Or it has values that are not
            finite: parameters have changed. Raised on all ranks.
    """
    sources, refusal = dict[str, Source](), None
    try:
        sources = _sources(engine.table, path, aside, cast=cast)
    except InvalidInput as exc:
        refusal = exc
    if _on_any_rank(refusal is not None):
        raise refusal or InvalidInput(f"{path}: another rank rejected the file; its log has the reason", code="FN-1318")
    tie = engine.rank_model.tie
    with torch.no_grad():
        for part in engine.parts.values():
            for name, value in part.named_parameters():
                source = sources[tie.original_name if tie is not None and value is tie.copied else name]
                refusal = _load_slice(source, value) or refusal
    if _on_any_rank(refusal is not None):
        raise refusal or InvalidInput(
            f"{path}: another rank found values that are not finite; its log has the tensor", code="FN-1318"
        )


def load_weights(module: nn.Module, path: Path) -> None:
    """Load all parameters of a module in one process from a file, and convert other floating-point dtypes.

    Raises:
        InvalidInput: The file is damaged or belongs to another model: nothing has changed. Or it has values that are
            not finite: parameters have changed.
    """
    others = other_names(module)
    table = {
        name: ParameterEntry(stage=0, shape=value.shape, dtype=value.dtype, others=others.get(name, ()))
        for name, value in module.named_parameters()
    }
    sources = _sources(table, path, (), cast=True)
    with torch.no_grad():
        for name, value in module.named_parameters():
            refusal = _load_slice(sources[name], value)
            if refusal is not None:
                raise refusal


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of the files that an index lists, by name.

    Raises:
        InvalidInput: A file is missing or damaged, or a tensor has no floating-point values.
    """
    tensors, kinds = dict[str, Tensor](), _read_kinds(path)
    index = _index(path) if path.suffix == INDEX_SUFFIX else {}
    for name, kind in kinds.items():
        if kind[1] not in DTYPES.values():
            raise InvalidInput(
                f"{path}: got {name} of {kind[1]}, expected floating-point tensors; name another file", code="FN-1319"
            )
        with safe_open(path.with_name(index.get(name, path.name)), framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def _load_slice(source: Source, value: Tensor) -> InvalidInput | None:
    """Read only this rank's slice of a tensor. Return an error if it has values that are not finite."""
    path, name = source
    mine = value.to_local() if isinstance(value, DTensor) else value
    if not mine.numel():
        return None
    with safe_open(path, framework="pt") as file:
        mine.copy_(file.get_slice(name)[slices(value)] if isinstance(value, DTensor) else file.get_tensor(name))
    # The extremes of a tensor are finite if all its values are. A mask of them would take memory.
    if all(math.isfinite(float(extreme)) for extreme in mine.aminmax()):
        return None
    return InvalidInput(
        f"{path}: got values that are not finite in {name}, expected finite ones; take another file", code="FN-1312"
    )


def _read_kinds(path: Path) -> dict[str, Kind]:
    """Return the shape and dtype of each tensor. Raises InvalidInput if a file is missing or damaged."""
    try:
        if not path.exists():
            raise InvalidInput(f"{path}: no such file, expected a {SUFFIX} file", code="FN-1313")
        return _kinds(path)
    except (OSError, SafetensorError, ValueError) as exc:
        # ValueError: an index can contain a file name that is not valid.
        raise InvalidInput(
            f"{path}: not a complete safetensors file ({exc}); name another file", code="FN-1313"
        ) from exc


def _kinds(path: Path) -> dict[str, Kind]:
    """Return the shape and dtype of each tensor. safetensors checks the sizes of the files against their headers."""
    index = _index(path) if path.suffix == INDEX_SUFFIX else {}
    kinds = dict[str, Kind]()
    for file_name in sorted(set(index.values())) or [path.name]:
        with safe_open(path.with_name(file_name), framework="pt") as file:
            names = [name for name in file.offset_keys() if not index or index.get(name) == file_name]
            kinds |= {name: _kind(file, name) for name in names}
    return kinds


def file_metadata(path: Path) -> dict[str, str]:
    """Return the text entries of a file's header. Raises InvalidInput if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as exc:
        raise InvalidInput(
            f"{path}: not a complete safetensors file ({exc}); name another file", code="FN-1313"
        ) from exc


def _index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor. All files must be in the index's folder. Raises InvalidInput."""
    try:
        row = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not JSON ({exc})", code="FN-1314") from exc
    weight_map = row.get("weight_map") if isinstance(row, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput(
            f"{path}: got no weight_map, expected one from names of tensors to names of files", code="FN-1314"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise InvalidInput(
                f"{path}: got a tensor in {name!r}, expected the name of a {SUFFIX} file in its folder", code="FN-1314"
            )
    return weight_map


def _sources(table: Mapping[str, ParameterEntry], path: Path, aside: Sequence[str], *, cast: bool) -> dict[str, Source]:
    """Return where each parameter of a model is stored. Raises InvalidInput if the file cannot be imported."""
    stored = _read_kinds(path)
    index = _index(path) if path.suffix == INDEX_SUFFIX else {}
    stored = {name: kind for name, kind in stored.items() if name in table or not _matches_any(name, aside)}
    places = {name: (path.with_name(index.get(name, path.name)), name) for name in stored}
    # A shared parameter may be stored under each of its names.
    names = {name: [each for each in (name, *entry.others) if each in stored] for name, entry in table.items()}
    known = {each for group in names.values() for each in group}
    expected = {name: (tuple(entry.shape), DTYPES.get(entry.dtype)) for name, entry in table.items()}
    kinds = {name: stored[group[0]] for name, group in names.items() if group}
    unknown = stored.keys() - known
    missing = set(expected) - set(kinds)
    wrong = {name for name, kind in kinds.items() if not _fits(kind, expected[name], cast=cast)}
    if missing or unknown or wrong:
        name = min([*missing, *unknown, *wrong])
        differences = count_differences(unknown, wrong, missing, of="another shape or type")
        raise InvalidInput(
            f"{path}: got {counted(len(kinds) + len(unknown), 'tensor')}: {differences}, such as {name}: got "
            f"{_describe(kinds.get(name, stored.get(name)))}, expected {_describe(expected.get(name))}; name a file of "
            "this model in its precision, rename the tensors, or correct the model",
            code="FN-1315",
        )
    for first, *others in names.values():
        for other in others:
            _check_equal(places[first], places[other])
    return {name: places[group[0]] for name, group in names.items()}


def _check_equal(first: Source, other: Source) -> None:
    """Raise InvalidInput unless two stored copies of one shared parameter are equal."""
    (path, name), (other_path, other_name) = first, other
    with safe_open(path, framework="pt") as file, safe_open(other_path, framework="pt") as beside:
        is_equal = torch.equal(file.get_tensor(name), beside.get_tensor(other_name))
    if not is_equal:
        raise InvalidInput(
            f"{other_path}: got two different tensors {name} and {other_name}, expected equal ones or one of them: "
            "they are one parameter of the model",
            code="FN-1315",
        )


def _kind(file: safe_open, name: str) -> Kind:
    reader = file.get_slice(name)  # type: ignore[no-untyped-call]
    return tuple(reader.get_shape()), reader.get_dtype()


def _fits(stored: Kind, expected: Kind, *, cast: bool) -> bool:
    floats = cast and stored[1] in DTYPES.values()
    return stored[0] == expected[0] and (stored[1] == expected[1] or floats)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _describe(kind: Kind | None) -> str:
    return "none" if kind is None else f"{kind[1]} {list(kind[0])}"


def _on_any_rank(flag: bool) -> bool:
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def in_order(table: Mapping[str, ParameterEntry]) -> dict[str, ParameterEntry]:
    """Return the table with larger dtypes first."""
    return dict(sorted(table.items(), key=lambda item: -item[1].dtype.itemsize))


def file_header(table: Mapping[str, ParameterEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file whose tensors follow in the order of the table. Raises InvalidInput for a dtype."""
    rows: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, entry in table.items():
        if entry.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise InvalidInput(f"weights: {name}: got {entry.dtype}, expected one of {known}", code="FN-1319")
        start, end = end, end + entry.shape.numel() * entry.dtype.itemsize
        rows[name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, header: bytes, parameters: Iterator[tuple[str, Tensor]]) -> OSError | None:
    """Write the file; return the error if that fails."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with draft.open("wb") as file:
            file.write(header)
            for _, value in parameters:
                file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        return exc
    return None

"""The seed file: the initial parameters of a job, written once by its first rank and read in slices by all.

It is a safetensors file with the layout of ``weights``. Its header has the digest of everything that determines the
values: model, seed and torch's release. The file is written under another name, synced and renamed, so an existing file
is complete.

The writer never has all parameters in memory. It reserves the file on the disk, maps it, and builds the model a second
time, with each parameter's storage in the mapped file. The model's own code then initializes it, in the same order and
with the same random numbers as in one process. So every value is bit-identical. Written pages belong to the file, and
are released to the operating system during the write.

A model whose parameters have their values already, such as one that a user's function has built, is copied one tensor
at a time.
"""

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.datacenter.checkpoints.weights import file_header, file_metadata, in_order
from fanin.datacenter.files.jobfiles import machine_name
from fanin.datacenter.parallel.build import ParameterEntry
from fanin.datacenter.parallel.transforms.meta import like, parameters_on_meta
from fanin.datacenter.training.model import Start
from fanin.protos.errors import InvalidInput, StorageFull

DIGEST: Final = "fanin_seed_sha256"
"""Key of the digest in the file's header."""
RELEASED_BYTES: Final = 64 * 2**20
"""Bytes of results of operators after which written pages are handed back."""
ALIVE_S: Final = 5.0
"""Seconds between two calls of ``alive``."""


def is_seed_file(path: Path, digest: str) -> bool:
    """Return whether a seed file exists.

    Args:
        path: The file.
        digest: Digest of the inputs that determine the values.

    Raises:
        InvalidInput: The file is damaged, or has the values of another model or seed.
    """
    if not path.exists():
        return False
    stored = file_metadata(path).get(DIGEST)
    if stored != digest:
        raise InvalidInput(
            f"{path}: got initial parameters of another model, seed or release of torch (digest {stored}), expected "
            f"{digest}; remove the file, or use another folder for this job",
            code="FN-1322",
        )
    return True


def write_seed_file(path: Path, start: Start, digest: str, alive: Callable[[], None] = lambda: None) -> None:
    """Write the parameters of a model into a seed file, atomically.

    Args:
        path: The file to write.
        start: The parameters.
        digest: Digest of the inputs that determine the values.
        alive: A function to call at least every few seconds, between two operators.

    Raises:
        InvalidInput: A parameter has a dtype that the format cannot store.
        StorageFull: The file could not be written.
    """
    outline, places = _outline(start)
    table = in_order(
        {
            name: ParameterEntry(stage=0, shape=value.shape, dtype=value.dtype)
            for name, value in outline.named_parameters()
        }
    )
    header = file_header(table, {"format": "pt", DIGEST: digest})
    draft = path.with_name(f"{path.name}.{machine_name()}.new")
    for left_over in path.parent.glob(f"{path.name}.*.new"):
        # Only the first rank writes, so this is a draft of a rank that was killed.
        left_over.unlink(missing_ok=True)
    try:
        with draft.open("w+b") as file:
            values = _mapped(file, header, table)
            with _Paging(values, alive):
                module = _build_into(values, places, start.build) if start.repeatable else outline
                for name, value in module.named_parameters():
                    if not values.holds(name, value):
                        values.tensors[name].copy_(value.detach())
            values.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as exc:
        raise StorageFull(
            f"{path}: the initial parameters could not be written ({exc.strerror or exc}); free space there",
            code="FN-1332",
        ) from exc
    finally:
        draft.unlink(missing_ok=True)


def _outline(start: Start) -> tuple[nn.Module, list[str | None]]:
    """Return the model, on the meta device if it can be built again, and its places as in ``_build_into``."""
    if not start.repeatable:
        return start.build(), []
    with parameters_on_meta() as registrations:
        outline = start.build()
    names = {id(value): name for name, value in outline.named_parameters()}
    return outline, [names.get(id(value)) for _, value in registrations]


class _MappedValues:
    """Tensors in a mapped file, by name.

    Args:
        mapped: The complete file.
        tensors: The tensors, which use the memory of ``mapped``.
    """

    def __init__(self, mapped: mmap.mmap, tensors: Mapping[str, Tensor]) -> None:
        self.mapped = mapped
        self.tensors = tensors

    def holds(self, name: str, value: Tensor) -> bool:
        """Return whether the storage of a tensor is its place in the file."""
        return value.data_ptr() == self.tensors[name].data_ptr() and value.dtype == self.tensors[name].dtype

    def release(self) -> None:
        """Hand written pages back to the operating system. They stay in the file."""
        self.mapped.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Write all changes to the disk."""
        self.mapped.flush()


def _mapped(file: IO[bytes], header: bytes, table: Mapping[str, ParameterEntry]) -> _MappedValues:
    """Reserve the file on the disk, write its header and map it. Raises OSError if there is no room."""
    size = len(header) + sum(entry.shape.numel() * entry.dtype.itemsize for entry in table.values())
    if hasattr(os, "posix_fallocate"):
        # A write into a mapped file that finds the disk full would kill the process.
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)
    file.write(header)
    file.flush()
    mapped, end = mmap.mmap(file.fileno(), size), len(header)
    tensors = {}
    for name, entry in table.items():
        start, end = end, end + entry.shape.numel() * entry.dtype.itemsize
        # frombuffer does not accept a count of 0.
        flat = (
            torch.frombuffer(mapped, dtype=entry.dtype, offset=start, count=entry.shape.numel())
            if end > start
            else torch.empty(0, dtype=entry.dtype)
        )
        tensors[name] = flat.view(entry.shape)
    return _MappedValues(mapped, tensors)


def _build_into(target: _MappedValues, places: Sequence[str | None], build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose parameters are stored in a mapped file.

    Args:
        target: The tensors of the file.
        places: Name of the parameter of each registration, in order; None for a parameter that is replaced before the
            model is complete, such as one end of a tie.
        build: Builds the model.
    """
    remaining = iter(places)

    def stored(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        place = None if value is None or is_lazy(value) else next(remaining, None)
        if value is None or place is None or target.holds(place, value):
            return None
        data = target.tensors[place]
        if (data.shape, data.dtype) != (value.shape, value.dtype):
            # The model converts it later. In another dtype its initialization would draw other numbers.
            return None
        data.copy_(value.detach())
        return like(value, data)

    handle = register_module_parameter_registration_hook(stored)  # type: ignore[arg-type]  # its annotation
    try:
        return build()
    finally:
        handle.remove()


class _Paging(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Hands pages of a mapped file back after every few operators.

    Args:
        target: The mapped file.
        alive: A function to call every few seconds.
    """

    def __init__(self, target: _MappedValues, alive: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._target = target
        self._alive = alive
        self._num_bytes = 0
        self._called_s = time.monotonic()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operator."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._num_bytes += result.nbytes
        if self._num_bytes >= RELEASED_BYTES:
            self._num_bytes = 0
            self._target.release()
        if time.monotonic() - self._called_s >= ALIVE_S:
            self._called_s = time.monotonic()
            self._alive()
        return result

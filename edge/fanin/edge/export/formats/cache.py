"""Converted graphs that are kept on disk, so that an export of the same graphs need not convert them again.

The key of traced graphs covers the operators with their arguments, shapes, dtypes and modules, the constants and the
names of the ports. It also covers the versions of the converting libraries and the source of this package. Equal keys
mean equal files from a converter.

The folder has a file for each key, whose first line is the SHA-256 of the following bytes. A file that is damaged, or
cannot be read or written, counts as missing. The folder is private to the user (0700), and every export compares its
graphs with eager torch. So a foreign file cannot change a signed result undetected.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.module.origins import origin_of
from fanin.edge.tensors import sha256_hex

PACKAGE: Final = Path(__file__).parents[1]
"""The export, whose modules rewrite graphs before and after their conversion."""
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "onnx": ("torch", "onnx", "onnx-ir", "onnxscript"),
    "tflite": ("torch", "litert-torch", "ai-edge-litert", "jax"),
}
"""The distributions that a conversion to each format depends on."""


def digest_of(graph_format: str, signatures: Mapping[str, Traced]) -> str | None:
    """Return the key (hexadecimal SHA-256) of the file of some Signatures.

    Args:
        graph_format: ``"onnx"`` or ``"tflite"``.
        signatures: Traced graphs by Signature name, before their conversion, which may change them.

    Returns:
        The key. None if a graph has a part that cannot be distinguished from others.
    """
    state = hashlib.sha256()
    lines = [graph_format, _source(), *(f"{name} {version(name)}" for name in LIBRARIES[graph_format])]
    for name, traced in signatures.items():
        lines += [name, repr(list(traced.inputs)), repr(list(traced.outputs)), *map(_described, traced.examples)]
        lines += [str(traced.program.graph_signature), str(traced.program.range_constraints)]
        graph, constants = _graph_lines(traced.program.graph_module), _tensors(traced)
        if graph is None:
            return None
        lines += graph
        for key, value in constants:
            lines.append(f"{key} {_described(value)}")
            state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    state.update("\n".join(lines).encode())
    return state.hexdigest()


@cache
def _source() -> str:
    """Return the digest of this package's own modules, which rewrite graphs before and after their conversion."""
    state = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        state.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return state.hexdigest()


def _tensors(traced: Traced) -> list[tuple[str, Tensor]]:
    module = traced.program.graph_module
    rows: dict[str, object] = {**traced.program.state_dict, **traced.program.constants}
    rows |= {str(node.target): _attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    return [(name, value) for name, value in sorted(rows.items()) if isinstance(value, Tensor)]


def _graph_lines(module: GraphModule) -> list[str] | None:
    """Return a line for each node, with those of the graphs that it calls; None for an attribute of another kind."""
    lines = []
    for node in module.graph.nodes:
        lines.append(
            f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {origin_of(node)} "
            f"{[_described(value) for value in tree_leaves(node.meta.get('val'))]}"
        )
        if node.op == "get_attr" and not isinstance(value := _attribute(module, str(node.target)), Tensor):
            inner = _graph_lines(value) if isinstance(value, GraphModule) else None
            if inner is None:
                return None
            lines += inner
    return lines


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def _attribute(module: GraphModule, path: str) -> object:
    value: object = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


LOG = logging.getLogger("fanin.edge.export")
VARIABLE: Final = "FANIN_GRAPH_CACHE"
"""Names the folder; ``off`` means no cache."""
MAX_BYTES: Final = 512 * 1024 * 1024
"""Bytes of all files. The files that were not used for the longest time are removed first."""
DIGEST_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of files by key.

    Attributes:
        path: The folder; created on first use. None means no cache.
        max_bytes: Bytes of all files.
    """

    path: Path | None
    max_bytes: int = MAX_BYTES

    def read(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if there are none."""
        if self.path is None:
            return None
        file = self.path / key
        try:
            digest, data = (content := file.read_bytes())[:DIGEST_CHARS], content[DIGEST_CHARS + 1 :]
            if digest.decode("ascii", "replace") != sha256_hex(data):
                LOG.info("%s: damaged, and converted again", file)
                return None
            os.utime(file)
        except OSError:
            return None
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep the bytes of a key. Bytes that are more than an eighth of the cache are not kept."""
        if self.path is None or len(data) > self.max_bytes // 8:
            return
        draft: Path | None = None
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, suffix=".new", delete=False) as file:
                draft = Path(file.name)
                file.write(sha256_hex(data).encode() + b"\n" + data)
            draft.replace(self.path / key)
            self._remove_oldest(self.path)
        except OSError as exc:
            LOG.info("%s: a converted graph is not kept (%s)", self.path, exc)
            if draft is not None:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)

    def _remove_oldest(self, folder: Path) -> None:
        rows = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file())
        total = sum(size for _, size, _ in rows)
        for _, size, file in rows:
            if total <= self.max_bytes:
                return
            # Another export may remove it, too.
            file.unlink(missing_ok=True)
            total -= size


def folder_from(environ: Mapping[str, str]) -> CacheFolder:
    """Return the folder that an environment names; default: ``fanin/graphs`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    named, home = environ.get(VARIABLE, ""), environ.get("XDG_CACHE_HOME", "")
    if named == "off":
        return CacheFolder(None)
    if named:
        return CacheFolder(Path(named))
    try:
        return CacheFolder((Path(home) if home else Path.home() / ".cache") / "fanin" / "graphs")
    except RuntimeError:  # a user without a home
        return CacheFolder(None)


def converted(graph_format: str, signatures: Mapping[str, Traced], convert: Callable[[], bytes]) -> bytes:
    """Return the file of some Signatures, from the cache or from the converter.

    Args:
        graph_format: ``"onnx"`` or ``"tflite"``.
        signatures: Traced graphs by Signature name.
        convert: The conversion. Its errors are raised, and not kept.
    """
    folder = folder_from(os.environ)
    key = digest_of(graph_format, signatures) if folder.path is not None else None
    if key is None:
        return convert()
    data = folder.read(key)
    if data is None:
        data = convert()
        folder.write(key, data)
    else:
        LOG.debug("%s: %s is in the cache", graph_format, " and ".join(signatures))
    return data

"""The tensors of a module's output that the loss uses, by their paths.

A path has the keys of dicts and the positions in tuples, joined by dots: ``logits``, ``1``, ``hidden_states.0``. A
transformers ModelOutput is a dict. With several paths the loss receives a dict of the tensors by their paths, and the
predictions are the first of them.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.refusals import Place, WrongOutput
from fanin.protos.errors import UnsupportedModel

Paths = str | tuple[str, ...]
"""The path of one tensor, or the paths of several."""
Output = Tensor | Tensors
"""The part of a module's output that a loss receives: a tensor (B, ...), or several by their paths. All of them but the
first may be scalars."""


def checked_paths(what: str, value: object) -> Paths:
    """Return the path or the paths of an App. Raises UnsupportedModel unless they are strings that differ."""
    if isinstance(value, str):
        return value
    paths = tuple(value) if isinstance(value, tuple | list) else ()
    if not paths or not all(isinstance(path, str) and path for path in paths) or len({*paths}) < len(paths):
        raise UnsupportedModel(
            f"{what}: got {value!r}, expected a path such as 'logits' or '0', a str, or a tuple of different paths",
            code="FN-0737",
        )
    return paths


def picked(what: str, place: Place, output: object, paths: Paths) -> object:
    """Return the part of an output that a path names, a dict of the parts by path, or for "" the output itself.

    Args:
        what: The App, for the message.
        place: The module that returned the output.
        output: The output.
        paths: The path, or several.

    Raises:
        WrongOutput: The output has no such part. The message lists the paths of its tensors.
    """
    if isinstance(paths, str):
        return _part(what, place, output, paths)
    return {path: _part(what, place, output, path) for path in paths}


def of_rows(output: Output, rows: slice | Tensor) -> Output:
    """Return some samples of an output. A scalar, such as a learned temperature, belongs to all of them."""
    if isinstance(output, Tensor):
        return output[rows]
    return {path: part[rows] if part.dim() else part for path, part in output.items()}


def _part(what: str, place: Place, output: object, path: str) -> object:
    part, rest = output, path
    while rest:
        parts = _parts(part)
        # A key may have dots itself, as that of a parameter.
        keys = [key for key in parts if rest == key or rest.startswith(f"{key}.")]
        if not keys:
            raise WrongOutput(
                f"{what}: {place} returned {type(output).__name__} without a part {path!r}, expected one of "
                f"{[*paths_of(output)]}",
                "set output= to one of them" if _parts(output) else "remove output=",
                place,
                code="FN-0737",
            )
        key = max(keys, key=len)
        part, rest = parts[key], rest[len(key) + 1 :]
    return part


def paths_of(output: object, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all tensors of an output."""
    for key, part in _parts(output).items():
        if isinstance(part, Tensor):
            yield prefix + key
        yield from paths_of(part, f"{prefix}{key}.")


def _parts(output: object) -> Mapping[str, object]:
    if isinstance(output, Mapping):
        return {str(key): part for key, part in output.items()}
    if isinstance(output, tuple | list):
        return {str(index): part for index, part in enumerate(output)}
    return {}

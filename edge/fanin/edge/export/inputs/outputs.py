"""One tensor of a module's output, by its path.

A path has the keys of dicts and the positions in tuples, joined by dots: ``logits``, ``1``, ``hidden_states.0``. A
transformers ModelOutput is a dict.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fanin.edge.export.refusals import Untraceable


def picked(what: str, output: object, path: str) -> object:
    """Return the part of an output that a path names, or the output itself for the path "".

    Raises:
        Untraceable: The output has no such part. The message lists the paths of its tensors.
    """
    part = output
    for key in path.split(".") if path else ():
        parts = _parts(part)
        if key not in parts:
            raise Untraceable(
                f"{what}: the module returned {type(output).__name__} without a part {path!r}, expected one of "
                f"{[*paths_of(output)]}",
                "set output= to one of them" if _parts(output) else "remove output=",
            )
        part = parts[key]
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

"""The state of a strategy between Rounds, as bytes.

The state is the result of ``__getstate__`` if the class defines it, else the attributes of the object. Functions and
loggers are no state: the constructor creates them again. The format has plain values and arrays, so that reading it
runs no code::

    magic b"fanin-s1" | length of the tree, 8 bytes little-endian | tree, JSON | bytes of the arrays, one after another

JSON has no tuples and no arrays, so these are objects with one key, which names the kind.
"""

import json
import logging
import math
import types
from collections.abc import Mapping
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

MAGIC: Final = b"fanin-s1"
CODE: Final = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    logging.Logger,
)
"""Kinds of attributes that are no state."""
RECORDS: Final = {kind.__name__: kind for kind in (ArrayRecord, MetricRecord, ConfigRecord)}
NUMBERS: Final = "biufc"
Place = tuple[int, str, tuple[int, ...]]
"""The first byte of an array, its dtype and its shape."""


class NotSaved(Exception):
    """A state has a value that is neither plain nor an array. The text names it."""


def save(strategy: Strategy) -> bytes:
    """Return the state of a strategy. Raises NotSaved."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(_saved_object(strategy, "", arrays), separators=(",", ":")).encode()
    # Without copies: the moments of FedAdam are three times as large as the model.
    parts = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)
    return b"".join((MAGIC, len(tree).to_bytes(8, "little"), tree, *parts))


def restore(strategy: Strategy, data: bytes) -> None:
    """Set the state of a new strategy. Raises ValueError for a state of another format."""
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("its saved state has another format")
    start = len(MAGIC) + 8
    stop = start + int.from_bytes(data[len(MAGIC) : start], "little")
    _restore_object(strategy, json.loads(data[start:stop]), memoryview(data)[stop:])


def _saved_object(strategy: Strategy, path: str, arrays: list[np.ndarray]) -> object:
    if any("__getstate__" in vars(kind) for kind in type(strategy).__mro__ if kind is not object):
        return {"state": _saved(strategy.__getstate__(), f"{path}__getstate__()", arrays)}
    return {
        "attributes": {
            name: _saved_object(value, f"{path}{name}.", arrays)
            if isinstance(value, Strategy)
            else _saved(value, path + name, arrays)
            for name, value in vars(strategy).items()
            if not isinstance(value, CODE)
        }
    }


def _restore_object(strategy: Strategy, tree: Mapping[str, object], data: memoryview) -> None:
    if "state" in tree:
        state = _restored(tree["state"], data)
        setter = getattr(strategy, "__setstate__", None)
        if setter is None:
            vars(strategy).update(state)
        else:
            setter(state)
        return
    attributes = tree["attributes"]
    assert isinstance(attributes, Mapping), "save writes it so"
    for name, value in attributes.items():
        if isinstance(value, Mapping) and value.keys() & {"state", "attributes"}:
            _restore_object(getattr(strategy, name), value, data)
        else:
            setattr(strategy, name, _restored(value, data))


def _saved(value: object, path: str, arrays: list[np.ndarray]) -> object:
    match value:
        case None | bool() | str():
            return value
        case np.generic() | np.ndarray() if value.dtype.kind in NUMBERS:
            return {"scalar" if isinstance(value, np.generic) else "array": _place(np.asarray(value), arrays)}
        case int() | float():
            return value
        case bytes():
            return {"bytes": _place(np.frombuffer(value, np.uint8), arrays)}
        case list() | tuple() | set() | frozenset():
            items = sorted(value) if isinstance(value, set | frozenset) else value
            return {type(value).__name__: [_saved(item, f"{path}[...]", arrays) for item in items]}
        case Array():
            return {"Array": _saved(value.numpy(), path, arrays)}
        case ArrayRecord() | MetricRecord() | ConfigRecord():
            return {type(value).__name__: _saved(dict(value), path, arrays)}
        case dict() if type(value) is dict:
            return {
                "dict": [
                    [_saved(name, f"{path} (a key)", arrays), _saved(item, f"{path}[{name!r}]", arrays)]
                    for name, item in value.items()
                ]
            }
        case _:
            raise NotSaved(f"{path} is a {type(value).__module__}.{type(value).__name__}")


def _restored(value: object, data: memoryview) -> object:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "array" | "scalar" | "bytes":
            array = _array(content, data)
            return array if kind == "array" else array.tobytes() if kind == "bytes" else array[()]
        case "dict":
            return {_restored(name, data): _restored(item, data) for name, item in content}
        case "Array":
            return Array(_restored(content, data))
        case "list" | "tuple" | "set" | "frozenset":
            items = [_restored(item, data) for item in content]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        case _:
            return RECORDS[kind](_restored(content, data))


def _place(array: np.ndarray, arrays: list[np.ndarray]) -> Place:
    """Add an array to those of a state. Return its place: the first byte, dtype and shape."""
    little = np.asarray(array, array.dtype.newbyteorder("<"))
    first = sum(each.nbytes for each in arrays)
    arrays.append(little)
    return first, little.dtype.str, little.shape


def _array(place: Place, data: memoryview) -> np.ndarray:
    first, dtype, shape = place
    array: np.ndarray = np.frombuffer(data, np.dtype(dtype), math.prod(shape), first)
    return array.reshape(shape).copy()

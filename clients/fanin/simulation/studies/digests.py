"""The digest of an object: its values, and the code of its classes and functions.

A record holds the results of an App, and another process asks whether its App is the same. The code is that of the
functions themselves and of the functions, classes and constants that they name. Comments, line numbers and names of
files do not count. Of torch, numpy, fanin and Python's library, the name alone counts.
"""

import dis
import hashlib
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Final, Protocol, Self, runtime_checkable

import numpy as np

from fanin.edge.tensors import Array

LIBRARIES: Final = frozenset({"torch", "numpy", "fanin", *sys.stdlib_module_names})
"""Packages whose code does not count."""
GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that read a global name."""


@runtime_checkable
class TensorLike(Protocol):
    """The part of a torch tensor that is used. This package does not import torch."""

    def detach(self) -> Self: ...

    def cpu(self) -> Self: ...

    def float(self) -> Self: ...

    def numpy(self) -> Array: ...


def digest_of(value: object) -> str:
    """Return the digest of an object, the same in every process with the same version of Python."""
    return _Digests().of(value)


class _Digests:
    """The digests of an object and of the objects that it refers to."""

    def __init__(self) -> None:
        # By id, with the object: an id is unique as long as the object exists.
        self._ended: dict[int, tuple[str, object]] = {}
        self._begun: dict[int, int] = {}

    def of(self, value: object) -> str:
        """Return the digest of one object."""
        key = id(value)
        if key in self._ended:
            return self._ended[key][0]
        if key in self._begun:
            # A function may call itself, and a method refers to its class.
            return f"begun {self._begun[key]}"
        self._begun[key] = len(self._begun)
        sha256 = hashlib.sha256(type(value).__qualname__.encode())
        for part in self._parts(value):
            sha256.update(part if isinstance(part, bytes) else part.encode())
            sha256.update(b"\0")
        del self._begun[key]
        self._ended[key] = sha256.hexdigest(), value
        return self._ended[key][0]

    def _parts(self, value: object) -> Iterator[str | bytes]:
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                yield repr(value)
            case np.ndarray() | np.generic():
                yield from self._array(np.asarray(value), str(value.dtype))
            case TensorLike():
                yield from self._array(_array_of(value), str(getattr(value, "dtype", "")))
            case tuple() | list():
                yield from map(self.of, value)
            case Set():
                yield from sorted(map(self.of, value))
            case Mapping():
                yield from (self.of(each) for item in value.items() for each in item)
            case CodeType():
                yield value.co_code
                yield from map(self.of, (value.co_names, value.co_varnames, value.co_freevars, value.co_consts))
            case ModuleType():
                yield value.__name__
            case type():
                yield from self._type(value)
            case FunctionType():
                yield from self._function(value)
            case MethodType():
                yield from map(self.of, (value.__func__, value.__self__))
            case partial():
                yield from map(self.of, (value.func, value.args, value.keywords))
            case property():
                yield from map(self.of, (value.fget, value.fset))
            case _:
                yield from self._object(value)

    def _array(self, array: Array, dtype: str) -> Iterator[str | bytes]:
        yield f"{dtype} {array.shape}"
        yield np.ascontiguousarray(array).tobytes()

    def _type(self, kind: type) -> Iterator[str | bytes]:
        for each in kind.__mro__:
            yield f"{each.__module__}.{each.__qualname__}"
            if _is_of_library(each):
                continue
            for name, member in sorted(vars(each).items()):
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if isinstance(function, FunctionType) or not name.startswith("__"):
                    yield name
                    yield self.of(function)

    def _function(self, function: FunctionType) -> Iterator[str | bytes]:
        yield f"{function.__module__}.{function.__qualname__}"
        if _is_of_library(function):
            return
        yield from map(self.of, (function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            yield self.of(cell.cell_contents)
        codes = list(_codes(function.__code__))
        attributes = {name for code in codes for name in code.co_names}
        for name in sorted({each for code in codes for each in _globals_of(code)} & function.__globals__.keys()):
            value = function.__globals__[name]
            yield name
            yield self.of(value)
            if isinstance(value, ModuleType) and not _is_library(value.__name__):
                for attribute in sorted(attributes & vars(value).keys()):
                    yield attribute
                    yield self.of(vars(value)[attribute])

    def _object(self, value: object) -> Iterator[str | bytes]:
        yield from map(self.of, (type(value), getattr(value, "__wrapped__", None)))
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if is_dataclass(value):
            yield from (self.of(getattr(value, each.name)) for each in fields(value))
        elif hasattr(value, "__dict__") and (hasattr(value, "named_modules") or not _is_of_library(type(value))):
            yield self.of(vars(value))
        elif " at 0x" not in repr(value):
            yield repr(value)


def _array_of(tensor: TensorLike) -> Array:
    values = tensor.detach().cpu()
    try:
        return values.numpy()
    except TypeError:
        return values.float().numpy()  # bfloat16, which numpy does not have.


def _is_of_library(value: type | FunctionType) -> bool:
    return _is_library(value.__module__ or "")


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that a code object reads."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in GLOBALS)

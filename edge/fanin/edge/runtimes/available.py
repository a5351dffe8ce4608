"""Which runtimes there are, and which one a process gets.

A runtime's library is imported when the runtime is opened, not before: a device has one of them, and the
server none.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from fanin.edge.runtimes.base import Runtime
from fanin.protos.errors import RuntimeMissing


def _onnx() -> Runtime:
    from fanin.edge.runtimes.onnx import OnnxRuntime

    return OnnxRuntime()


def _reference() -> Runtime:
    from fanin.edge.runtimes.reference import ReferenceRuntime

    return ReferenceRuntime()


RUNTIMES: Final = MappingProxyType[str, Callable[[], Runtime]]({"onnx": _onnx, "reference": _reference})
EXTRAS: Final = MappingProxyType({"onnx": "onnx", "reference": "export"})
"""The extra that installs what a runtime needs."""
LIBRARIES: Final = frozenset({"onnxruntime", "onnx"})
DEFAULT: Final = "onnx"
"""What a device gets unasked; ``reference`` is a twin to compare with, never a default."""


def open_runtime(name: str | None = None) -> Runtime:
    """The runtime of this name, or the default one.

    Raises RuntimeMissing if there is none of this name, or if its library is not installed.
    """
    wanted = DEFAULT if name is None else name
    if wanted not in RUNTIMES:
        raise RuntimeMissing(f"runtime: got {wanted!r}, expected one of {sorted(RUNTIMES)}")
    try:
        return RUNTIMES[wanted]()
    except ModuleNotFoundError as exc:
        # A module of our own that is missing is a broken installation, which no extra mends.
        if exc.name is None or exc.name.partition(".")[0] not in LIBRARIES:
            raise
        raise RuntimeMissing(
            f"runtime {wanted!r}: {exc.name} is not installed here; pip install 'fanin[{EXTRAS[wanted]}]'"
        ) from exc

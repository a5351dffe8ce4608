"""Which runtimes there are, and which one a process gets.

A runtime's library is imported when the runtime is opened, not before: a device has one of them, and the
server none.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from fanin.edge.runtimes.base import Runtime
from fanin.protos.errors import RuntimeMissing


def _onnx() -> Runtime:
    from fanin.edge.runtimes.onnx import OnnxRuntime

    return OnnxRuntime()


def _litert() -> Runtime:
    from fanin.edge.runtimes.tflite import lite_rt

    return lite_rt()


def _tflite() -> Runtime:
    from fanin.edge.runtimes.tflite import tflite_runtime

    return tflite_runtime()


def _reference() -> Runtime:
    from fanin.edge.runtimes.reference import ReferenceRuntime

    return ReferenceRuntime()


RUNTIMES: Final = MappingProxyType[str, Callable[[], Runtime]](
    {"onnx": _onnx, "litert": _litert, "tflite": _tflite, "reference": _reference}
)
EXTRAS: Final = MappingProxyType({"onnx": "onnx", "litert": "litert", "tflite": "tflite", "reference": "export"})
"""The extra that installs what a runtime needs."""
GRAPH_FORMATS: Final = MappingProxyType({"onnx": "onnx", "litert": "tflite", "tflite": "tflite", "reference": "onnx"})
"""The format of the graphs that each runs, known before it is opened."""
LIBRARIES: Final = frozenset({"onnxruntime", "onnx", "ai_edge_litert", "tflite_runtime"})
DEFAULTS: Final = ("onnx", "litert", "tflite")
"""What a device gets unasked: the first that is installed. ``reference`` is a twin to compare with, never a default."""


def open_runtime(name: str | None = None) -> Runtime:
    """The runtime of this name, or the first of the default ones that is installed.

    Raises RuntimeMissing if there is none of this name, or if its library is not installed.
    """
    if name is not None:
        return _open(name)
    for default in DEFAULTS:
        with suppress(RuntimeMissing):
            return _open(default)
    raise RuntimeMissing(
        f"runtime: none of {list(DEFAULTS)} is installed here; pip install 'fanin[{EXTRAS[DEFAULTS[0]]}]'"
    )


def open_format(graph_formats: Collection[str], name: str | None = None) -> Runtime:
    """The runtime of this name, or the first of the default ones that is installed and runs one of these formats.

    Raises RuntimeMissing if it is not installed or runs none of them.
    """
    if name is not None:
        found = _open(name)
        if found.graph_format not in graph_formats:
            raise RuntimeMissing(
                f"runtime {name!r}: runs graphs in {found.graph_format!r}, expected one that runs "
                f"{sorted(graph_formats)}"
            )
        return found
    fitting = [default for default in DEFAULTS if GRAPH_FORMATS[default] in graph_formats]
    for default in fitting:
        with suppress(RuntimeMissing):
            return _open(default)
    extras = " or ".join(f"pip install 'fanin[{EXTRAS[default]}]'" for default in fitting)
    raise RuntimeMissing(f"runtime: none that runs graphs in {sorted(graph_formats)} is installed here; {extras}")


def _open(name: str) -> Runtime:
    if name not in RUNTIMES:
        raise RuntimeMissing(f"runtime: got {name!r}, expected one of {sorted(RUNTIMES)}")
    try:
        return RUNTIMES[name]()
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        # A module of our own that is missing is a broken installation, which no extra mends.
        if library not in LIBRARIES:
            raise
        raise RuntimeMissing(
            f"runtime {name!r}: {library} is not installed here; pip install 'fanin[{EXTRAS[name]}]'"
        ) from exc

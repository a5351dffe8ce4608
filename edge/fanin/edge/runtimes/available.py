"""Selection of a runtime by name, by format, or by installed library.

A runtime's library is imported only when the runtime is opened, because a device has one of the libraries installed and
the server none.
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
"""The extra of this package that installs a runtime's library."""
GRAPH_FORMATS: Final = MappingProxyType({"onnx": "onnx", "litert": "tflite", "tflite": "tflite", "reference": "onnx"})
"""Format of the graphs that each runtime runs, known before it is opened."""
LIBRARIES: Final = frozenset({"onnxruntime", "onnx", "ai_edge_litert", "tflite_runtime"})
DEFAULTS: Final = ("onnx", "litert", "tflite")
"""Runtimes that a device selects from by default, best first. ``reference`` is for comparison and never a default."""


def open_runtime(name: str | None = None) -> Runtime:
    """Open the named runtime, or the first default one that is installed.

    Raises:
        RuntimeMissing: The name is unknown, the library is not installed, or no default runtime is installed.
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
    """Open a runtime for one of these graph formats.

    Args:
        graph_formats: Acceptable formats.
        name: The runtime to open. By default the first default runtime that is installed and fits.

    Raises:
        RuntimeMissing: The runtime is not installed, or runs none of the formats.
    """
    if name is not None:
        runtime = _open(name)
        if runtime.graph_format not in graph_formats:
            raise RuntimeMissing(
                f"runtime {name!r}: runs graphs in {runtime.graph_format!r}, expected one that runs "
                f"{sorted(graph_formats)}"
            )
        return runtime
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
        # A missing module of our own is a broken installation, which no extra fixes.
        if library not in LIBRARIES:
            raise
        raise RuntimeMissing(
            f"runtime {name!r}: {library} is not installed here; pip install 'fanin[{EXTRAS[name]}]'"
        ) from exc

"""The runtimes that are known here, and the selection of one by name, by format, or by installed library.

A runtime is one record: ours are in ``RUNTIMES``, those of other distributions are entry points of the group
``fanin.runtimes``. Its library is imported only when the runtime is opened, because a device has one of the libraries
installed and the server none. Entry points are read only if no runtime of ours is selected, because
``importlib.metadata`` costs a device 3 MB.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.edge.bundles.formats import FILE_FORMATS
from fanin.edge.runtimes.base import Runtime
from fanin.edge.runtimes.engine import GraphEngine
from fanin.edge.runtimes.runtime import GraphRuntime
from fanin.protos.errors import RuntimeMissing
from fanin.protos.records import are_all, check_part

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "fanin.runtimes"
"""The entry point group of runtimes in other distributions. An entry is a ``RuntimeRecord``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRecord:
    """A runtime that can be selected by name.

    Attributes:
        title: Common name of the library, for people.
        graph_format: Format of the graphs that it runs.
        engine: Imports the library and returns its engine.
        plain_engine: The same without fused operators, for comparison; None if the library has no such setting.
        libraries: Top-level packages of the library. If one is missing, the runtime is not installed.
        extra: The extra of fanin that installs the library; "" if none does.
        is_default: Whether a device may select it without a name.

    Raises:
        InvalidInput: A part has another type.
    """

    title: str
    graph_format: str
    engine: Callable[[], GraphEngine]
    plain_engine: Callable[[], GraphEngine] | None = None
    libraries: tuple[str, ...] = ()
    extra: str = ""
    is_default: bool = False

    def __post_init__(self) -> None:
        """Check the parts: they may be another package's."""
        what, listed = f"RuntimeRecord {self.title!r}", sorted(FILE_FORMATS)
        check_part(what, "title", self.title, bool(self.title), "a text")
        check_part(what, "graph_format", self.graph_format, self.graph_format in listed, f"one of {listed}")
        check_part(what, "engine", self.engine, callable(self.engine), "a function without arguments")
        is_plain = self.plain_engine is None or callable(self.plain_engine)
        check_part(what, "plain_engine", self.plain_engine, is_plain, "a function without arguments, or None")
        check_part(what, "libraries", self.libraries, are_all(self.libraries, tuple, str), "a tuple of package names")
        check_part(what, "extra", self.extra, isinstance(self.extra, str), "a text")
        check_part(what, "is_default", self.is_default, isinstance(self.is_default, bool), "true or false")


def _onnx(*, plain: bool = False) -> GraphEngine:
    from fanin.edge.runtimes.engines.onnx import onnxruntime_engine

    return onnxruntime_engine(plain=plain)


def _litert(*, plain: bool = False) -> GraphEngine:
    from fanin.edge.runtimes.engines.litert import litert_engine

    return litert_engine(plain=plain)


def _tflite() -> GraphEngine:
    from fanin.edge.runtimes.engines.tflite import tflite_engine

    return tflite_engine()


def _reference() -> GraphEngine:
    from fanin.edge.runtimes.engines.reference import reference_engine

    return reference_engine()


RUNTIMES: Final = MappingProxyType(
    {
        "onnx": RuntimeRecord(
            title="onnxruntime",
            graph_format="onnx",
            engine=_onnx,
            plain_engine=lambda: _onnx(plain=True),
            libraries=("onnxruntime",),
            extra="onnx",
            is_default=True,
        ),
        "litert": RuntimeRecord(
            title="LiteRT",
            graph_format="tflite",
            engine=_litert,
            plain_engine=lambda: _litert(plain=True),
            libraries=("ai_edge_litert",),
            extra="litert",
            is_default=True,
        ),
        "tflite": RuntimeRecord(
            title="tflite-runtime",
            graph_format="tflite",
            engine=_tflite,
            libraries=("tflite_runtime",),
            extra="tflite",
            is_default=True,
        ),
        "reference": RuntimeRecord(
            title="ONNX reference evaluator",
            graph_format="onnx",
            engine=_reference,
            libraries=("onnx",),
            extra="export",
        ),
    }
)
"""The runtimes of fanin by name, the best default first."""


def open_runtime(name: str | None = None, *, plain: bool = False) -> Runtime:
    """Open the named runtime, or the first default one that is installed.

    Args:
        name: Name of the runtime. The names of fanin come before those of other distributions.
        plain: Open it without fused operators, for comparison.

    Raises:
        RuntimeMissing: The name is unknown, the library is not installed, the package of the runtime is broken, or no
            default runtime is installed.
    """
    if name is not None:
        return _open(name, _record(name), plain=plain)
    if (runtime := _first_default(FILE_FORMATS)) is not None:
        return runtime
    defaults = [each for each, record in RUNTIMES.items() if record.is_default]
    raise RuntimeMissing(
        f"runtime: none of {defaults} is installed here; {_advice(RUNTIMES[defaults[0]])}", code="FN-0401"
    )


def open_format(graph_formats: Collection[str], name: str | None = None) -> Runtime:
    """Open a runtime for one of these graph formats.

    Args:
        graph_formats: Acceptable formats.
        name: The runtime to open. By default the first default runtime that is installed and fits.

    Raises:
        RuntimeMissing: The runtime is not installed, or runs none of the formats.
    """
    if name is None:
        if (runtime := _first_default(graph_formats)) is not None:
            return runtime
        advice = " or ".join(_advice(record) for record in _defaults(graph_formats).values())
        raise RuntimeMissing(
            f"runtime: none that runs graphs in {sorted(graph_formats)} is installed here; "
            f"{advice or 'install a package that has one'}",
            code="FN-0401",
        )
    record = _record(name)
    if record.graph_format not in graph_formats:
        raise RuntimeMissing(
            f"runtime {name!r}: runs graphs in {record.graph_format!r}, expected one that runs {sorted(graph_formats)}",
            code="FN-0401",
        )
    return _open(name, record)


def runtimes_of(graph_format: str) -> tuple[str, ...]:
    """Return the common names of fanin's default runtimes for a format."""
    return tuple(record.title for record in _defaults([graph_format]).values())


def _defaults(graph_formats: Collection[str]) -> dict[str, RuntimeRecord]:
    rows = RUNTIMES.items()
    return {name: record for name, record in rows if record.is_default and record.graph_format in graph_formats}


def _first_default(graph_formats: Collection[str]) -> Runtime | None:
    """Open the first default runtime that is installed: ours in their order, then those of other distributions."""
    for name, record in _defaults(graph_formats).items():
        with suppress(RuntimeMissing):
            return _open(name, record)
    for name in sorted(set(_installed()) - set(RUNTIMES)):
        with suppress(RuntimeMissing):
            record = _record(name)
            if record.is_default and record.graph_format in graph_formats:
                return _open(name, record)
    return None


def _open(name: str, record: RuntimeRecord, *, plain: bool = False) -> Runtime:
    """Open a runtime. The package of another distribution may raise anything. Raises RuntimeMissing."""
    factory: Callable[[], object] = record.engine
    if plain and record.plain_engine is not None:
        factory = record.plain_engine
    try:
        engine = factory()
    except RuntimeMissing:
        raise
    except Exception as exc:  # Any error: the code may come from another package.
        library = (getattr(exc, "name", "") or "").partition(".")[0]
        if isinstance(exc, ModuleNotFoundError) and library in record.libraries:
            raise RuntimeMissing(
                f"runtime {name!r}: {library} is not installed here; {_advice(record)}", code="FN-0401"
            ) from exc
        # A missing module of our own is a broken installation, which no extra fixes.
        if name in RUNTIMES:
            raise
        raise RuntimeMissing(
            f"runtime {name!r}: its package raised {type(exc).__name__}: {exc}; correct that package", code="FN-0211"
        ) from exc
    if not isinstance(engine, GraphEngine) or engine.graph_format != record.graph_format:
        received = f"an engine of {engine.graph_format}" if isinstance(engine, GraphEngine) else type(engine).__name__
        raise RuntimeMissing(
            f"runtime {name!r}: its record returned {received}, expected a GraphEngine of {record.graph_format}; "
            "correct that package",
            code="FN-0165",
        )
    return GraphRuntime(engine)


def _advice(record: RuntimeRecord) -> str:
    names = f"'fanin[{record.extra}]'" if record.extra else " ".join(record.libraries)
    return f"pip install {names}"


def _installed() -> "dict[str, list[EntryPoint]]":
    """Return the entry points of other distributions by name; a name that two of them use has both."""
    from importlib.metadata import entry_points

    entries: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        entries.setdefault(entry.name, []).append(entry)
    return entries


def _record(name: str) -> RuntimeRecord:
    """Return the record of a runtime by name. Raises RuntimeMissing."""
    if name in RUNTIMES:
        return RUNTIMES[name]
    entries = _installed()
    if name not in entries:
        known = sorted({*RUNTIMES, *entries})
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RuntimeMissing(f"runtime: got {name!r}, expected one of {known}{hint}", code="FN-0407")
    entry, *others = entries[name]
    if others:
        packages = sorted(str(each.dist.name if each.dist else each.value) for each in entries[name])
        raise RuntimeMissing(
            f"runtime {name!r}: got one from each of {packages}, expected one package; uninstall the others",
            code="FN-0212",
        )
    try:
        record = entry.load()
    except Exception as exc:  # Any error: the code comes from another package.
        raise RuntimeMissing(
            f"runtime {name!r}: cannot be imported from {entry.value} ({type(exc).__name__}: {exc}); "
            "repair that package",
            code="FN-0211",
        ) from exc
    if not isinstance(record, RuntimeRecord):
        raise RuntimeMissing(
            f"runtime {name!r}: got {type(record).__name__} from {entry.value}, expected a RuntimeRecord; correct that "
            "package",
            code="FN-0165",
        )
    return record

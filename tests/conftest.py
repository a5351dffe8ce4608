"""Shared setup of every test run: the light selection, the profiles of property tests, and Bundles in both formats."""

import fcntl
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from parallel.programs import Programs
from support.light import is_light

from fanin.edge.bundles.bundle import SIGNATURE_FILE, Bundle

BundleOf = Callable[[str], Bundle]
BundleFor = Callable[[str, str], Bundle]

HEAVY_FIXTURES: Final = ("both_formats", "bundle_for", "programs")
"""Fixtures that import torch or a converter when a test requests them."""
ONNX_RUNTIMES: Final = ("onnx", "reference")
"""Runtimes of ``bundle_for`` that run ONNX graphs."""
LONG: Final = (
    *("test_matrix.py", "test_zoo.py", "test_every_kill.py", "test_demo_gates.py", "test_parity.py", "test_memory.py"),
    *("test_operator_table.py", "test_mutants.py", "test_seeded_runs.py", "test_train_command.py"),
    "test_char_decoder.py",
)
"""The nightly files that take minutes, longest first."""
GPU_TESTS: Final = Path(__file__).with_name("gpu")
"""Tests that run if ``CUDA_VISIBLE_DEVICES`` names a GPU."""

# A busy machine must not fail a law, so no profile has a deadline. In CI a law always draws the same examples, so it
# fails on every machine or on none. The nightly suite draws new examples.
settings.register_profile(
    "change",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=(HealthCheck.too_slow,),
)
settings.register_profile(
    "nightly", deadline=None, max_examples=500, print_blob=True, suppress_health_check=(HealthCheck.too_slow,)
)
settings.load_profile("change")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--light``: it selects the tests that need no torch, device environment or process (``support.light``)."""
    parser.addoption("--light", action="store_true", help="run the light tests only, as `make quick` does")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keep heavy files out of a light run before they are imported, and ``tests/gpu`` out of a run without a GPU."""
    if collection_path == GPU_TESTS:
        return True if not os.environ["CUDA_VISIBLE_DEVICES"] else None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("--light") and is_test and not is_light(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that are marked heavy, or have a heavy fixture, out of a light run.

    The nightly suite begins with its longest files, so that its workers end together.
    """
    if config.getoption("markexpr") == "nightly or hypothesis":
        items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if not config.getoption("--light"):
        return
    heavy = [
        item
        for item in items
        if item.get_closest_marker("heavy") or set(HEAVY_FIXTURES) & set(getattr(item, "fixturenames", ()))
    ]
    config.hook.pytest_deselected(items=heavy)
    items[:] = [item for item in items if item not in heavy]


def pytest_configure(config: pytest.Config) -> None:
    """Run all tests on the CPU unless GPUs are named: on a CPU they hold for any number of ranks.

    Exports read converted graphs from a cache that is empty when the session begins. All workers share it. Ctrl-C works
    as in a terminal. A shell that starts a run in the background makes it ignore SIGINT, and a test that interrupts
    itself would never end.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An export creates millions of objects and few cycles. Collections used a fortieth of the tests' processor time.
    gc.set_threshold(100_000, 20, 20)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if not hasattr(config, "workerinput"):
        graphs = tempfile.TemporaryDirectory(prefix="fanin-graphs-")
        config.add_cleanup(graphs.cleanup)
        os.environ["FANIN_GRAPH_CACHE"] = graphs.name


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: with a time or a random salt in them, the workers' test ids would differ."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler installed, because it would make a test of another file fail."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == before, "the test left handlers of signals, expected those before it"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, exempt all loaded objects from garbage collection.

    A process that has imported torch and the converters holds a million objects. Each full collection visits all of
    them, and these visits were a tenth of the tests' processor time.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def bundle_for(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> BundleFor:
    """The Bundle of an App of ``support.models``, by the names of the App and of a runtime.

    For ONNX runtimes it has no TFLite graphs, because these take most of an export's time. For a runtime of TFLite it
    has both formats. A conversion takes seconds, so each App is exported once a session: workers share the result.
    """
    # Imported here, because these modules import torch and the converters, which most tests do not need.
    from support.models import app_of, export_bundle, in_memory, write_copy

    from fanin.edge.export.formats.graphs import FORMATS

    root = tmp_path_factory.getbasetemp()
    # A worker has its own folder inside the session's folder.
    root = root.parent if hasattr(request.config, "workerinput") else root

    @cache
    def bundle_in(name: str, formats: tuple[str, ...]) -> Bundle:
        folder = root / "-".join(("bundle", name, *formats))
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / SIGNATURE_FILE).exists():
                write_copy(export_bundle(app_of(name), formats), folder)
        return in_memory(folder)

    return lambda name, runtime: bundle_in(name, ("onnx",) if runtime in ONNX_RUNTIMES else tuple(FORMATS))


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Yield a server that runs programs in forks. Its process imports torch once for all of them."""
    with Programs() as server:
        yield server


@pytest.fixture(scope="session")
def both_formats(bundle_for: BundleFor) -> BundleOf:
    """The Bundle of an App of ``support.models``, by name, in both graph formats."""
    return lambda name: bundle_for(name, "litert")

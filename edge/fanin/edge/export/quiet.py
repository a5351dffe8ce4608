"""What torch and the TFLite converter say about themselves is kept from the user; all else that is said is not.

The converter speaks on four ways: Python warnings, loggers, a progress bar, and its C++ parts straight to the process's
stderr. None of it is about the App, whose code does not run while a graph is converted.
"""

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

LOGGERS: Final = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")
"""Who tells at import which of its optional parts are missing here."""
ENVIRONMENT: Final = {
    "LITERT_TORCH_SHOW_PROGRESS": "n",
    "LITERT_TORCH_SILENCE_TORCH_LOGS": "n",
    "LAYOUT_OPTIMIZE_PARTITIONER": "GREEDY",
}
"""The converter's settings: no progress bar, hands off the loggers of torch, and how layouts are chosen at first."""
FROM_NATIVE_CODE: Final = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
STDERR: Final = 2


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hide that torch uses a class of its own that it has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        yield


@contextmanager
def quiet_converter() -> Iterator[None]:
    """Hide the converter's own noise while it is imported and used."""
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_native_stderr())
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.addFilter(_no_warning)
            stack.callback(logger.removeFilter, _no_warning)
        stack.enter_context(quiet_torch())
        yield


def _no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _native_stderr() -> Iterator[None]:
    """Hold back what is written to the process's stderr, and let through at the end what native logs did not say."""
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
            said.seek(0)
            rest = [line for line in said if not FROM_NATIVE_CODE.match(line)]
            if rest:
                os.write(STDERR, b"".join(rest))

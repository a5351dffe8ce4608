"""What torch and the TFLite converter say about themselves is kept from the user; all else that is said is not.

The converter speaks on four ways: Python warnings, loggers, a progress bar, and its C++ parts straight to the process's
stderr. None of it is about the App, whose code does not run while a graph is converted.
"""

import logging
import os
import re
import sys
import tempfile
import threading
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
_ONE_AT_A_TIME: Final = threading.Lock()
"""Two threads that each restore the other's redirection would leave the process without a standard error."""


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hide that torch uses a class of its own that it has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        yield


@contextmanager
def quiet_weights() -> Iterator[None]:
    """Hide that a recurrent layer of torch's keeps a list of its own weights, which are given anew for a trace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights.*assigned during export", category=UserWarning)
        yield


@contextmanager
def quiet_converter() -> Iterator[None]:
    """Hide the converter's own noise while it is imported and used."""
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(quiet_stderr(FROM_NATIVE_CODE))
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.addFilter(_no_warning)
            stack.callback(logger.removeFilter, _no_warning)
        stack.enter_context(quiet_torch())
        yield


@contextmanager
def quiet_stderr(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out the lines on standard error that begin with ``noise``; the other lines follow when this ends.

    The redirection holds for the whole process. Only an export uses it, never what runs on a device.
    """
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as lines:
        sys.stderr.flush()
        try:
            kept = os.dup(STDERR)
        except OSError:
            # A process without a standard error shows no noise.
            yield
            return
        os.dup2(lines.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
            lines.seek(0)
            if rest := b"".join(line for line in lines if not noise.match(line)):
                os.write(STDERR, rest)


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

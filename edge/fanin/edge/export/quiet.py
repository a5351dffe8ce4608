"""Messages of libraries about themselves, hidden from the user; all other output stays.

The TFLite converter writes to four channels: Python warnings, loggers, a progress bar, and the process's stderr from
C++. None of its messages concern the App, whose code does not run during a conversion.
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
"""Loggers that report missing optional parts at import."""
FOLDING_LOGGER: Final = "onnxscript.optimizer._constant_folding"
ENVIRONMENT: Final = {
    "LITERT_TORCH_SHOW_PROGRESS": "n",
    "LITERT_TORCH_SILENCE_TORCH_LOGS": "n",
    "LAYOUT_OPTIMIZE_PARTITIONER": "GREEDY",
}
"""Settings of the converter: no progress bar, no changes to torch's loggers, and the first layout strategy."""
FROM_NATIVE_CODE: Final = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
STDERR: Final = 2
_ONE_AT_A_TIME: Final = threading.Lock()
"""With two redirections at once the process could lose its standard error."""


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hide a deprecation warning that torch's own code triggers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        yield


@contextmanager
def quiet_weights() -> Iterator[None]:
    """Hide the warning that a recurrent layer of torch replaces its list of weights during a trace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights.*assigned during export", category=UserWarning)
        yield


@contextmanager
def quiet_optimizer() -> Iterator[None]:
    """Hide warnings of the optimizer of ONNX graphs about constants that it cannot compute, and leaves in the graph."""
    with _without_warnings(FOLDING_LOGGER):
        yield


@contextmanager
def quiet_converter() -> Iterator[None]:
    """Hide the converter's own messages while it is imported and used."""
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(quiet_stderr(FROM_NATIVE_CODE))
        for name in LOGGERS:
            stack.enter_context(_without_warnings(name))
        stack.enter_context(quiet_torch())
        yield


@contextmanager
def quiet_stderr(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Drop the lines on standard error that begin with ``noise``; write the other lines at the end.

    The redirection affects the complete process. Only an export uses it, never code that runs on a device.
    """
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as lines:
        sys.stderr.flush()
        try:
            duplicate = os.dup(STDERR)
        except OSError:
            # Without a standard error there is nothing to hide.
            yield
            return
        os.dup2(lines.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(duplicate, STDERR)
            os.close(duplicate)
            lines.seek(0)
            if rest := b"".join(line for line in lines if not noise.match(line)):
                os.write(STDERR, rest)


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    logger.addFilter(_no_warning)
    try:
        yield
    finally:
        logger.removeFilter(_no_warning)


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

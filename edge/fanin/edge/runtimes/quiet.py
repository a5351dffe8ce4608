"""What a native library tells of itself on the process's stderr is held back; all else that is said there is not.

It writes to the file descriptor and knows no setting for it. One thread at a time: two that each put the other's
redirection back would leave the process without a stderr.
"""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STDERR: Final = 2
_ONE_AT_A_TIME: Final = threading.Lock()


@contextmanager
def quiet_stderr(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out the lines that begin with ``noise``; the others come when this ends."""
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as said:
        sys.stderr.flush()
        try:
            kept = os.dup(STDERR)
        except OSError:
            # A process without a stderr hears no noise.
            yield
            return
        os.dup2(said.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
            said.seek(0)
            if rest := b"".join(line for line in said if not noise.match(line)):
                os.write(STDERR, rest)

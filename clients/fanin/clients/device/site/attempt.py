"""An attempt to take part: a failure before the client runs is in the state of the device, too.

Such a failure is a missing runtime, a file that cannot be read, or an authority that has another fingerprint. The
folder is created for it. A folder that another process holds is left as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.record import SitePlace
from fanin.clients.device.storage.cache import hold_folder
from fanin.protos.errors import Conflict, FaninError


class JoinAttempt:
    """An attempt to take part with a device's folder."""

    def __init__(self, folder: Path, place: SitePlace) -> None:
        self._folder = folder
        self._journal = Journal(folder, place, "")
        self._has_passed = False

    def retry(self, error: FaninError, pause_s: float) -> None:
        """Note a failure after which this process, which holds the folder, tries again after a pause."""
        self._journal.retry("authority", error, pause_s)

    def passed(self) -> None:
        """Leave the state to the client from now on."""
        self._has_passed = True

    def end(self, error: BaseException) -> None:
        """Note the error that ended the attempt."""
        if self._has_passed:
            return
        with suppress(OSError, Conflict), hold_folder(self._folder):
            self._journal.stop(error)


@contextmanager
def noted_attempt(folder: Path, place: SitePlace) -> Iterator[JoinAttempt]:
    """Note the error that ends this context, unless the client has begun to note the state."""
    attempt = JoinAttempt(folder, place)
    try:
        yield attempt
    except BaseException as exc:
        attempt.end(exc)
        raise

"""What others may see of the coordinator's work, without being able to change it."""

import logging
from typing import Protocol

from fanin.server.rounds.events import Effect

LOG = logging.getLogger("fanin.server")


class Observer(Protocol):
    """Told before and after each effect is carried out."""

    def starting(self, run_id: str, effect: Effect) -> None:
        """About to be carried out."""
        ...

    def finished(self, run_id: str, effect: Effect) -> None:
        """Carried out; what it changed is durable as far as the settings ask."""
        ...


class LogObserver:
    """Writes to the log of ``fanin.server``."""

    def starting(self, run_id: str, effect: Effect) -> None:
        """At debug level."""
        LOG.debug("run %s: %s", run_id, effect)

    def finished(self, run_id: str, effect: Effect) -> None:
        """At debug level."""
        LOG.debug("run %s: done %s", run_id, type(effect).__name__)

"""The log of effects."""

import logging

from fanin.server.rounds.events import Effect

LOG = logging.getLogger("fanin.server")


class LogObserver:
    """An Observer (``rounds.worker``) that writes each effect to the log ``fanin.server``, at debug level."""

    def starting(self, run_id: str, effect: Effect) -> None:
        """Log an effect that is about to be carried out."""
        LOG.debug("run %s: %s", run_id, effect)

    def finished(self, run_id: str, effect: Effect) -> None:
        """Log an effect that was carried out."""
        LOG.debug("run %s: done %s", run_id, type(effect).__name__)

"""Messages to a service manager: ready, alive and stopping.

systemd passes the path of a datagram socket in ``NOTIFY_SOCKET``, and in ``WATCHDOG_USEC`` the time within which it
expects a sign of life. The sign comes from the event loop itself. So a coordinator whose loop hangs is started again.

Reference: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

LOG: Final = logging.getLogger("fanin.server.care.notify")


class ServiceManager:
    """The service manager that started this process; without one, nothing is sent.

    Args:
        environment: The environment of the process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        # A name in the abstract namespace begins with a null byte, which a variable cannot have.
        self._socket = variables.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        microseconds = variables.get("WATCHDOG_USEC", "")
        is_ours = variables.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(microseconds) / 1e6 if microseconds.isdecimal() and is_ours and self._socket else 0.0

    def tell(self, *assignments: str) -> None:
        """Send assignments such as ``READY=1``. A manager that does not read them changes nothing here."""
        if not self._socket:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
                line.sendto("\n".join(assignments).encode(), self._socket)
        except OSError as exc:
            LOG.warning("the service manager did not get %s: %s", assignments[0], exc)

    async def keep_alive(self) -> None:
        """Give a sign of life twice in the time of the watchdog, until cancelled. It ends without one."""
        while self.watchdog_s:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

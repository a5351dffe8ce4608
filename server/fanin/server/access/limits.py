"""The limits of a coordinator's load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Numbers of devices that a coordinator serves at the same time.

    Attributes:
        max_parked: Check-ins that wait for work at a time. Each costs some 10 kB.
        max_uploads: Uploads at a time. Each has an open file.
        max_wait_s: Seconds that a check-in waits at most. Common proxies close a silent connection after 60 s.
        stall_s: Seconds without progress after which the coordinator ends a transfer. It also ends one that is too slow
            on average (``delay_budget``). The device resumes the transfer later.
    """

    max_parked: int = 10_000
    max_uploads: int = 4_096
    max_wait_s: float = 45.0
    stall_s: float = 60.0

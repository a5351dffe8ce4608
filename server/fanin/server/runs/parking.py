"""The check-ins that wait for work. ``fleet.checkins`` answers them, and a Run that lacks devices looks at them."""

import asyncio
from dataclasses import dataclass

from fanin.protos import messages as m


@dataclass(slots=True)
class Parked:
    """A check-in, and its answer once there is one."""

    check_in: m.CheckIn
    answer: asyncio.Future[m.CheckInAnswer]

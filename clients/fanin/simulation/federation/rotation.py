"""``Rotation``: a million clients, of which a few thousand are present at a time.

A coordinator lets a limited number of devices wait (``Limits.max_parked``), and sends all others away until later. So
of many clients, only those that wait or work need a task and a connection. The others are numbers: their habits follow
from the seed. A rotation keeps the states of the stages and the personal parameters of former visitors, and the digests
of their Chunks.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from fanin.protos import messages as m
from fanin.simulation.federation.loopback import Fleet
from fanin.simulation.federation.member import ActiveMember, Member, Surroundings
from fanin.simulation.federation.memory import MemoryFolder

MAX_DRAWS: Final = 100
"""Clients that are drawn for a place before it stays empty for ``PAUSE_S``: most of them may be away."""
PAUSE_S: Final = 60.0
DONE: Final = (m.UpdateState.ACCEPTED, m.UpdateState.DISCARDED)


class Rotation:
    """Clients of which only some are present. A client without work leaves, and another one comes.

    Each visitor is drawn at random among the absent clients. It leaves when its part in a Round has ended, when the
    coordinator has no work for it, or when its habits say so. It comes with a full battery.

    Args:
        num_clients: Number of clients.
        num_present: Number of places, at most ``num_clients``.
        member: Returns a client from its index.
        seed: Seed of all random choices.
    """

    def __init__(self, num_clients: int, num_present: int, member: Callable[[int], Member], seed: int) -> None:
        self.num_present = num_present
        self._num_clients = num_clients
        self._member = member
        self._seed = seed
        self._rng = random.Random(f"{seed}/rotation")
        self._present: set[int] = set()
        self._left: dict[int, _Left] = {}
        self._chunks: dict[str, bytes] = {}

    async def keep_place(self, around: Surroundings) -> None:
        """Fill one place with one visitor after another, until cancelled."""
        while True:
            for _ in range(MAX_DRAWS):
                client = self._rng.randrange(self._num_clients)
                if client in self._present:
                    continue
                member = self._member(client)
                stay_s = self._stay_s(member)
                if stay_s:
                    await self._visit(client, member, around, stay_s)
                    break
            else:
                await asyncio.sleep(PAUSE_S)

    def _stay_s(self, member: Member) -> float:
        """Return how long a client stays from now on; 0.0 if it is away."""
        now_s, time_s = asyncio.get_running_loop().time(), 0.0
        for stay_s, away_s in member.habits.stays(random.Random(f"{self._seed}/{member.device}/come")):
            if stay_s is None or now_s < time_s + stay_s:
                return math.inf if stay_s is None else time_s + stay_s - now_s
            if away_s is None or now_s < time_s + stay_s + away_s:
                return 0.0
            time_s += stay_s + away_s
        return 0.0

    async def _visit(self, client: int, member: Member, around: Surroundings, stay_s: float) -> None:
        """Run a client until it leaves."""
        remainder = self._left.get(client, _Left())
        visiting = replace(around, fleet=_VisitedFleet(around.fleet))
        active = ActiveMember(member, visiting, f"{self._seed}/{remainder.num_visits}")
        folder = active.device.folder
        folder.states.files.update(remainder.states)
        folder.locals.files.update(remainder.locals)
        folder.records.update(remainder.records)
        folder.chunks.update({name: self._chunks[name] for name in remainder.chunks if name in self._chunks})
        self._present.add(client)
        try:
            await active.stay(None if math.isinf(stay_s) else stay_s)
        except _NoMoreWork:
            pass
        finally:
            self._present.remove(client)
            self._left[client] = remainder.after(folder)
            # The Chunks of the last visitor: the Bundle and a recent Version. Older Versions would fill the memory.
            self._chunks = dict(folder.chunks)


@dataclass(frozen=True, slots=True)
class _Left:
    """The part of a client's folder that stays between two visits."""

    num_visits: int = 0
    chunks: tuple[str, ...] = ()
    states: dict[tuple[str, int], bytes] = field(default_factory=dict)
    locals: dict[tuple[str, int], bytes] = field(default_factory=dict)
    records: dict[str, m.Order] = field(default_factory=dict)

    def after(self, folder: MemoryFolder) -> "_Left":
        """Return this part after one more visit."""
        return _Left(
            num_visits=self.num_visits + 1,
            chunks=tuple(folder.chunks),
            states=dict(folder.states.files),
            locals=dict(folder.locals.files),
            records=dict(folder.records),
        )


class _NoMoreWork(Exception):
    """The visit of a client ends."""


class _VisitedFleet:
    """The coordinator for one visit: a check-in after the work, or without work, ends it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._has_worked = False

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        if self._has_worked:
            raise _NoMoreWork
        answer = await self._fleet.check_in(device, check_in)
        if isinstance(answer, m.Wait):
            raise _NoMoreWork
        return answer

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        return self._fleet.download(device, download)

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        async for reply in self._fleet.upload(device, header, pieces):
            self._has_worked = self._has_worked or reply.update_state in DONE
            yield reply

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        return await self._fleet.exchange(device, request)

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        reply = await self._fleet.report(device, report)
        self._has_worked = self._has_worked or bool(report.failure) or reply.update_state in DONE
        return reply

"""A device with habits: it takes part, leaves at any moment, and returns with its cache."""

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fanin.clients.device.updates import Trainer
from fanin.protos import messages as m
from fanin.simulation.devices.availability import Charge
from fanin.simulation.devices.conduct import Collusion, Conduct
from fanin.simulation.devices.habits import Habits
from fanin.simulation.federation.device import VirtualDevice
from fanin.simulation.federation.loopback import PIECE_BYTES, Fleet, LoopbackTransport
from fanin.simulation.federation.memory import MemoryStates
from fanin.simulation.federation.observed import DeviceEvent, Observe, ObservedFleet, ObservedTrainer
from fanin.simulation.federation.unreliable import Note, UnreliableFleet

LATENCY_S: Final = 0.01
"""Delay before each call; it prevents two devices from calling at the same moment for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One device of a federation.

    Attributes:
        device: Its name.
        trainer: Its trainer.
        habits: Its habits.
        locals: Its personal parameters, as the bytes of their files.
    """

    device: str
    trainer: Trainer
    habits: Habits = field(default_factory=Habits)
    locals: MemoryStates = field(default_factory=MemoryStates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The environment of a Member.

    Attributes:
        fleet: The coordinator.
        trusted: Public keys of the publishers.
        overheard: The newest Assignment of each device, for false Updates.
        collusion: What the attackers know.
        note: Logs an event.
        observe: Receives the events of a device's part in the Rounds.
        piece_bytes: Bytes of a piece of an upload.
    """

    fleet: Fleet
    trusted: Collection[str]
    overheard: dict[str, str] = field(default_factory=dict)
    collusion: Collusion = field(default_factory=Collusion)
    note: Note = lambda who, what: None
    observe: Observe = lambda event: None
    piece_bytes: int = PIECE_BYTES


async def take_part(member: Member, around: Surroundings, seed: str) -> None:
    """Take part until cancelled, or until the device never returns. The same seed gives the same behaviour."""
    name = member.device
    active = ActiveMember(member, around, seed)
    device = active.device
    for stay_s, away_s in member.habits.stays(random.Random(f"{seed}/{name}/come")):
        if stay_s == away_s == 0.0:
            # The device is present from the beginning: it neither leaves nor returns.
            continue
        await active.stay(stay_s)
        if away_s is None:
            around.note(name, "is gone for good")
            around.observe(DeviceEvent(device=name, event="gone"))
            return
        around.note(name, f"is gone for {away_s:.0f} s")
        around.observe(DeviceEvent(device=name, event="offline"))
        await asyncio.sleep(away_s)
        device.restart()
        around.note(name, "is back")
        around.observe(DeviceEvent(device=name, event="online"))


class ActiveMember:
    """A Member with its device, its power and its connection.

    Attributes:
        device: The device.
    """

    def __init__(self, member: Member, around: Surroundings, seed: str) -> None:
        habits, name = member.habits, member.device
        # One generator for each quantity: a broken call does not change the duration of a training.
        line_rng, device_rng, quitting = (random.Random(f"{seed}/{name}/{what}") for what in ("line", "work", "quit"))
        unreliable = UnreliableFleet(
            fleet=around.fleet, habits=habits, rng=line_rng, overheard=around.overheard, note=around.note
        )
        line = ObservedFleet(fleet=unreliable, observe=around.observe)
        transport = LoopbackTransport(fleet=line, device=name, latency_s=LATENCY_S, piece_bytes=around.piece_bytes)
        conduct = Conduct(name, habits, around.collusion)
        trainer = ObservedTrainer(
            member.trainer, name, around.observe, lambda: quitting.random() < habits.quit, conduct
        )
        self._power = _Power(habits)
        self._note_empty = lambda: around.observe(DeviceEvent(device=name, event="battery empty"))
        self.device = VirtualDevice(transport, trainer, around.trusted, device_rng, self._power.work)
        self.device.folder.locals = member.locals

    async def stay(self, stay_s: float | None) -> None:
        """Run the device for some virtual seconds, or until cancelled. It charges whenever its battery is empty."""
        await self._power.run(self.device, stay_s, self._note_empty)


class _Power:
    """The power of one device: it draws the duration of each training, which drains the battery."""

    def __init__(self, habits: Habits) -> None:
        self._habits = habits
        self._charge = None if habits.battery is None else Charge(habits.battery)
        self._limit: asyncio.Timeout | None = None
        self._is_empty = False
        self._full_s = 0.0

    def work(self, rng: random.Random, assignment: m.Assignment) -> float:
        """Draw the seconds of a training. The device stops when its battery is empty."""
        now_s, training = asyncio.get_running_loop().time(), assignment.training
        seconds = self._habits.work(rng, training.epochs + training.personal_epochs, now_s)
        if self._charge is not None and self._limit is not None:
            empty_s = self._charge.begin(now_s, seconds, self._limit.when())
            if empty_s is not None:
                self._is_empty = True
                self._limit.reschedule(now_s + empty_s)
        return seconds

    async def run(self, device: VirtualDevice, stay_s: float | None, note_empty: Callable[[], None]) -> None:
        """Run a device until it leaves. When its battery is empty, it pauses until it is full, also in a later stay."""
        loop = asyncio.get_running_loop()
        until_s = None if stay_s is None else loop.time() + stay_s
        while True:
            if self._full_s > loop.time():
                await asyncio.sleep((self._full_s if until_s is None else min(self._full_s, until_s)) - loop.time())
                if until_s is not None and self._full_s >= until_s:
                    return
            self._is_empty = False
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s) as self._limit:
                    await device.run()
            if not self._is_empty:
                return
            assert self._habits.battery is not None, "a battery that is empty exists"
            note_empty()
            device.restart()
            self._full_s = loop.time() + self._habits.battery.charge_s

"""A device with habits: it takes part, leaves at any moment, and returns with its cache."""

import asyncio
import random
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fanin.clients.device.updates import Trainer
from fanin.clients.testing.device import VirtualDevice
from fanin.clients.testing.habits import Habits
from fanin.clients.testing.loopback import PIECE_BYTES, Fleet, LoopbackTransport
from fanin.clients.testing.unreliable import Note, UnreliableFleet

LATENCY_S: Final = 0.01
"""Delay before each call; it prevents two devices from calling at the same moment for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One device of a federation: its name, its trainer and its habits."""

    device: str
    trainer: Trainer
    habits: Habits = field(default_factory=Habits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The environment of a Member.

    Attributes:
        fleet: The coordinator.
        trusted: Public keys of the publishers.
        overheard: The newest Assignment of each device, for false Updates.
        note: Logs an event.
        piece_bytes: Bytes of a piece of an upload.
    """

    fleet: Fleet
    trusted: Collection[str]
    overheard: dict[str, str] = field(default_factory=dict)
    note: Note = lambda who, what: None
    piece_bytes: int = PIECE_BYTES


async def take_part(member: Member, around: Surroundings, seed: str) -> None:
    """Take part until cancelled, or until the device never returns. The same seed gives the same behaviour."""
    habits = member.habits
    # One generator for each quantity: a broken call does not change the duration of a training.
    coming, line_rng, device_rng = (
        random.Random(f"{seed}/{member.device}/{what}") for what in ("come", "line", "work")
    )
    line = UnreliableFleet(
        fleet=around.fleet, habits=habits, rng=line_rng, overheard=around.overheard, note=around.note
    )
    transport = LoopbackTransport(fleet=line, device=member.device, latency_s=LATENCY_S, piece_bytes=around.piece_bytes)
    device = VirtualDevice(transport, member.trainer, around.trusted, device_rng, habits.work)
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(habits.stay(coming)):
                await device.run()
        away_s = habits.away(coming)
        if away_s is None:
            around.note(member.device, "is gone for good")
            return
        around.note(member.device, f"is gone for {away_s:.0f} s")
        await asyncio.sleep(away_s)
        device.restart()
        around.note(member.device, "is back")

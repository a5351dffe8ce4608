"""Exchanges: the messages of devices and coordinator in a phase of a Round.

    1. the Round is under way, the phase has messages, and the size of the message is within its limit
    2. a recorded message of the device has the same bytes; the first one is final
    3. the phase is under way, and the device has a place in it
    4. the protocol accepts the message; a wrong one ends the device's Assignment, and harms no other device
    5. the message becomes durable, and the round machine receives it
    6. the call waits until the roster of the phase is frozen, and returns the coordinator's message

All but the wait repeats after a restart with the same outcome, because each answer follows from the record.
"""

import asyncio
from typing import Final

from fanin.edge.scopes import LogScope, note_scope
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, InvalidInput, Superseded, Unavailable, coded
from fanin.server.access.limits import Limits
from fanin.server.fleet.activity import Activity
from fanin.server.fleet.observer import AssignedWork, FleetObserver, Unobserved, WorkOutcome
from fanin.server.protocols import events as e
from fanin.server.protocols.machine import Round
from fanin.server.protocols.phases import FAILING, Phase
from fanin.server.rounds.troubles import SEE_LOG, Damaged
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.drivers import Drivers
from fanin.server.storage.lanes import run_to_end

RETRY_S: Final = (0.0, 1.0)
"""The window of the next call. The device has waited already, so it may call again at once."""


class Exchanges:
    """The exchanges under way."""

    def __init__(self, drivers: Drivers, limits: Limits, activity: Activity) -> None:
        self._drivers = drivers
        self._limits = limits
        self._activity = activity
        self.observer: FleetObserver = Unobserved()
        # By device: the number of its last call. An earlier one of the device ends its wait.
        self._calls: dict[str, int] = {}

    async def exchange(self, device: str, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """Record a device's message of a phase, and wait for the coordinator's message.

        Args:
            device: The device's id.
            request: The message.

        Returns:
            The coordinator's message. A pause if the phase continues. The end if the Round is over, or continues
            without the device.

        Raises:
            NotFound: The Assignment was not issued to this device.
            InvalidInput: The phase has no messages, or the message is wrong. Nothing is recorded.
            Conflict: The device has no place in the Round.
            Unavailable: Another coordinator drives the Run.
        """
        driver, round_number = self._drivers.of_assignment(request.assignment_id, device)
        note_scope(LogScope(run=driver.run_id, round=round_number, device=device))
        number = self._calls[device] = self._calls.get(device, 0) + 1
        until = asyncio.get_running_loop().time() + min(request.wait_s, self._limits.max_wait_s)
        try:
            while True:
                # Before the decision, so that no change after it is missed.
                changed = driver.course.changed
                # Shielded from the device's disconnection: the machine must learn of a recorded message.
                outcome = await run_to_end(self._outcome(driver, round_number, device, request))
                if outcome is not None:
                    return outcome
                # A coordinator that ends must not wait for its devices, nor a device for its own earlier call.
                if driver.course.is_leaving or self._calls.get(device) != number:
                    break
                async with asyncio.timeout_at(until):
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            if self._calls.get(device) == number:
                del self._calls[device]
        return m.ExchangePause(retry_min_s=RETRY_S[0], retry_max_s=RETRY_S[1])

    async def _outcome(
        self, driver: RunDriver, round_number: int, device: str, request: m.ExchangeRequest
    ) -> m.ExchangeOutcome | None:
        """Return the outcome of a message, None if the phase continues. The message is recorded then."""
        course = driver.course
        work, machine = course.work, course.round
        if work is None or machine is None or work.record.round != round_number or machine.has_ended:
            return m.ExchangeEnd(reason="the round has ended")
        phase = _phase(machine, request)
        recorded = await driver.messages.find(work.record, phase, device) if request.payload else None
        if recorded is not None and recorded != request.payload:
            raise InvalidInput(
                f"exchange: got a second message of the phase {phase} with other bytes, expected the recorded one; a "
                "device that lost its message gives the assignment up",
                code="FN-1604",
            )
        if request.payload and recorded is None:
            return await self._record(driver, phase, device, request.payload)
        return await self._answer(driver, phase, device)

    async def _record(self, driver: RunDriver, phase: Phase, device: str, payload: bytes) -> m.ExchangeOutcome | None:
        course = driver.course
        work, machine = course.work, course.round
        assert work is not None and machine is not None, "the caller has checked the Round"
        if machine.phase is not phase:
            # The phase is over without this message, is to come, or the Run is paused.
            return await self._answer(driver, phase, device)
        if not machine.holds(device) and not course.place(device):
            raise Conflict(
                f"exchange: device {device} has no place in round {work.record.round}, expected an open assignment; "
                "check in again",
                code="FN-1605",
            )
        facts = await driver.messages.facts(work.record, machine.num_rosters)
        try:
            await driver.messages.check(phase, facts, device, payload)
        except InvalidInput as exc:
            driver.updates.refuse(work.record.round, device, coded(exc))
            self.observer.concluded(
                AssignedWork(run_id=driver.run_id, round=work.record.round, device=device),
                WorkOutcome.REFUSED,
                exc.code,
            )
            self._activity.reject(device, coded(exc))
            raise
        try:
            recorded = await driver.messages.add(work.record, phase, device, payload)
        except Superseded as exc:
            course.leave(exc)
            raise Unavailable(
                f"run {driver.run_id}: another coordinator drives it; call again there", code="FN-0013"
            ) from exc
        machine = course.round
        # Once: a later roster is read from the record.
        is_under_way = work is course.work and machine is not None and machine.working is phase
        if recorded is not None and is_under_way and machine is not None and device not in machine.sent:
            course.step(e.MessageCommitted(device=device))
        return await self._answer(driver, phase, device)

    async def _answer(self, driver: RunDriver, phase: Phase, device: str) -> m.ExchangeOutcome | None:
        """Return the coordinator's message if the roster of a phase is frozen, None before that."""
        course = driver.course
        work, machine = course.work, course.round
        if work is None or machine is None or machine.has_ended:
            return m.ExchangeEnd(reason="the round has ended")
        facts = await driver.messages.facts(work.record, machine.num_rosters)
        roster = facts.rosters.get(phase.name)
        if roster is None:
            return None
        if device not in roster:
            return m.ExchangeEnd(reason=f"the round goes on without this device: its message of {phase} was too late")
        try:
            answer = await driver.messages.answer(phase, facts, device)
        except Damaged as exc:
            # No repetition gives another answer. The first of the devices that wait ends the Round.
            if course.round is not None and course.round.phase is not FAILING:
                course.report(work, e.Broken(reason=f"{exc}; {SEE_LOG}"))
                course.announce()
            return m.ExchangeEnd(reason="the round has failed")
        if answer is None:
            reason = f"the round goes on without this device, which the protocol leaves out after {phase}"
            driver.updates.give_up(work.record.round, device, reason)
            return m.ExchangeEnd(reason=reason)
        return m.ExchangeAnswer(message=answer)


def _phase(machine: Round, request: m.ExchangeRequest) -> Phase:
    """Return the phase of a message whose size is within its limits. Raises InvalidInput."""
    known = {name: each.exchange for name, each in machine.protocol.phases.items() if each.exchange is not None}
    exchange = known.get(request.phase)
    if exchange is None:
        raise InvalidInput(
            f"exchange: got the phase {request.phase!r}, expected one with messages of the protocol "
            f"{machine.protocol.name}: {sorted(known)}",
            code="FN-1602",
        )
    size_bytes = len(request.payload)
    if size_bytes > exchange.max_bytes or (exchange.max_bytes and not size_bytes):
        expected = f"1 to {exchange.max_bytes} bytes" if exchange.max_bytes else "no bytes"
        raise InvalidInput(
            f"exchange: got a message of {size_bytes} bytes in the phase {request.phase}, expected {expected}",
            code="FN-1603",
        )
    return machine.protocol.phases[request.phase]

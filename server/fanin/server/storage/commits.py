"""Group commit: Updates that arrive while a transaction is being synced share the next transaction.

A sync takes the disk milliseconds, for one row as for a hundred. Without groups, devices that finish together would
wait for one sync each. A device is answered only after the transaction with its own row is durable.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from fanin.server.storage.lanes import Lane
from fanin.server.storage.sqlite.rounds import CommittedUpdate, RoundStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    update: CommittedUpdate
    buffer: int
    answer: asyncio.Future[CommittedUpdate | None] = field(compare=False)


class GroupCommit:
    """Commits all waiting Updates in one transaction."""

    def __init__(self, rounds: RoundStore, store_lane: Lane) -> None:
        self._rounds = rounds
        self._store_lane = store_lane
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """Commit one Update together with others. See ``RoundStore.commit``."""
        answer: asyncio.Future[CommittedUpdate | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(update=update, buffer=buffer, answer=answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._commit_all(), name="group commit")
        return await answer

    async def _commit_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            updates = [(waiting.update, waiting.buffer) for waiting in group]
            outcome = asyncio.ensure_future(self._store_lane(partial(self._rounds.commit, updates)))
            await asyncio.wait({outcome})
            # Every waiting caller must receive the error, of whatever kind.
            problem = outcome.exception()
            for index, waiting in enumerate(group):
                if waiting.answer.done():
                    continue
                if problem is not None:
                    waiting.answer.set_exception(problem)
                else:
                    waiting.answer.set_result(outcome.result()[index])
        self._worker = None

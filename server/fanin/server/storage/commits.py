"""Group commit: Updates that come while a transaction is being synced share the next one.

A sync takes the disk milliseconds, whether for one row or for a hundred; devices that end together would else queue
for one sync each. Nobody is answered before the transaction that holds the own row is durable.
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
    """Commits Updates, as many together as there are."""

    def __init__(self, rounds: RoundStore, store_lane: Lane) -> None:
        self._rounds = rounds
        self._store_lane = store_lane
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """``RoundStore.commit``, in company."""
        answer: asyncio.Future[CommittedUpdate | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(update=update, buffer=buffer, answer=answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._commit_all(), name="group commit")
        return await answer

    async def _commit_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            wanted = [(waiting.update, waiting.buffer) for waiting in group]
            outcome = asyncio.ensure_future(self._store_lane(partial(self._rounds.commit, wanted)))
            await asyncio.wait({outcome})
            # Each of those who wait must hear of what went wrong, whatever it was.
            problem = outcome.exception()
            for index, waiting in enumerate(group):
                if waiting.answer.done():
                    continue
                if problem is not None:
                    waiting.answer.set_exception(problem)
                else:
                    waiting.answer.set_result(outcome.result()[index])
        self._worker = None

"""Group commit: Updates that arrive while a transaction is being synced share the next transaction.

A sync takes the disk milliseconds, for one row as for a hundred. Without groups, devices that finish together would
wait for one sync each. A device is answered only after the transaction with its own row is durable.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fanin.protos.errors import Superseded
from fanin.server.storage.lanes import Lane
from fanin.server.storage.records import CommittedUpdate
from fanin.server.storage.sqlite.writer import Candidate, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    candidate: Candidate
    answer: asyncio.Future[CommittedUpdate | None] = field(compare=False)


class GroupCommit:
    """Commits all waiting Updates, of all Runs, in one transaction.

    Args:
        commit_all: Commits Updates in one transaction (``writer.commit_all``).
        store_lane: The lane of the database.
    """

    def __init__(self, commit_all: Callable[[Sequence[Candidate]], list[Verdict]], store_lane: Lane) -> None:
        self._commit_together = commit_all
        self._store_lane = store_lane
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def commit(self, candidate: Candidate) -> CommittedUpdate | None:
        """Commit one Update together with others. See ``RoundWriter.commit``."""
        answer: asyncio.Future[CommittedUpdate | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(candidate=candidate, answer=answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._commit_all(), name="group commit")
        return await answer

    async def _commit_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            candidates = [waiting.candidate for waiting in group]
            outcome = asyncio.ensure_future(self._store_lane(partial(self._commit_together, candidates)))
            await asyncio.wait({outcome})
            # Every waiting caller must receive the error.
            problem = outcome.exception()
            for index, waiting in enumerate(group):
                if waiting.answer.done():
                    continue
                if problem is not None:
                    waiting.answer.set_exception(problem)
                    continue
                verdict = outcome.result()[index]
                if isinstance(verdict, Superseded):
                    waiting.answer.set_exception(verdict)
                else:
                    waiting.answer.set_result(verdict)
        self._worker = None

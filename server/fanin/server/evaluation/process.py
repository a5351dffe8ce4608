"""The process that evaluates, seen from the coordinator: it starts on demand and ends with the coordinator.

The coordinator writes jobs to its standard input and reads replies from its standard output. The end of the input, also
after a SIGKILL of the coordinator, ends the process.
"""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from fanin.protos.errors import Unavailable
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply

TIMEOUT_S: Final = 3600.0
"""Seconds until an evaluation counts as hung. A data set of a million examples takes minutes."""
EXIT_S: Final = 5.0
"""Seconds from the end of the output of a process until its end. Without a signal it takes milliseconds."""
MAX_LINE_BYTES: Final = 1 << 20


class EvaluatorProcess:
    """One process, which carries out one job at a time.

    Args:
        command: The program and its arguments.
        timeout_s: Seconds until a job without a reply counts as hung.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, None if there is none now."""
        return None if self._process is None else self._process.pid

    async def ask(self, job: EvaluationJob) -> EvaluationReply:
        """Carry out a job.

        Raises:
            Unavailable: The process cannot be started, has ended, or did not reply in time. The next job starts a new
                one.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await self._exchange(job.to_line())
            return EvaluationReply.from_line(line)
        except TimeoutError as exc:
            await self.stop()
            raise Unavailable(
                f"evaluation: no reply within {self._timeout_s:g} s; its process was ended", code="FN-0662"
            ) from exc
        except (OSError, ValueError, TypeError) as exc:
            status = await self._exit_status()
            raise Unavailable(
                f"evaluation: its process ended without a reply (status {status})", code="FN-0662"
            ) from exc
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def stop(self) -> int | None:
        """End the process at once. Return its status, None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    async def _exit_status(self) -> int | None:
        """End a process that closed its output. Return its own status: a signal to a dead process would hide it."""
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await self._process.wait()
        return await self.stop()

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None:
            # A separate session: Ctrl-C in a terminal must reach only the coordinator, which then ends this process.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES, start_new_session=True
            )
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None, "both are pipes"
        writer.write(line)
        await writer.drain()
        return await reader.readline()

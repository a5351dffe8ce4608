"""Commands of operators. Any process may carry them out, so they carry no epoch; the driver follows the record."""

from typing import Protocol

from fanin.protos.messages import Command, Reclaim, VersionPublished
from fanin.server.storage.records import Newest


class CommandStore(Protocol):
    """The transactions of commands: each has the change, its events and the id of the command.

    A repeated command changes nothing more, even if the Run has changed since. A refused command is not recorded. Every
    method raises Conflict if another command used the id.
    """

    async def is_done(self, command: Command) -> bool:
        """Return whether a command was carried out before.

        Raises:
            Conflict: Another command used the id.
        """
        ...

    async def pause(self, command: Command, now_s: float) -> None:
        """Pause a Run, and halt the deadline of its open Round.

        Args:
            command: The command.
            now_s: Wall time, in seconds.

        Raises:
            Conflict: The Run is neither running nor paused.
        """
        ...

    async def resume(self, command: Command, num_rounds: int, now_s: float) -> None:
        """Resume a Run, and start the deadline of its open Round again.

        Args:
            command: The command.
            num_rounds: Rounds to open from now on; 0 keeps the number that is left.
            now_s: Wall time, in seconds.

        Raises:
            Conflict: The Run is running and ``num_rounds`` is not 0, or it has ended and ``num_rounds`` is 0.
        """
        ...

    async def stop(self, command: Command, now_s: float, *, is_stuck: bool = False) -> None:
        """Stop a Run and fail its open Round.

        Args:
            command: The command.
            now_s: Wall time, in seconds.
            is_stuck: Whether the driver repeats a failed effect. If not, a closed Round still publishes its Version.
                If so, the closed Round fails too, even if the Run was stopped before.

        Raises:
            Conflict: The Run has ended.
        """
        ...

    async def publish(self, run_id: str, newest: Newest, now_s: float, command: Command | None = None) -> None:
        """Add a Version from outside, and resume the Run if the event has a number of Rounds. A paused Round fails.

        Args:
            run_id: The Run.
            newest: The Version and its event.
            now_s: Wall time, in seconds.
            command: The command to adopt the Version, if there is one.

        Raises:
            Conflict: The Run is running, a Round is being folded, or the Version does not follow the newest one.
        """
        ...

    async def reclaim(self, reclaim: Reclaim, event: VersionPublished, now_s: float) -> None:
        """Begin the next epoch of a Run: record its delegation and its first Version, and remove the earlier keys.

        A Round that is open or being folded fails. The Run keeps its state, or is running if ``reclaim`` has a number
        of Rounds.

        Args:
            reclaim: The request, which was verified.
            event: The event of the Version.
            now_s: Wall time, in seconds.

        Raises:
            Conflict: The Version does not follow the newest one, in the next epoch.
        """
        ...

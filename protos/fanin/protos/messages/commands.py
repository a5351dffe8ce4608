"""Commands of an operator to a Run: pause, resume, stop, adopt a Version, prune its record."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.fields import Mark, OneOf
from fanin.protos.messages.principals import Principal
from fanin.protos.names import MAX_NUMBER, check_name
from fanin.protos.plans import MAX_TIMES, RetentionPlan

if TYPE_CHECKING:
    from fanin.v1 import control_pb2 as pb


def check_rounds(rounds: int) -> None:
    """Raise InvalidInput unless a Run can be continued for this number of Rounds."""
    if not 0 <= rounds <= MAX_TIMES:
        raise InvalidInput(f"rounds: got {rounds}, expected 0 to {MAX_TIMES}", code="FN-0150")


def check_version_number(run_id: str, number: int) -> None:
    """Raise NotFound for a number that no store can hold."""
    if number > MAX_NUMBER:
        raise NotFound(f"run {run_id[:64]!r}: has no version {number}", code="FN-0611")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Assign no further devices, and stop the clock of the open Round's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue for ``rounds`` Rounds from now on. With 0, continue for the Rounds that were left."""

    rounds: int = 0

    def __post_init__(self) -> None:
        check_rounds(self.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the Run. An open Round fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Publish an existing Version again as the newest one of this Run: a rollback or a promotion.

    Attributes:
        from_run_id: The Run that has the Version; "" for this Run.
        number: The Version's number there.
        rounds: Rounds to run from it; 0 for none.
    """

    from_run_id: str = ""
    number: int
    rounds: int = 0

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        if self.from_run_id:
            check_name("adopt: run", self.from_run_id)
        if not 0 <= self.number <= MAX_NUMBER:
            raise InvalidInput(f"version: got number {self.number}, expected 0 to {MAX_NUMBER}", code="FN-0151")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to a Run.

    Attributes:
        command_id: An id that the operator chooses. The coordinator executes an id at most once.
        run_id: The Run.
        what: The command.
        by: The principal that sent it, as the coordinator authenticated it. It is not part of the message. None for a
            command from within the coordinator's process.
    """

    command_id: str
    run_id: str
    what: Annotated[
        Pause | Resume | Stop | Adopt,
        OneOf(unknown="command: got {}, expected one that this fanin knows; install a newer one"),
    ]
    by: Annotated[Principal | None, Mark.LOCAL] = None

    def __post_init__(self) -> None:
        check_name("command id", self.command_id)

    @staticmethod
    def check_message(message: "pb.CommandRequest") -> None:
        """Raise NotFound for a Version that no Run can have."""
        check_version_number(message.adopt.from_run_id or message.run_id, message.adopt.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """A request to remove what the retention of a Run does not keep, or to say what would go.

    Attributes:
        run_id: The Run.
        retention: Replaces the retention of the Plan and of the coordinator; None: theirs.
        apply: Whether to remove it.
    """

    run_id: str
    retention: RetentionPlan | None = None
    apply: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a Run has that its retention does not keep.

    Attributes:
        num_versions: Versions without their parameters from then on.
        version_bytes: Bytes of their Chunks that nothing else names.
        num_rounds: Rounds without their Updates from then on.
        num_updates: These Updates.
        update_bytes: The bytes of their payloads.
        num_events: Events.
        applied: Whether it was removed.
        retention: The limits in effect.
        num_stored_versions: Versions with stored parameters, before it was removed.
        num_stored_rounds: Rounds with stored Updates.
        num_young_versions: Versions that only their age keeps.
        num_young_rounds: Rounds that only their age keeps.
        old_enough_at: When the first of these is old enough, in seconds since the Unix epoch; 0 without any.
    """

    num_versions: int = 0
    version_bytes: int = 0
    num_rounds: int = 0
    num_updates: int = 0
    update_bytes: int = 0
    num_events: int = 0
    applied: bool = False
    retention: RetentionPlan | None = None
    num_stored_versions: int = 0
    num_stored_rounds: int = 0
    num_young_versions: int = 0
    num_young_rounds: int = 0
    old_enough_at: float = 0.0

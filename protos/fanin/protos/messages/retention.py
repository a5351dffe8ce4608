"""Retention: the removal of what a Run no longer needs."""

from dataclasses import dataclass

from fanin.protos.plans import RetentionPlan


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
    """

    num_versions: int = 0
    version_bytes: int = 0
    num_rounds: int = 0
    num_updates: int = 0
    update_bytes: int = 0
    num_events: int = 0
    applied: bool = False

"""The decisions of a store's transactions: pure functions of the rows that a transaction has read.

Every store calls them within its transactions, so all stores accept and refuse the same calls with the same text. A
refused call raises before the transaction writes.
"""

from collections.abc import Collection, Sequence

from fanin.protos.errors import Conflict, Superseded
from fanin.protos.messages import (
    MAX_WARNINGS,
    Command,
    LedgerRow,
    Principal,
    PrivacyPopulation,
    RoundFailed,
    RunState,
    RunWarned,
    StartRun,
    Version,
    relation_of,
)
from fanin.protos.plans import CohortPlan
from fanin.protos.texts import counted, listed
from fanin.server.storage.records import AuditFact, Lease, RoundMark, Shortage, by_name


def by_text(command: Command) -> str:
    """Return who sent a command, for reasons that operators read."""
    return f"by {command.by}" if command.by is not None else "by an operator"


def check_lease(lease: Lease, newest: Lease) -> None:
    """Check that a driver still has the lease of a Run.

    Args:
        lease: The lease of the driver that writes.
        newest: The newest lease of the Run.

    Raises:
        Superseded: Another driver took the Run.
    """
    if lease.epoch != newest.epoch:
        raise Superseded(
            f"run {lease.run_id}: got a write of epoch {lease.epoch}, expected epoch {newest.epoch}; the driver in "
            f"{newest.holder} has taken the run",
            code="FN-0013",
        )


def lost_key(run_id: str) -> Conflict:
    """Return the error for a Run whose key is not the one to which its publisher delegated."""
    return Conflict(
        f"the key that signs the versions of run {run_id} is lost, and devices accept no other; restore fanin.db from "
        f"a backup, or let the publisher delegate to a new one: fanin reclaim {run_id} --key publisher.key",
        code="FN-0616",
    )


def check_new_key(run_id: str, epoch: int, current: int) -> None:
    """Check that an epoch of a Run may get a key.

    Args:
        run_id: The Run.
        epoch: The epoch without a key.
        current: The epoch of the Run, 0 if it is not recorded.

    Raises:
        Conflict: The Run had a key in the epoch, or the epoch is not the next one.
    """
    if epoch == current:
        raise lost_key(run_id)
    if epoch != current + 1:
        is_known = f"it is in epoch {current}" if current else "there is no such run yet"
        raise Conflict(
            f"run {run_id}: got a key for epoch {epoch}, expected epoch {current + 1}: {is_known}", code="FN-0624"
        )


def failure_of(round_number: int, num_updates: int, cohort: CohortPlan, shortage: Shortage) -> RoundFailed:
    """Return the failure of a Round without a quorum.

    Args:
        round_number: The Round.
        num_updates: Its Updates.
        cohort: The Plan's quorum and deadline.
        shortage: What the event says.
    """
    updates = counted(num_updates, "update")
    reason = f"{updates} within {cohort.deadline_s:g} s, expected at least {cohort.quorum} (cohort.quorum)"
    return RoundFailed(
        round=round_number,
        reason=f"{reason}; {shortage.cause}" if shortage.cause else reason,
        others_wait=shortage.others_wait,
    )


def lacks_messages(round_number: int, phase: str, num_messages: int, quorum: int, *, others_wait: bool) -> RoundFailed:
    """Return the failure of a Round whose phase has too few messages. ``others_wait`` is that of ``failure_of``."""
    messages = counted(num_messages, "message")
    reason = f"{messages} in the phase {phase}, expected at least {quorum}; devices dropped out, or are too slow"
    return RoundFailed(round=round_number, reason=reason, others_wait=others_wait)


def left_until(deadline_at_s: float, now_s: float) -> float:
    """Return the seconds to a deadline, at least 0."""
    return max(deadline_at_s - now_s, 0.0)


def new_warnings(warnings: Sequence[RunWarned], known: Collection[tuple[str, str]]) -> tuple[RunWarned, ...]:
    """Return the warnings to record beside those that a Run has, which are known by code and subject."""
    by_key = {(warning.code, warning.subject): warning for warning in warnings if not warning.is_over}
    return tuple(each for key, each in by_key.items() if key not in known)[: max(MAX_WARNINGS - len(known), 0)]


def ended_warnings(warnings: Sequence[RunWarned], known: Collection[tuple[str, str]]) -> tuple[RunWarned, ...]:
    """Return the ends of warnings that a Run has. Only they are recorded."""
    return tuple(each for each in warnings if each.is_over and (each.code, each.subject) in known)


def changes_on_pause(run_id: str, before: RunState) -> bool:
    """Return whether a pause changes a Run. Raises Conflict if the Run is neither running nor paused."""
    if before not in (RunState.RUNNING, RunState.PAUSED):
        raise Conflict(f"run {run_id}: it is {before.value}, there is nothing to pause", code="FN-0621")
    return before is RunState.RUNNING


def changes_on_resume(run_id: str, before: RunState, num_rounds: int) -> bool:
    """Return whether the command to resume changes a Run.

    Args:
        run_id: The Run.
        before: The state of the Run.
        num_rounds: Rounds to open from now on; 0 keeps the number that is left.

    Raises:
        Conflict: The Run is running and ``num_rounds`` is not 0, or it has ended and ``num_rounds`` is 0.
    """
    if before is RunState.RUNNING and num_rounds:
        raise Conflict(f"run {run_id}: it is running; pause it to give it another number of rounds", code="FN-0621")
    if before in (RunState.FINISHED, RunState.STOPPED) and not num_rounds:
        raise Conflict(f"run {run_id}: is {before.value}; pass --rounds N to continue it", code="FN-0621")
    return before is not RunState.RUNNING


def marks_to_fail_on_stop(run_id: str, before: RunState, *, is_stuck: bool) -> tuple[RoundMark, ...]:
    """Return the marks of the Rounds that fail when a Run is stopped. A failed Run is stopped to acknowledge that.

    Args:
        run_id: The Run.
        before: The state of the Run.
        is_stuck: Whether a failed effect is being repeated. Then a closed Round fails too.

    Raises:
        Conflict: The Run has ended.
    """
    if before is RunState.FINISHED:
        raise Conflict(f"run {run_id}: it is {before.value}, there is nothing to stop", code="FN-0621")
    return (RoundMark.OPEN, RoundMark.CLOSED) if is_stuck else (RoundMark.OPEN,)


def check_publication(version: Version, newest: Version, state: RunState, marks: Collection[RoundMark]) -> None:
    """Check that a Version from outside may become the newest one.

    Args:
        version: The Version.
        newest: The newest Version.
        state: The state of the Run.
        marks: The marks of the Run's Rounds.

    Raises:
        Conflict: The Run is running, a Round is being folded, or the Version does not follow the newest one in its
            epoch.
    """
    run_id = version.run_id
    if state is RunState.RUNNING:
        raise Conflict(f"run {run_id}: a round is open; publish when the run rests, or pause it", code="FN-0623")
    if RoundMark.CLOSED in marks:
        raise Conflict(
            f"run {run_id}: a round is being folded; publish again when its version is there", code="FN-0623"
        )
    check_next(version, newest, newest.epoch)


def check_not_restored(run_id: str, restored_at_s: float | None) -> None:
    """Raise Conflict if a Run was restored from a backup and its publisher did not reclaim it since."""
    if restored_at_s is not None:
        raise Conflict(
            f"run {run_id}: restored from a backup, and devices may have seen later versions; {restored_text(run_id)}",
            code="FN-1445",
        )


def restored_text(run_id: str) -> str:
    """Return what a Run waits for that was restored from a backup."""
    return f"waits for its publisher: fanin reclaim {run_id} --key publisher.key, then fanin resume {run_id}"


def reclaimed_text(run_id: str) -> str:
    """Return why a Run rests that was restored from a backup, after its publisher reclaimed it."""
    return f"its publisher reclaimed it after a restore, continue it: fanin resume {run_id}"


def check_next(version: Version, newest: Version, epoch: int) -> None:
    """Check that a Version follows the newest one of its Run and has an epoch. Raises Conflict."""
    if (version.epoch, version.number, version.parent) != (epoch, newest.number + 1, newest.number):
        in_epoch = "" if version.epoch == epoch else f", in epoch {epoch} instead of {version.epoch}"
        raise Conflict(
            f"run {version.run_id}: got version {version.number} made from {version.parent}, "
            f"expected {newest.number + 1} made from {newest.number}{in_epoch}",
            code="FN-0624",
        )


def check_same_command(command_id: str, sha256: str, known: str | None) -> bool:
    """Return whether a command was carried out before.

    Args:
        command_id: The id of the command.
        sha256: The digest of the command.
        known: The digest that is recorded under the id, None without one.

    Raises:
        Conflict: Another command used the id.
    """
    if known is not None and known != sha256:
        raise Conflict(f"command {command_id}: the id is taken by another command; choose another", code="FN-0625")
    return known is not None


def population_of(start: StartRun, now_s: float) -> PrivacyPopulation:
    """Return the population that a Run with a mechanism of privacy begins, if it is not recorded."""
    privacy = start.plan.privacy
    return PrivacyPopulation(
        name=privacy.population,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        size=privacy.population_size,
        run_id=start.run_id,
        begun_at=now_s,
        relation=relation_of(privacy),
    )


def check_population(start: StartRun, known: PrivacyPopulation) -> None:
    """Check that the budget of a Plan is within that of its population, and that both make one claim.

    An epsilon that is not larger, at a delta that is not larger, implies the recorded budget: epsilon falls with delta.

    Raises:
        Conflict: The Plan allows more, or its claim has other neighbouring federations.
    """
    privacy = start.plan.privacy
    relation = population_of(start, 0.0).relation
    if relation != known.relation:
        raise Conflict(
            f"run {start.run_id}: got privacy.sampling {privacy.sampling!r}, whose claim is {relation}, for the "
            f"population {known.name}, expected a claim of {known.relation}, as of its first run {known.run_id}: one "
            "epsilon sums up one kind of claim; change privacy.sampling, or name another population",
            code="FN-1720",
        )
    if privacy.epsilon > known.epsilon or privacy.delta > known.delta:
        raise Conflict(
            f"run {start.run_id}: got epsilon {privacy.epsilon:g} at delta {privacy.delta:g} for the population "
            f"{known.name}, expected at most epsilon {known.epsilon:g} and delta {known.delta:g}, which its first run "
            f"{known.run_id} recorded for ever; name these or smaller ones in the plan",
            code="FN-1690",
        )


def check_charge(name: str, rows: Sequence[LedgerRow], recorded: Sequence[LedgerRow], newest: int) -> bool:
    """Return whether rows are to be appended to a ledger; False if they were appended before.

    Args:
        name: The population.
        rows: The rows.
        recorded: The rows of the ledger from the number of the first one on.
        newest: The number of the newest row.

    Raises:
        Conflict: The ledger has other rows.
    """
    if not rows or rows[0].number == newest + 1:
        return True
    same = [(each.run_id, each.round, each.release, each.count) for each in recorded[: len(rows)]]
    if same != [(each.run_id, each.round, each.release, each.count) for each in rows]:
        raise Conflict(
            f"population {name}: got a row {rows[0].number} for its ledger, expected {newest + 1}; another run or "
            "administrator charged it meanwhile: repeat the command",
            code="FN-1692",
        )
    return False


def uncharged_text(population: str, runs: Sequence[str]) -> str:
    """Return why the Runs of a population wait, and what to do."""
    return (
        f"the privacy ledger of the population {population} may lack what run {listed(runs)} released elsewhere: after "
        "the backup that was restored, in the folder of which this one is a copy, after files of this folder were put "
        "back, or before its publisher reclaimed it; an administrator charges it: fanin privacy charge "
        f"{population} --rounds N, with at least the number of rounds that closed there"
    )


def check_charged(run_id: str, population: str, uncharged: Sequence[str]) -> None:
    """Raise Conflict if a Run waits, because its population may lack releases that are not charged."""
    if uncharged:
        raise Conflict(f"run {run_id}: {uncharged_text(population, uncharged)}", code="FN-1691")


def begun_fact(population: PrivacyPopulation, by: Principal | None) -> AuditFact:
    """Return the audit entry of a new population."""
    budget = f"epsilon {population.epsilon:g}, delta {population.delta:g}, size {population.size}"
    subject = f"population {population.name}: {budget}, run {population.run_id}"
    return AuditFact(principal=by_name(by), call="BeginPopulation", subject=subject)


def charge_fact(name: str, rows: Sequence[LedgerRow], runs: Sequence[str], by: Principal | None) -> AuditFact:
    """Return the audit entry of lost intervals that are charged."""
    charged = ", ".join(f"{counted(each.count, 'round')} of run {each.run_id}" for each in rows) or "no round"
    subject = f"population {name}: {charged}; blocked no longer: {', '.join(runs) or 'none'}"
    return AuditFact(principal=by_name(by), call="ChargePopulation", subject=subject)
